// Elements and number formats. Text is inserted as text nodes, never as markup, because models generate it.
"use strict";

function el(tag, props, ...children) {
  return build(document.createElement(tag), props, children);
}

function svg(tag, props, ...children) {
  return build(document.createElementNS("http://www.w3.org/2000/svg", tag), props, children);
}

function build(node, props, children) {
  for (const [name, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, part] of Object.entries(value)) node.style.setProperty(key, part);
    else if (name === "value" && "value" in node) node.value = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  append(node, children);
  return node;
}

function append(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

function fill(node, ...children) {
  node.replaceChildren();
  append(node, children);
  return node;
}

function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2).replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

function percent(share) {
  return share > 0 && share < 0.01 ? "<1%" : `${Math.round(share * 100)}%`;
}

function bytes(count) {
  for (const unit of ["B", "KB", "MB", "GB"]) {
    if (count < 1000 || unit === "GB") return `${number(count, 3)} ${unit}`;
    count /= 1000;
  }
}

function duration(seconds) {
  if (seconds < 90) return `${number(seconds, 2)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 90 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function count(n, word) {
  return `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;
}

function debounce(action, milliseconds) {
  let timer = 0;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...args), milliseconds);
  };
}

function showTip(event, ...children) {
  const tip = document.getElementById("tip");
  fill(tip, ...children);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const x = Math.min(event.clientX + 14, innerWidth - box.width - 8);
  const below = event.clientY + 18;
  const y = below + box.height > innerHeight - 8 ? event.clientY - box.height - 12 : below;
  tip.style.transform = `translate(${Math.max(x, 8)}px, ${Math.max(y, 8)}px)`;
}

function hideTip() {
  document.getElementById("tip").hidden = true;
}
