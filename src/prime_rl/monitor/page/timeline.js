// Timeline on a canvas: one lane per activity of each process; the wheel zooms, dragging moves.

const WAITING = /^wait/;

// Pixels of a lane and of the names. On a narrow screen the name stands above its lane.
function laneSizes(width) {
  return width < 640 ? { lane: 40, left: 8, top: 18 } : { lane: 24, left: 226, top: 4 };
}

// `kept.zoom` is the shown interval, null: the whole run.
function timelineView(data, kept) {
  const { names, lanes } = data.lanes;
  const processes = ["inference", "orchestrator", "trainer", "sft", "teacher", "eval"].filter((p) => lanes[p])
    .concat(Object.keys(lanes).filter((p) => !["inference", "orchestrator", "trainer", "sft", "teacher", "eval"].includes(p)));
  if (!processes.length) return el("p", { class: "empty" }, "This run recorded no timeline.");
  const rows = processes.flatMap((process) => {
    const activities = [...new Set(lanes[process].map(([what]) => what))].sort((a, b) => busy(lanes[process], b) - busy(lanes[process], a));
    return activities.map((what, k) => ({ process: k ? "" : process, owner: process, what, spans: lanes[process].filter((s) => s[0] === what) }));
  });
  const all = rows.flatMap((row) => row.spans);
  const begin = extremes(all.map((s) => s[1]))[0], end = extremes(all.map((s) => s[1] + s[2]))[1];
  const view = { from: begin, to: end, begin, end, ...kept.zoom };
  const canvas = el("canvas", { class: "lanes", tabindex: 0, "aria-label": "Timeline of all processes; arrow keys move, plus and minus zoom" });
  const draw = () => drawTimeline(canvas, rows, names, view);
  const show = (from, span) => {
    view.from = Math.max(begin, Math.min(from, end - span));
    view.to = view.from + span;
    kept.zoom = span < end - begin ? { from: view.from, to: view.to } : null;
    draw();
  };
  const zoom = (factor, at = 0.5) => {
    const span = Math.min(Math.max((view.to - view.from) * factor, 0.05), end - begin), point = view.from + (view.to - view.from) * at;
    show(point - span * at, span);
  };
  const move = (share) => show(view.from + share * (view.to - view.from), view.to - view.from);
  listenTimeline(canvas, rows, names, view, zoom, move);
  new ResizeObserver(draw).observe(canvas);
  const last = Math.min(end - begin, 20);
  const buttons = el("span", { class: "buttons" },
    el("button", { onclick: () => zoom(0.5) }, "zoom in"), el("button", { onclick: () => zoom(2) }, "zoom out"),
    el("button", { onclick: () => show(begin, end - begin) }, "whole run"),
    el("button", { onclick: () => show(end - last, last) }, `last ${duration(last)}`));
  return el("div", {}, el("p", { class: "lead" }, "One row per activity of each process. Hatched intervals are waits. ",
    "With good overlap the engine generates while the trainer computes."), buttons, canvas, shareTable(data));
}

function activity(process, what) {
  return ACTIVITY[`${process} ${what}`] || ACTIVITY[what] || what;
}

function busy(spans, what) {
  return spans.reduce((sum, span) => sum + (span[0] === what ? span[2] : 0), 0);
}

function drawTimeline(canvas, rows, names, view) {
  const ratio = devicePixelRatio || 1, width = canvas.clientWidth, { lane, left, top: above } = laneSizes(width), height = rows.length * lane + 46;
  if (!width) return;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.height = `${height}px`;
  const style = getComputedStyle(document.documentElement), color = (name) => style.getPropertyValue(name).trim();
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.font = "12px system-ui, sans-serif";
  const x = (time) => left + ((width - left - 8) * (time - view.from)) / (view.to - view.from);
  for (const tick of ticks(view.from - view.begin, view.to - view.begin, (width - left) / 110)) {
    context.fillStyle = color("--grid");
    context.fillRect(x(tick + view.begin), 0, 1, height - 40);
    context.fillStyle = color("--faint");
    context.fillText(number(tick, 4), Math.min(Math.max(x(tick + view.begin) - 8, 6), width - 36), height - 24);
  }
  context.fillStyle = color("--faint");
  context.textAlign = "center";
  context.fillText("seconds since the start", (left + width) / 2, height - 7);
  context.textAlign = "left";
  rows.forEach((row, k) => {
    const top = k * lane, isNarrow = above > lane / 3;
    if (isNarrow) {
      context.fillStyle = color("--faint");
      context.fillText(`${row.owner}: ${activity(row.owner, names[row.what])}`, 8, top + 13);
    } else if (row.process) {
      context.fillStyle = color("--line");
      if (k) context.fillRect(0, top, width, 1);
      context.fillStyle = color("--ink");
      context.font = "600 12px system-ui, sans-serif";
      context.fillText(row.process, 4, top + 16);
      context.font = "12px system-ui, sans-serif";
    }
    if (!isNarrow) {
      context.fillStyle = color("--faint");
      context.fillText(activity(row.owner, names[row.what]), 104, top + 16);
    }
    const waits = WAITING.test(names[row.what]);
    context.fillStyle = waits ? hatch(context, color("--warn")) : color(`--c${row.what % 6}`);
    for (const [, start, length] of row.spans) {
      if (start + length < view.from || start > view.to) continue;
      const x0 = Math.max(x(start), left), x1 = Math.min(x(start + length), width - 8);
      context.fillRect(x0, top + above, Math.max(x1 - x0 - 0.5, 0.8), lane - above - 4);
    }
  });
}

function hatch(context, color) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const tileContext = tile.getContext("2d");
  tileContext.strokeStyle = color;
  tileContext.lineWidth = 1.5;
  tileContext.beginPath();
  tileContext.moveTo(-1, 7);
  tileContext.lineTo(7, -1);
  tileContext.stroke();
  return context.createPattern(tile, "repeat");
}

function listenTimeline(canvas, rows, names, view, zoom, move) {
  const left = () => laneSizes(canvas.clientWidth).left;
  const share = (event) => Math.min(Math.max((event.offsetX - left()) / (canvas.clientWidth - left() - 8), 0), 1);
  let dragged = null;
  canvas.addEventListener("wheel", (event) => { event.preventDefault(); zoom(event.deltaY > 0 ? 1.25 : 0.8, share(event)); }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => { dragged = event.offsetX; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", () => { dragged = null; });
  canvas.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("pointermove", (event) => {
    if (dragged !== null) {
      move((dragged - event.offsetX) / (canvas.clientWidth - left() - 8));
      dragged = event.offsetX;
      return hideTip();
    }
    const row = rows[Math.floor(event.offsetY / laneSizes(canvas.clientWidth).lane)], time = view.from + share(event) * (view.to - view.from);
    const near = (view.to - view.from) / canvas.clientWidth;
    const span = row?.spans.find(([, start, length]) => time >= start - near && time <= start + length + near);
    if (!span) return hideTip();
    showTip(event, el("b", {}, `${row.owner} ${activity(row.owner, names[row.what])}`),
      el("div", {}, `${duration(span[2])}, step ${span[3]}, at ${number(span[1] - view.begin, 5)} s`));
  });
  canvas.addEventListener("keydown", (event) => {
    const action = { ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2), "+": () => zoom(0.6), "-": () => zoom(1.6) }[event.key];
    if (action) { event.preventDefault(); action(); }
  });
}

function shareTable(data) {
  const rows = Object.entries(data.shares).flatMap(([process, activities]) =>
    Object.entries(activities).sort((a, b) => b[1] - a[1]).map(([what, share], k) => el("tr", {},
      el("th", {}, k ? "" : process), el("td", {}, activity(process, what)),
      el("td", { class: "bar" }, el("i", { class: WAITING.test(what) ? "wait" : "", style: { width: `${Math.min(share, 1) * 100}%` } })),
      el("td", { class: "num" }, percent(share)))));
  return rows.length ? el("table", { class: "shares" }, el("caption", {}, "Share of the run's time, without the first two steps"), rows) : null;
}
