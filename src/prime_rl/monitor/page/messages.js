// A conversation: messages by role, reasoning, tool calls and their results.

const CHATML = /<\|im_start\|>(\w+)\n?([\s\S]*?)(?:<\|im_end\|>\n?|$)/g;
const SPECIAL = /(<think>[\s\S]*?(?:<\/think>|$)|<tool_call>[\s\S]*?(?:<\/tool_call>|$)|<tool_response>[\s\S]*?(?:<\/tool_response>|$))/g;

// Messages of a rollout. Tokens contain all turns; prompt and completion may lack intermediate ones.
function messagesOf(detail, vocab) {
  const text = detail.tokens.length ? tokenTexts(detail.tokens, vocab).join("") : "";
  const messages = [...text.matchAll(CHATML)].map(([, role, content]) => ({ role, content }));
  if (messages.length) return messages;
  const prompt = Array.isArray(detail.prompt) ? detail.prompt : [{ role: "user", content: detail.prompt }];
  const completion = Array.isArray(detail.completion) ? detail.completion : [{ role: "assistant", content: detail.completion }];
  return [...prompt, ...completion].filter((message) => message && (message.content || message.tool_calls || message.reasoning_content));
}

function conversation(detail, vocab) {
  const view = el("div", { class: "conversation" }, messagesOf(detail, vocab).map(bubble));
  if (detail.error) append(view, [el("section", { class: "bubble error" }, el("h4", {}, "error"), el("pre", {}, detail.error))]);
  append(view, [expectation(detail)]);
  return view;
}

// The expected answer beside the completion, with their difference, and the row's info.
function expectation(detail) {
  const expected = valueText(detail.answer), info = valueText(detail.info);
  return [expected && comparison(expected, lastAnswer(detail.completion)), info && collapsible("info", info)];
}

// A field of a row as text; "" if it is empty.
function valueText(value) {
  if (value === null || value === undefined || (typeof value === "object" && !Object.keys(value).length)) return "";
  return typeof value === "string" ? value : JSON.stringify(value, null, 1);
}

// Text of the last assistant message.
function lastAnswer(completion) {
  return plainText(Array.isArray(completion) ? contentOf(completion.findLast((message) => message?.role === "assistant") || {}) : completion).trim();
}

function comparison(expected, completion) {
  const { left, right, isComplete } = difference(expected, completion);
  const note = expected === completion ? "identical" : isComplete ? "contained in the completion" : "underlined: not in the completion";
  return el("section", { class: "comparison" },
    el("div", {}, el("h4", {}, "expected answer ", el("small", {}, note)), el("pre", {}, left)), el("div", {}, el("h4", {}, "completion"), el("pre", {}, right)));
}

function bubble(message) {
  const role = String(message.role || "unknown");
  const calls = (message.tool_calls || []).map((call) => toolCall(call.function || call));
  const known = ["system", "user", "assistant", "tool"].includes(role) ? role : "other";
  const reasoning = message.reasoning_content && collapsible("reasoning", plainText(message.reasoning_content));
  return el("section", { class: `bubble ${known}` }, el("h4", {}, role), reasoning, contentParts(plainText(contentOf(message))), calls);
}

function contentOf(message) {
  return typeof message.content === "string" || Array.isArray(message.content) ? message.content : "";
}

function contentParts(text) {
  return text.split(SPECIAL).filter((part) => part.trim()).map((part) => {
    if (part.startsWith("<think>")) return collapsible("reasoning", stripTag(part, "think"));
    if (part.startsWith("<tool_call>")) return toolCall(parseJson(stripTag(part, "tool_call")) || { name: "tool call", arguments: stripTag(part, "tool_call") });
    if (part.startsWith("<tool_response>")) return collapsible("tool result", stripTag(part, "tool_response"), true);
    return el("pre", {}, part.trim());
  });
}

function stripTag(part, tag) {
  return part.replace(`<${tag}>`, "").replace(`</${tag}>`, "").trim();
}

function collapsible(title, text, open = false) {
  return el("details", { class: "aside", open }, el("summary", {}, title, el("small", {}, ` ${count(text.length, "character")}`)), el("pre", {}, text));
}

function toolCall(call) {
  const values = typeof call.arguments === "string" ? parseJson(call.arguments) ?? call.arguments : call.arguments;
  const rows = values && typeof values === "object"
    ? el("table", {}, Object.entries(values).map(([name, value]) => el("tr", {}, el("th", {}, name), el("td", {}, typeof value === "string" ? value : JSON.stringify(value)))))
    : el("pre", {}, String(values ?? ""));
  return el("div", { class: "call" }, el("b", {}, "⚙ ", String(call.name || "tool")), rows);
}

function parseJson(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}
