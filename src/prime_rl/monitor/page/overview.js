// Overview: one sentence, main metrics, findings, evaluations, and files on disk.

function overview(data, source, go) {
  return [
    el("p", { class: "sentence" }, sentence(data, source)),
    progress(data.run, source),
    checkStrip(data),
    alertsPanel(data.alerts.slice(0, 5), data.alerts.length),
    mainChart(data, source, go),
    el("div", { class: "tiles" }, tilesOf(data).map(([name, label]) => tile(data, name, label, go))),
    scoresPanel(data),
    tenantsPanel(data.tenants ?? []),
    findings(data),
    evaluations(data, source.facts.kinds.evaluation),
    contextTree(data.contexts ?? []),
    onDisk(data),
    source.facts.count ? el("p", { class: "lead" }, "Check individual ", el("a", { href: "#rollouts" }, "rollouts"), " too: metrics only summarize them.") : null,
  ];
}

// Steps done, the time so far and what remains. Both times advance between two updates while the run is running.
function progress(run, source) {
  if (!run.has_steps || ["server", "search"].includes(run.kind.name)) return null;
  if (run.state === "waiting") return el("p", { class: "lead", role: "status" }, "Nothing has been written yet. The page shows the first step as soon as there is one.");
  const step = Math.max(0, ...["trainer", "sft", "orchestrator"].map((name) => curve(source.data, name === "orchestrator" ? "reward/mean" : "loss/mean", name)?.steps.at(-1) ?? 0));
  const share = run.max_steps ? Math.min(step / run.max_steps, 1) : null;
  if (run.state === "running" && !step) return el("p", { class: "lead", role: "status" }, "The processes are starting: the model is loaded, then the first rollouts are generated. No step is complete yet.");
  return el("div", { class: "progress" },
    share !== null && el("span", { class: "track", role: "progressbar", "aria-label": "steps", "aria-valuenow": step, "aria-valuemax": run.max_steps }, el("i", { style: { width: `${100 * share}%` } })),
    el("span", { class: "times" }, timesText(run, source)));
}

function timesText(run, source) {
  const now = (Date.now() - (source.lag ?? 0)) / 1000, isGoing = source.live && run.state === "running";
  const seconds = run.seconds + (isGoing && run.until ? Math.max(now - run.until, 0) : 0), parts = [];
  if (seconds > 0) parts.push(`${duration(seconds)} of training`);
  if (isGoing && run.finish) parts.push(run.finish > now ? `about ${duration(run.finish - now)} left` : "the last step is due");
  return parts.join(" · ");
}

// One item per health check; it opens example rollouts.
function checkStrip(data) {
  if (!data.checks.length) return null;
  const signs = { ok: "✓", warning: "!", waiting: "…" };
  return el("ul", { class: "checks", "aria-label": "health checks" }, data.checks.map((check) => {
    const content = [el("b", { "aria-label": check.state }, signs[check.state]), el("span", {}, check.label, el("small", {}, check.text))];
    const title = check.advice ? capitalize(check.advice) : check.query ? "show example rollouts" : null;
    return el("li", { class: check.state, title }, check.query ? el("a", { href: `#rollouts?${new URLSearchParams({ kind: "training", ...check.query })}` }, content) : el("span", {}, content));
  }));
}

function alertsPanel(alerts, total = alerts.length) {
  if (!alerts.length) return null;
  return el("section", { class: "panel alerts" }, el("h2", {}, "Alerts"), el("ul", {}, alerts.map((alert) => el("li", { class: alert.level.toLowerCase() },
    el("small", {}, `${alert.time} ${alert.process}`, alert.count > 1 ? ` ×${alert.count}` : ""), el("span", {}, alert.text)))),
  total > alerts.length ? el("p", {}, el("a", { href: "#logs" }, `all ${total} alerts and the logs`)) : null);
}

// The curve that shows whether the run learns, with held-out evaluations as points.
function mainChart(data, source, go) {
  const { kind } = data.run, names = kind.name === "server" ? ["tokens_per_s/trained", "tokens_per_s/sampled"] : kind.name === "search" ? ["evolve/best", "evolve/score"] : kind.name === "distillation" ? ["teacher_kl/mean"] : kind.trains_on_rewards ? ["reward/mean", "val_reward/mean", "eval/*/avg@*"] : ["loss/mean", "val_loss/mean"];
  const onStep = source.facts.count ? (step) => go(`rollouts?step=${source.facts.steps[nearest(source.facts.steps, step)]}`) : null;
  const chart = figure(data, names, new Set(), onStep, 260);
  return chart && el("div", { class: "main-chart" }, chart);
}

function sentence(data, source) {
  if (data.run.kind.name === "search") return searchSentence(data);
  if (data.run.kind.name === "server") return serverSentence(data);
  const { run } = data, loss = curve(data, "loss/mean") || curve(data, "reward/mean");
  const { training, evaluation } = source.facts.kinds, envs = (training ?? evaluation)?.envs.filter((env) => env !== "none") ?? [];
  const steps = loss?.steps.at(-1) ?? 0;
  const parts = [`${run.kind.title} of `, el("b", {}, shortName(run.model)), envs.length ? ` on ${envs.join(", ")}` : "", loss || training || evaluation ? ": " : "",
    !loss ? "" : run.max_steps ? `${steps.toLocaleString("en")} of ${count(run.max_steps, "step")}` : count(steps, "step"),
    loss && training ? " and " : "", training || evaluation ? count((source.totals ?? source.facts.kinds)[training ? "training" : "evaluation"].count, "rollout") : "",
    source.live && run.state === "running" || !(run.seconds > 0) ? "" : ` in ${duration(run.seconds)}`, ". "];
  if (run.state === "stopped") parts.push(`${capitalize(run.status)}. `);
  for (const [name, verb, first, last, error] of data.trends) {
    const change = verb === "unchanged" ? ` is ${number(last, 3)}, no change beyond its noise`
      : ` ${verb} from ${number(first, 3)} to ${number(last, 3)}${error > 0 ? ` (± ${number(1.96 * error, 2)})` : ""}`;
    parts.push(`${TREND_LABELS[name]}${change}. `);
  }
  for (const row of latestScores(data)) {
    if (row.gap_closed !== null) parts.push(`Gap closed on ${row.env}: ${row.gap_text}, at step ${row.step}. `);
    else if (row.retention !== null) parts.push(`Retention of ${row.env}: ${number(row.retention, 3)}. `);
  }
  return parts;
}

function searchSentence({ run, contexts }) {
  const best = contexts.find((row) => row.best);
  return [`${run.kind.title} for `, el("b", {}, shortName(run.model)), `: ${count(contexts.length, "context")}`,
    best ? `, the best one with a mean score of ${number(best.mean, 3)}` : "", ". ", run.state === "stopped" ? `${capitalize(run.status)}.` : ""];
}

function serverSentence({ run, tenants }) {
  const now = ["sessions", "models", "waiting"].map((name) => tenants.reduce((sum, row) => sum + row[name], 0));
  return [`${run.kind.title} of `, el("b", {}, shortName(run.model)), ": ", count(tenants.length, "tenant"), ", ", count(now[0], "open session"), ", ",
    count(now[1], "model"), " in training, ", count(now[2], "unfinished request"), ". ", run.state === "stopped" ? `${capitalize(run.status)}. ` : ""];
}

// Each API key is a tenant, named by the start of the digest of the key.
function tenantsPanel(rows) {
  if (!rows.length) return null;
  const columns = ["sessions", "models", "waiting", "requests", "failed", "tokens_trained", "tokens_sampled"];
  return el("section", { class: "panel" }, el("h2", {}, "Tenants"), el("div", { class: "wide" }, el("table", {},
    el("thead", {}, el("tr", {}, el("th", {}, "key digest"), columns.map((name) => el("th", { class: "num" }, name.replace("_", " "))), el("th", {}, "last request"))),
    el("tbody", {}, rows.map((row) => el("tr", {}, el("td", {}, el("code", {}, row.tenant)), columns.map((name) => el("td", { class: "num" }, row[name].toLocaleString("en"))),
      el("td", {}, row.last_request ? new Date(1000 * row.last_request).toLocaleString("en") : "–")))))),
  el("p", { class: "lead" }, "Requests and tokens since the server started."));
}

// The newest evaluation of each environment; the one before training does not count as progress.
function latestScores(data) {
  return [...new Map(data.scores.filter((row) => row.step > 0).map((row) => [row.env, row])).values()];
}

function tilesOf(data) {
  const { kind } = data.run;
  if (kind.name === "server") return SERVER_TILES;
  const rewards = kind.trains_on_rewards ? TILES : TILES.filter(([name]) => !/reward/.test(name));
  if (!kind.has_teacher) return kind.scores_rewards ? TILES : rewards;
  const scores = latestScores(data).map((row) => row.retention === null
    ? [`distill/${row.env}/gap_closed`, `Gap closed, ${row.env}`] : [`distill/${row.env}/retention`, `Retention, ${row.env}`]);
  const first = [...TEACHER_TILES.slice(0, 1), ...scores, ...TEACHER_TILES.slice(1)];
  const measured = !kind.trains_on_rewards && kind.scores_rewards ? [["reward/mean", "Reward (not trained on)"]] : [];
  return [...first, ...rewards.filter(([name]) => !first.some(([other]) => other === name)), ...measured];
}

function scoresPanel(data) {
  if (!data.scores.length) return null;
  const columns = [["step", "step"], ["student", "student"], ["student_context", "student + context"], ["teacher_context", "teacher + context"],
    ["gap_text", "gap closed (95 %)"], ["retention", "retention"], ["kl", "KL to teacher"]];
  const cell = (value) => (typeof value === "number" ? number(value, 3) : value === null || value === "-" ? "–" : value);
  const unclear = data.scores.some((row) => row.gap_text === "n.s.");
  return el("section", { class: "panel" }, el("h2", {}, "Student and teacher on held-out examples"), el("div", { class: "wide" }, el("table", { class: "scores" },
    el("thead", {}, el("tr", {}, el("th", {}, "environment"), columns.map(([, label]) => el("th", { class: "num" }, label)))),
    el("tbody", {}, data.scores.map((row) => el("tr", {}, el("td", {}, row.env), columns.map(([key]) => el("td", { class: "num" }, cell(row[key])))))))),
  el("p", { class: "lead" }, "Mean rewards; the KL is in nats per token of the student.", unclear ? " n.s.: the gap is not significant, so no share of it is reported." : ""));
}

function shortName(model) {
  const parts = String(model || "a model").split("/").filter(Boolean);
  return parts.length > 3 ? parts.slice(-3).join("/") : parts.join("/");
}

function tile(data, name, label, go) {
  const c = curve(data, name);
  if (!c) return null;
  const last = Math.min(c.values.length, 10), recent = c.values.slice(-10).reduce((a, b) => a + b, 0) / last;
  return el("button", { class: "tile", title: MEANING[name], onclick: () => go("curves") }, el("small", {}, label), el("b", {}, number(c.values.at(-1))),
    el("small", {}, last > 1 ? `mean of last ${last}: ${number(recent, 3)}` : `step ${c.steps.at(-1)}`), sparkline(c));
}

function findings(data) {
  if (!data.findings.length) return null;
  return el("section", { class: "panel" }, el("h2", {}, "Findings"), el("dl", { class: "findings" },
    data.findings.map(([topic, text, advice]) => [el("dt", {}, topic), el("dd", {}, capitalize(text), ".", advice && el("p", { class: "advice" }, capitalize(advice), "."))])));
}

function capitalize(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

function evaluations(data, recorded) {
  const isShown = (name) => /^(avg@\d+|pass@\d+|pass\^\d+|completion_len\/mean|is_truncated\/mean|error\/mean)$/.test(name);
  if (!data.evals.length) return null;
  const names = [...new Set(data.evals.flatMap(({ summary }) => Object.keys(summary).filter((name) => isShown(name) && typeof summary[name] === "number")))];
  const link = (env, step) => `#rollouts?${new URLSearchParams({ kind: "evaluation", env, ...(step === null ? {} : { step }) })}`;
  return el("section", { class: "panel" }, el("h2", {}, "Evaluations"), el("div", { class: "wide" }, el("table", {},
    el("thead", {}, el("tr", {}, el("th", {}, "environment"), el("th", {}, "weights"), names.map((name) => el("th", { class: "num" }, name.replace("/mean", ""))))),
    el("tbody", {}, data.evals.map(({ env, step, summary }) => el("tr", {},
      el("td", {}, recorded?.envs.includes(env) && recorded.steps.includes(step ?? 0) ? el("a", { href: link(env, step), title: "show its rollouts" }, env) : env),
      el("td", {}, step === null || step === undefined ? "–" : `step ${step}`),
      names.map((name) => el("td", { class: "num" }, number(summary[name], 4), el("small", {}, spreadOf(summary, name))))))))));
}

// The 95 % interval if the evaluation has one, else 1.96 standard errors.
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

// Contexts of `evolve` as a tree: each below its parent, with its score, the examples on which it is best, and its diff.
function contextTree(rows) {
  if (!rows.length) return null;
  const children = groupBy(rows, (row) => row.parent), best = rows.find((row) => row.best);
  const items = (parent, depth) => (children.get(parent) ?? []).flatMap((row) => [contextItem(row, depth), ...items(row.number, depth + 1)]);
  return el("section", { class: "panel contexts" }, el("h2", {}, "Contexts"),
    el("p", { class: "lead" }, `${count(rows.length, "context")}, each below the one that it was proposed from.`, best ? ` Context ${best.number} has the highest mean score.` : ""),
    el("ul", {}, items(null, 0)));
}

function contextItem(row, depth) {
  const wins = row.front.length ? `best on ${count(row.front.length, "example")}` : "";
  const lines = (row.diff || row.text).split("\n").filter((line) => !line.startsWith("@@"));
  return el("li", { class: row.status, style: { "--depth": Math.min(depth, 6) } }, el("details", { open: row.best },
    el("summary", {}, el("b", {}, `Context ${row.number}`), row.mean === null ? null : el("span", { class: "num" }, number(row.mean, 3)),
      row.best ? el("span", { class: "badge finished" }, "best") : row.status === "accepted" ? null : el("small", {}, row.status), el("small", {}, wins)),
    el("pre", {}, lines.map((line) => el("span", { class: { "+": "added", "-": "removed" }[line[0]] }, `${line}\n`)))));
}
