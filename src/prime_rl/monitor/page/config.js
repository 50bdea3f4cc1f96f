// The configuration of each process with the source of every value; what was chosen stands out from what is default.

function configView(data) {
  const processes = Object.keys(data.configs);
  if (!processes.length) return [el("p", { class: "empty" }, "This run left no configuration.")];
  const order = ["rl", "trainer", "orchestrator", "inference"];
  processes.sort((a, b) => (order.indexOf(a) + 9) % 9 - (order.indexOf(b) + 9) % 9);
  let process = processes[0];
  const find = el("input", { type: "search", placeholder: "key, value or source  ( / )", oninput: later(() => draw(), 100) });
  const chosen = el("input", { type: "checkbox", onchange: () => draw() });
  const tabs = el("div", { class: "tabs", role: "tablist" });
  const table = el("table", { class: "settings" });
  const draw = () => {
    fill(tabs, processes.map((name) => el("button", { role: "tab", "aria-selected": String(name === process), onclick: () => { process = name; draw(); } }, name)));
    const words = find.value.toLowerCase();
    const rows = data.configs[process].filter((row) => (!chosen.checked || row[3] !== "default") && row.join(" ").toLowerCase().includes(words));
    fill(table, el("thead", {}, el("tr", {}, ["key", "value", "where it comes from"].map((name) => el("th", {}, name)))),
      el("tbody", {}, rows.map(([section, key, value, source]) => el("tr", { class: source === "default" ? "default" : "given" },
        el("td", {}, section && el("small", {}, `${section}.`), key), el("td", {}, el("code", {}, value)), el("td", {}, source)))));
  };
  draw();
  return [el("div", { class: "toolbar" }, tabs, find, el("label", {}, chosen, " only what was chosen")), table];
}
