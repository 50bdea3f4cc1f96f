// The run at a glance: one sentence, the numbers that matter, what to change, evaluations and what is on disk.

function overview(data, source, go) {
  return [
    el("p", { class: "sentence" }, sentence(data, source)),
    el("div", { class: "tiles" }, TILES.map(([name, label]) => tile(data, name, label, go))),
    findings(data),
    evaluations(data, source.facts.kinds.evaluation),
    onDisk(data),
    source.facts.count ? el("p", { class: "lead" }, "Numbers only summarise. ", el("a", { href: "#rollouts" }, "Read a few rollouts"), " before believing them.") : null,
  ];
}

function sentence(data, source) {
  const { run } = data, reward = curve(data, "reward/mean"), loss = curve(data, "loss/mean");
  const { training, evaluation } = source.facts.kinds, envs = (training ?? evaluation)?.envs.filter((env) => env !== "none") ?? [];
  const steps = (loss || reward)?.steps.at(-1) ?? 0;
  const what = reward ? "Asynchronous reinforcement learning" : loss ? "Supervised fine-tuning" : data.evals.length ? "Evaluation" : "A run";
  const parts = [`${what} of `, el("b", {}, shortName(run.model)), envs.length ? ` on ${envs.join(", ")}` : "", ": ",
    loss || reward ? `${steps.toLocaleString("en")}${run.max_steps ? ` of ${run.max_steps.toLocaleString("en")}` : ""} steps` : "",
    (loss || reward) && training ? " and " : "", training || evaluation ? count(source.total ?? (training ?? evaluation).count, "rollout") : "",
    run.started && run.changed > run.started ? ` in ${duration(run.changed - run.started)}` : "", ". "];
  const best = reward || loss;
  if (best && best.values.length > 4) {
    const ends = [best.values.slice(0, 3), best.values.slice(-3)].map((v) => v.reduce((a, b) => a + b, 0) / v.length);
    const verb = Math.abs(ends[1] - ends[0]) < 0.02 * Math.max(...ends.map(Math.abs), 1e-9) ? "stayed at" : ends[1] > ends[0] ? "rose" : "fell";
    parts.push(reward ? "The reward " : "The loss ", verb, verb === "stayed at" ? ` ${number(ends[1], 3)}.` : ` from ${number(ends[0], 3)} to ${number(ends[1], 3)}.`);
  }
  return parts;
}

function shortName(model) {
  const parts = String(model || "a model").split("/").filter(Boolean);
  return parts.length > 3 ? parts.slice(-3).join("/") : parts.join("/");
}

function tile(data, name, label, go) {
  const c = curve(data, name);
  if (!c) return null;
  const recent = c.values.slice(-10).reduce((a, b) => a + b, 0) / Math.min(c.values.length, 10);
  return el("button", { class: "tile", title: MEANING[name], onclick: () => go("curves") }, el("small", {}, label), el("b", {}, number(c.values.at(-1))),
    el("small", {}, `last ten ${number(recent, 3)}`), sparkline(c));
}

function findings(data) {
  if (!data.findings.length) return null;
  return el("section", { class: "panel" }, el("h2", {}, "What happened, and what to change"), el("dl", { class: "findings" },
    data.findings.map(([topic, text, advice]) => [el("dt", {}, topic), el("dd", {}, capital(text), ".", advice && el("p", { class: "advice" }, capital(advice), "."))])));
}

function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

function evaluations(data, recorded) {
  const wanted = (name) => /^(avg@\d+|pass@\d+|pass\^\d+|completion_len\/mean|is_truncated\/mean|error\/mean)$/.test(name);
  if (!data.evals.length) return null;
  const names = [...new Set(data.evals.flatMap(({ summary }) => Object.keys(summary).filter((name) => wanted(name) && typeof summary[name] === "number")))];
  const link = (env, step) => `#rollouts?${new URLSearchParams({ kind: "evaluation", env, ...(step === null ? {} : { step }) })}`;
  return el("section", { class: "panel" }, el("h2", {}, "Evaluations"), el("div", { class: "wide" }, el("table", {},
    el("thead", {}, el("tr", {}, el("th", {}, "environment"), el("th", {}, "weights"), names.map((name) => el("th", { class: "num" }, name.replace("/mean", ""))))),
    el("tbody", {}, data.evals.map(({ env, step, summary }) => el("tr", {},
      el("td", {}, recorded?.envs.includes(env) && recorded.steps.includes(step ?? 0) ? el("a", { href: link(env, step), title: "read its rollouts" }, env) : env),
      el("td", {}, step === null || step === undefined ? "–" : `step ${step}`),
      names.map((name) => el("td", { class: "num" }, number(summary[name], 4), el("small", {}, spreadOf(summary, name))))))))));
}

// The 95 % interval where the evaluation wrote one, else twice its standard error.
function spreadOf(summary, name) {
  const [low, high] = ["ci_low", "ci_high"].map((end) => summary[`${name}/${end}`]);
  if (typeof low === "number" && typeof high === "number") return ` ${number(low, 2)} to ${number(high, 2)}`;
  const error = summary[`${name}/stderr`];
  return typeof error === "number" ? ` ± ${number(1.96 * error, 2)}` : "";
}

function onDisk(data) {
  if (!data.weights.length && !data.checkpoints.length) return null;
  const table = (title, rows, cells) => rows.length ? el("table", {}, el("caption", {}, title), rows.map((row) => el("tr", {}, cells(row)))) : null;
  return el("section", { class: "panel" }, el("h2", {}, "On disk"), el("div", { class: "two" },
    table("Published weights, usable as --model.name", data.weights.slice(-8).reverse(), (w) => [el("td", {}, el("code", {}, `${data.run.path}/${w.path}`)), el("td", { class: "num" }, bytes(w.bytes)),
      el("td", {}, `${count(w.tensors, "tensor")} ${w.dtypes.join(", ")}`)]),
    table("Checkpoints, to resume from", data.checkpoints.slice(-8).reverse(), (c) => [el("td", {}, `step ${c.step}`), el("td", { class: "num" }, bytes(c.bytes)), el("td", {}, c.parts.join(", ") || "incomplete")])));
}
