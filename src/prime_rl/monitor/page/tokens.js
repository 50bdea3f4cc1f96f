// Tokens as text, colored by one of their streams.

// Texts of tokens. A character may be spread over several tokens: it shows at the last of them.
function tokenTexts(tokens, vocab) {
  const decoder = new TextDecoder("utf-8");
  return tokens.map((token, i) => {
    const letters = vocab[token];
    if (letters === undefined) return `⟨${token}⟩`;
    const raw = Uint8Array.from(letters, (letter) => letter.charCodeAt(0));
    return decoder.decode(raw, { stream: i < tokens.length - 1 });
  });
}

function colorings(detail) {
  return [...Object.keys(COLORING).filter((name) => detail.streams[name]), "none"];
}

// Background of a token: strength from 0 to 1 and which of the two colors.
function tint(name, value, scale) {
  if (name === "logprob") return ["var(--surprise)", Math.min(Math.sqrt(-value / 6), 1)];
  if (name === "version") return [`var(--c${value % 6})`, 0.55];
  if (name === "none" || !value) return ["transparent", 0];
  return [value > 0 ? "var(--plus)" : "var(--minus)", Math.min(Math.sqrt(Math.abs(value) / scale), 1)];
}

// Differences are shown against the largest one of what is compared, so that small ones can be told apart.
function tintScale(name, details) {
  let largest = name === "advantage" ? 0.2 : 0.05;
  for (const detail of details) for (const value of detail.streams[name] || []) largest = Math.max(largest, Math.abs(value));
  return largest;
}

function tokenView(detail, vocab, name, { scale, onlyWritten = false } = {}) {
  const texts = tokenTexts(detail.tokens, vocab), stream = detail.streams[name] || [];
  const view = el("div", { class: "tokens" });
  texts.forEach((text, i) => {
    const written = detail.mask[i] > 0;
    if (onlyWritten && !written) return;
    const [color, strength] = written ? tint(name, stream[i] ?? 0, scale) : ["transparent", 0];
    const token = el("span", { class: written ? "token" : "token given", "data-i": i }, text.replaceAll("\n", "⏎\n") || "·");
    if (strength) token.style.background = `color-mix(in oklab, ${color} ${Math.round(8 + 62 * strength)}%, transparent)`;
    view.append(token);
  });
  view.addEventListener("pointerover", (event) => {
    const i = event.target.dataset?.i;
    if (i === undefined) return hideTip();
    showTip(event, el("b", {}, `token ${i}: id ${detail.tokens[i]}`), tokenFacts(detail, Number(i)));
  });
  view.addEventListener("pointerleave", hideTip);
  return view;
}

function tokenFacts(detail, i) {
  if (!(detail.mask[i] > 0)) return el("div", {}, "given, not written by the policy");
  const lines = Object.entries(detail.streams).map(([name, values]) => el("div", { class: "key" }, COLORING[name][0].toLowerCase(), el("b", {}, number(values[i]))));
  const logprob = detail.streams.logprob?.[i];
  if (logprob !== undefined) lines.push(el("div", { class: "key" }, "probability", el("b", {}, number(Math.exp(logprob), 3))));
  return lines;
}

function legendOf(name, scale) {
  if (name === "none" || name === "version") return null;
  const [low, high] = name === "logprob" ? ["certain", "surprising"] : [number(-scale, 2), `+${number(scale, 2)}`];
  return el("span", { class: `scale ${name === "logprob" ? "one" : "two"}` }, low, el("i", {}), high);
}
