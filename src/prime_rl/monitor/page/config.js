// The configuration of each process with the source of every value; values that are not defaults are highlighted.

function configView(data) {
  const processes = Object.keys(data.configs);
  if (!processes.length) return [el("p", { class: "empty" }, "This run has no configuration.")];
  const order = ["rl", "trainer", "orchestrator", "inference"];
  processes.sort((a, b) => (order.indexOf(a) + 9) % 9 - (order.indexOf(b) + 9) % 9);
  let process = processes[0];
  const search = el("input", { type: "search", placeholder: "key, value or source  ( / )", oninput: debounce(() => draw(), 100) });
  const hideDefaults = el("input", { type: "checkbox", onchange: () => draw() });
  const tabs = el("div", { class: "tabs", role: "tablist" });
  const table = el("table", { class: "settings" });
  const draw = () => {
    fill(tabs, processes.map((name) => el("button", { role: "tab", "aria-selected": String(name === process), onclick: () => { process = name; draw(); } }, name)));
    const text = search.value.toLowerCase();
    const rows = data.configs[process].filter((row) => (!hideDefaults.checked || row[3] !== "default") && row.join(" ").toLowerCase().includes(text));
    fill(table, el("thead", {}, el("tr", {}, ["key", "value", "source"].map((name) => el("th", {}, name)))),
      el("tbody", {}, rows.map(([section, key, value, source]) => el("tr", { class: source === "default" ? "default" : "changed" },
        el("td", {}, section && el("small", {}, `${section}.`), key), el("td", {}, el("code", {}, value)), el("td", {}, source)))));
  };
  draw();
  return [el("div", { class: "toolbar" }, tabs, search, el("label", {}, hideDefaults, " hide defaults")), table];
}
