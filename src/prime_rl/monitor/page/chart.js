// Line charts as SVG: smoothed and raw lines, a cross hair shared by all charts; a click opens the rollouts of a step.

const charts = new Set();
let smoothing = 0.6;

// Metrics without noise.
const UNSMOOTHED = new Set(["optim/lr", "evolve/best", "evolve/rollouts"]);

// `curves`: {name, label, steps, values}, and for points such as evaluations {isPoints, errors}.
function lineChart({ title, help, curves, onStep, height = 178, unit = "", yLabel = unitOf(curves[0].name), isExported = true }) {
  const box = el("figure", { class: "chart", tabindex: 0, "aria-label": title });
  const plot = svg("svg", { role: "img", "aria-label": `${title} over steps` });
  const legend = el("span", { class: "legend" });
  const buttons = isExported && el("span", { class: "export" }, el("button", { class: "quiet", title: "download the values", onclick: () => downloadCsv(title, curves) }, "CSV"),
    el("button", { class: "quiet", title: "download the picture", onclick: () => downloadPng(title, plot) }, "PNG"));
  append(box, [el("figcaption", { title: help || "" }, el("b", {}, title), legend, help && el("p", {}, help)), plot, buttons]);
  const chart = { box, curves, draw: () => drawChart(chart, plot, legend, height, unit, yLabel), hover: null };
  new ResizeObserver(() => chart.draw()).observe(plot);
  charts.add(chart);
  plot.addEventListener("pointermove", (event) => hoverAll(stepAt(chart, plot, event), event, chart));
  plot.addEventListener("pointerleave", () => hoverAll(null));
  plot.addEventListener("click", (event) => onStep?.(stepAt(chart, plot, event)));
  return box;
}

function drawChart(chart, plot, legend, height, unit, yLabel) {
  const width = plot.clientWidth || 360;
  const bounds = chart.curves.flatMap((c) => c.errors ? c.values.flatMap((v, i) => [v - (c.errors[i] || 0), v + (c.errors[i] || 0)]) : c.values);
  const steps = chart.curves.flatMap((c) => c.steps);
  if (!bounds.length) return;
  let [low, high] = extremes(bounds);
  const margin = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
  [low, high] = [low - margin, high + margin];
  const [first, last] = extremes(steps), marks = ticks(low, high, 4).map((tick) => [tick, number(tick, 3) + unit]);
  const longest = Math.max(0, ...marks.map(([, label]) => label.length));
  const area = { x0: Math.max(62, 30 + 6.6 * longest), x1: width - 14, y0: height - 38, y1: 10 };
  const x = (step) => area.x0 + ((area.x1 - area.x0) * (step - first)) / Math.max(last - first, 1);
  const y = (value) => area.y0 - ((area.y0 - area.y1) * (value - low)) / (high - low);
  chart.scale = { x, y, first, last, area };
  plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
  plot.style.height = `${height}px`;
  const grid = marks.map(([tick, label]) => [
    svg("line", { class: "grid", x1: area.x0, x2: area.x1, y1: y(tick), y2: y(tick) }),
    svg("text", { class: "tick", x: area.x0 - 7, y: y(tick) + 3.5, "text-anchor": "end" }, label)]);
  const axis = ticks(first, last, width / 90).filter(Number.isInteger).map((tick) =>
    svg("text", { class: "tick", x: x(tick), y: area.y0 + 15, "text-anchor": "middle" }, tick));
  const names = [svg("text", { class: "axis x", x: (area.x0 + area.x1) / 2, y: height - 5, "text-anchor": "middle" }, stepName(chart.curves)),
    svg("text", { class: "axis y", x: 0, y: 0, transform: `translate(12 ${(area.y0 + area.y1) / 2}) rotate(-90)`, "text-anchor": "middle" }, yLabel)];
  const lines = chart.curves.map((c, k) => (c.isPoints ? drawPoints : drawCurve)(c, k, x, y));
  chart.cross = svg("g", { class: "cross" });
  fill(plot, svg("rect", { class: "ground", x: area.x0, y: 0, width: Math.max(area.x1 - area.x0, 0), height: area.y0 }), grid, axis, names, lines, chart.cross);
  fill(legend, chart.curves.map((c, k) => el("span", { class: `key c${k % 6}` },
    chart.curves.length > 1 && el("i", {}), chart.curves.length > 1 && c.label, el("b", {}, number(c.values.at(-1)) + unit))));
}

function drawCurve(c, k, x, y) {
  const noisy = smoothing > 0 && c.values.length > 15 && !UNSMOOTHED.has(c.name);
  const path = (values) => values.map((v, i) => `${i ? "L" : "M"}${x(c.steps[i]).toFixed(1)} ${y(v).toFixed(1)}`).join("");
  const drawn = noisy ? smooth(c.values, smoothing) : c.values;
  return svg("g", { class: `line c${k % 6}` },
    noisy && svg("path", { class: "raw", d: path(c.values) }),
    svg("path", { d: path(drawn), "stroke-dasharray": k > 5 ? "5 3" : null }),
    svg("circle", { cx: x(c.steps.at(-1)), cy: y(drawn.at(-1)), r: 3 }));
}

// Single measurements with their 95 % intervals, joined by a thin dashed line.
function drawPoints(c, k, x, y) {
  const path = c.values.map((v, i) => `${i ? "L" : "M"}${x(c.steps[i]).toFixed(1)} ${y(v).toFixed(1)}`).join("");
  return svg("g", { class: `line points c${k % 6}` }, svg("path", { d: path }),
    c.values.map((v, i) => [c.errors?.[i] ? svg("line", { x1: x(c.steps[i]), x2: x(c.steps[i]), y1: y(v - c.errors[i]), y2: y(v + c.errors[i]) }) : null,
      svg("circle", { cx: x(c.steps[i]), cy: y(v), r: 4.5 })]));
}

function hoverAll(step, event, source) {
  for (const chart of charts) {
    if (!chart.box.isConnected) { charts.delete(chart); continue; }
    if (!chart.cross) continue;
    if (step === null || step < chart.scale.first || step > chart.scale.last) { fill(chart.cross); continue; }
    const { x, y, area } = chart.scale;
    fill(chart.cross,
      svg("line", { x1: x(step), x2: x(step), y1: area.y1, y2: area.y0 }),
      chart.curves.map((c, k) => [c, k, nearest(c.steps, step)]).filter(([c, , i]) => i >= 0).map(([c, k, i]) =>
        svg("circle", { class: `c${k % 6}`, cx: x(c.steps[i]), cy: y(c.values[i]), r: 3.5 })));
  }
  if (step === null) return hideTip();
  showTip(event, el("b", {}, `step ${step}`), source.curves.map((c, k) => {
    const i = nearest(c.steps, step);
    if (c.isPoints && c.steps[i] !== step) return null;
    return el("div", { class: `key c${k % 6}` }, el("i", {}), c.label || c.name, el("b", {}, number(c.values[i])));
  }));
}

function stepAt(chart, plot, event) {
  const { first, last, area } = chart.scale;
  const share = (event.clientX - plot.getBoundingClientRect().left - area.x0) / (area.x1 - area.x0);
  const target = first + Math.min(Math.max(share, 0), 1) * (last - first);
  const longest = chart.curves.reduce((a, b) => (b.steps.length > a.steps.length ? b : a));
  return longest.steps[nearest(longest.steps, target)];
}

function nearest(sorted, target) {
  let low = 0, high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < target) low = middle + 1;
    else high = middle;
  }
  return low > 0 && target - sorted[low - 1] < sorted[low] - target ? low - 1 : low;
}

function smooth(values, weight) {
  let mean = 0, totalWeight = 0;
  return values.map((value) => {
    mean = weight * mean + (1 - weight) * value;
    totalWeight = weight * totalWeight + (1 - weight);
    return mean / totalWeight;
  });
}

function ticks(low, high, target) {
  const raw = (high - low) / Math.max(target, 1);
  if (!(raw > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((factor) => power * factor >= raw * 0.999);
  const out = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) out.push(Number((k * step).toPrecision(12)));
  return out;
}

function extremes(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

function sparkline(c) {
  const [low, high] = extremes(c.values), width = 120, height = 30;
  const x = (i) => (width * i) / Math.max(c.values.length - 1, 1);
  const y = (v) => height - 3 - ((height - 6) * (v - low)) / (high - low || 1);
  const d = smooth(c.values, 0.5).map((v, i) => `${i ? "L" : "M"}${x(i).toFixed(1)} ${y(v).toFixed(1)}`).join("");
  return svg("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": true },
    svg("path", { d: `${d}L${width} ${height}L0 ${height}Z`, class: "under" }), svg("path", { d }));
}

// What the steps of the curves count: those of a server are the intervals in which it had work.
function stepName(curves) {
  return curves.every((c) => c.name.startsWith("evolve/")) ? "context" : curves.every((c) => c.process === "serve") ? "interval" : "training step";
}
