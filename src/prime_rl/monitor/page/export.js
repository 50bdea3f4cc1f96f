// Downloads: the values of a chart as CSV, its picture as PNG.

function download(name, url) {
  el("a", { href: url, download: name.replace(/[^\w.@-]+/g, "_") }).click();
}

function downloadCsv(title, curves) {
  const steps = [...new Set(curves.flatMap((c) => c.steps))].sort((a, b) => a - b);
  const columns = curves.map((c) => new Map(c.steps.map((step, i) => [step, c.values[i]])));
  const quote = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const lines = [["step", ...curves.map((c) => c.name || c.label)], ...steps.map((step) => [step, ...columns.map((column) => column.get(step) ?? "")])];
  const url = URL.createObjectURL(new Blob([lines.map((line) => line.map((cell) => quote(String(cell))).join(",")).join("\n") + "\n"], { type: "text/csv" }));
  download(`${title}.csv`, url);
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

const DRAWN_STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-size", "font-family"];

// The SVG with its computed styles, drawn on a canvas of twice its size.
async function downloadPng(title, plot) {
  const copy = plot.cloneNode(true), { width, height } = plot.getBoundingClientRect();
  const originals = plot.querySelectorAll("*");
  copy.querySelectorAll("*").forEach((node, i) => {
    const style = getComputedStyle(originals[i]);
    for (const name of DRAWN_STYLES) node.setAttribute(name, style.getPropertyValue(name));
  });
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("width", width);
  copy.setAttribute("height", height);
  const picture = new Image();
  picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(copy))}`;
  await picture.decode();
  const canvas = el("canvas", { width: width * 2, height: height * 2 }), context = canvas.getContext("2d");
  context.scale(2, 2);
  context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--panel");
  context.fillRect(0, 0, width, height);
  context.drawImage(picture, 0, 0, width, height);
  download(`${title}.png`, canvas.toDataURL("image/png"));
}
