// Curves: groups of the main metrics, then a search over all metrics, whose words are `kept.search`.

function curvesView(data, onStep, isLive, kept) {
  const slider = el("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: smoothing, "aria-label": "smoothing",
    oninput: () => { smoothing = Number(slider.value); for (const chart of charts) chart.draw(); } });
  const search = el("input", { type: "search", value: kept.search, placeholder: "search all metrics  ( / )", oninput: debounce(() => showAll(), 120) });
  const results = el("div", { class: "charts" });
  const drawn = new Set();
  const groups = chartGroupsOf(data.run.kind).map(([title, charts]) => {
    const figures = charts.map((names) => figure(data, names, drawn, onStep)).filter(Boolean);
    return figures.length ? [el("h2", {}, title), el("div", { class: "charts" }, figures)] : null;
  });
  const showAll = () => {
    kept.search = search.value;
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = allCurves(data).filter((c) => words.every((word) => `${c.process} ${c.name}`.toLowerCase().includes(word)));
    const shown = words.length ? found.slice(0, 40) : [];
    fill(results, shown.map((c) => lineChart({ title: c.name, help: `logged by ${c.process}`, curves: [{ ...c, label: c.name }], onStep })));
    if (!words.length) fill(results, el("p", { class: "lead" }, `${allCurves(data).length} metrics. Enter part of a name, for example “time” or “loss”.`));
  };
  showAll();
  return [el("div", { class: "toolbar" }, el("label", {}, "smoothing ", slider), el("span", { class: "lead" }, "Hover: values of all curves at a step. Click: rollouts of the step."),
    isLive && el("a", { href: "metrics.csv", download: `${data.run.name.replaceAll("/", "_")}.csv` }, "all metrics as CSV")),
    groups, el("h2", {}, "All metrics"), el("div", { class: "toolbar" }, search), results];
}

// One chart of the metrics that exist; `name/*` matches all metrics with this prefix that are not drawn yet.
function figure(data, names, drawn, onStep, height) {
  const found = names.flatMap((name) => (name.includes("*") ? matching(data, name, drawn) : [curve(data, name)])).filter(Boolean);
  const distinct = found.filter((c, i) => found.findIndex((other) => String(other.values) === String(c.values)) === i);
  const curves = distinct.slice(0, 6).map((c) => asPoints(data, c));
  for (const c of found) if (!distinct.includes(c) || curves.some((other) => other.name === c.name)) drawn.add(c.name);
  if (!curves.length) return null;
  const one = curves.length === 1;
  const shared = names[0].includes("*") ? names[0].split("/*")[0] : names.length > 1 ? names[0].split("/").slice(0, -1).join("/") : names[0];
  const title = one ? curves[0].name : CHART_TITLES[names[0]] ?? (shared || names[0]);
  return lineChart({ title, help: (one && MEANING[curves[0].name]) || MEANING[names[0]] || "", curves: curves.map((c) => ({ ...c, label: label(c.name, title) })), onStep, height });
}

// Evaluations are single measurements: drawn as points, with their 95 % intervals if the run logged standard errors.
function asPoints(data, c) {
  if (!/^eval\//.test(c.name)) return c;
  const stderr = curve(data, `${c.name}/stderr`), errors = stderr && c.steps.map((step) => 1.96 * (stderr.values[stderr.steps.indexOf(step)] ?? 0));
  return { ...c, isPoints: true, errors };
}

// Part of the tokens that a diagnostic is about: its kind and its first age or position.
const PART = /\/(staleness|from_token)_(\d+)(_or_more)?\//;

function label(name, title) {
  const part = PART.exec(name);
  if (part) return `${part[1] === "staleness" ? "age" : "from token"} ${part[2]}${part[3] ? " or more" : ""}`;
  const evaluated = /^eval\/(.+)\/(.+)$/.exec(name);
  if (["reward", "loss"].includes(title) && name === `${title}/mean`) return "training, mean";
  if (evaluated) return `${evaluated[1]} held out, ${evaluated[2]}`;
  return name.startsWith(`${title}/`) ? name.slice(title.length + 1) : name;
}

function matching(data, pattern, drawn) {
  const expression = new RegExp(`^${pattern.replaceAll(/[.+?^${}()|[\]\\]/g, "\\$&").replaceAll("*", ".*")}$`);
  const names = [...new Set(allCurves(data).map((c) => c.name))].filter((name) => expression.test(name) && !drawn.has(name) && !/\/(stderr|ci_low|ci_high|num_\w+)$/.test(name));
  const reward = curve(data, "reward/mean");
  const first = (name) => Number(PART.exec(name)?.[2] ?? 0);
  names.sort((a, b) => first(a) - first(b));
  return names.map((name) => curve(data, name)).filter((c) => c.name === "reward/mean" || !reward || String(c.values) !== String(reward.values));
}
