// All runs below a folder: live states, search, overlay of curves, and the settings in which runs differ.

const POLL_MS = 2000;
const STATES = ["running", "finished", "stopped", "waiting"];

class RunsPage {
  constructor() {
    this.chosen = new Set();
    this.metric = null;
    this.search = el("input", { type: "search", placeholder: "search runs  ( / )", "aria-label": "search runs", oninput: () => this.drawList() });
    this.state = el("select", { "aria-label": "state", onchange: () => this.drawList() }, el("option", { value: "" }, "all states"), STATES.map((state) => el("option", {}, state)));
    this.counter = el("output", { class: "lead" });
    this.list = el("ol", { class: "runs" });
    this.comparison = el("section", { class: "panel", hidden: true });
    this.lost = el("p", { class: "lost-bar", role: "status", hidden: true });
    addEventListener("keydown", (event) => this.key(event));
    document.body.append(this.lost);
    this.poll();
  }

  async poll() {
    try {
      const { root, time, runs } = await this.fetchJson("api/runs");
      this.lag = Date.now() / 1000 - time;
      this.updated = Date.now();
      this.lost.hidden = true;
      if (!this.runs) this.drawFrame(root);
      this.runs = runs;
      const gone = [...this.chosen].filter((key) => !runs.some((run) => run.key === key));
      for (const key of gone) this.chosen.delete(key);
      this.drawList();
      if (gone.length) this.compare();
    } catch (error) {
      if (!this.updated) throw error;
      this.lost.hidden = false;
      fill(this.lost, `Connection to the server lost. Last update ${duration(Math.round((Date.now() - this.updated) / 1000))} ago.`);
    }
    setTimeout(() => this.poll(), POLL_MS);
  }

  async fetchJson(path) {
    const response = await fetch(path);
    if (!response.ok) throw new Error(`${path}: ${response.status} ${await response.text()}`);
    return response.json();
  }

  drawFrame(root) {
    document.title = `runs in ${root}`;
    fill(document.getElementById("top"), el("h1", {}, `Runs in ${root}`), el("span", { class: "spacer" }), el("button", { class: "quiet", title: "light or dark (d)", "aria-label": "light or dark", onclick: () => this.toggleTheme() }, "◐"));
    fill(document.getElementById("main"), el("div", { class: "toolbar" }, this.search, this.state, this.counter), this.list, this.comparison);
    document.getElementById("main").className = "all-runs";
  }

  drawList() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = this.runs.filter((run) => (!this.state.value || run.state === this.state.value) && words.every((word) => `${run.key} ${run.model} ${run.kind.title} ${run.status}`.toLowerCase().includes(word)));
    fill(this.counter, this.runs.length ? `${count(found.length, "run")}${found.length < this.runs.length ? ` of ${this.runs.length}` : ""}. ${this.chosen.size < 2 ? "Tick two or more to compare them." : ""}` : "");
    const shown = found.map((run) => this.item(run));
    fill(this.list, shown.length ? shown : el("li", { class: "empty" }, this.runs.length ? "No run matches." : "No runs here yet. A run that starts appears by itself."));
  }

  item(run) {
    const now = Date.now() / 1000 - this.lag, isGoing = run.state === "running";
    const seconds = run.seconds + (isGoing && run.until ? Math.max(now - run.until, 0) : 0);
    const times = [seconds > 0 && duration(seconds), isGoing && run.finish && (run.finish > now ? `about ${duration(run.finish - now)} left` : "the last step is due"), !isGoing && run.changed && `${duration(Math.max(now - run.changed, 0))} ago`];
    const share = run.max_steps ? Math.min(run.step / run.max_steps, 1) : null;
    const box = el("input", { type: "checkbox", "aria-label": `compare ${run.key}`, onchange: () => { box.checked ? this.chosen.add(run.key) : this.chosen.delete(run.key); this.drawList(); this.compare(); } });
    box.checked = this.chosen.has(run.key);
    return el("li", {}, box,
      el("div", { class: "what" }, el("a", { href: `runs/${run.key.split("/").map(encodeURIComponent).join("/")}/` }, run.key), el("small", {}, `${run.kind.title}${run.model ? ` of ${shortName(run.model)}` : ""}`)),
      el("div", { class: "state" }, el("span", { class: `badge ${run.state}`, title: run.status }, run.state), run.status !== run.state && el("small", {}, run.status.replace(/^stopped /, ""))),
      el("div", { class: "steps" }, el("span", {}, run.max_steps ? `step ${run.step} of ${run.max_steps}` : `step ${run.step}`), share !== null && el("span", { class: "track" }, el("i", { style: { width: `${100 * share}%` } })), el("small", {}, times.filter(Boolean).join(" · "))),
      el("div", { class: "value" }, run.metric ? [el("small", {}, run.metric), el("b", {}, number(run.value, 4)), run.spark.length > 1 && sparkline({ values: run.spark.map(([, value]) => value) })] : el("small", {}, "no metrics yet")));
  }

  // Curves of the chosen runs in one chart, then the settings in which they differ.
  async compare() {
    const keys = [...this.chosen], query = keys.map((key) => `run=${encodeURIComponent(key)}`).join("&");
    this.comparison.hidden = keys.length < 2;
    if (keys.length < 2) return;
    const [{ metric, names, curves }, differences] = await Promise.all([
      this.fetchJson(`api/curves?${query}${this.metric ? `&metric=${encodeURIComponent(this.metric)}` : ""}`), this.fetchJson(`api/differences?${query}`)]).catch((error) => {
      fill(this.comparison, el("p", { class: "empty" }, error.message));
      return [{}, null];
    });
    if (!differences || keys.join() !== [...this.chosen].join()) return;
    const select = el("select", { "aria-label": "metric", onchange: () => { this.metric = select.value; this.compare(); } }, names.map((name) => el("option", { value: name, selected: name === metric }, name)));
    const lines = Object.entries(curves).map(([key, points]) => ({ name: key, label: key, steps: points.map(([step]) => step), values: points.map(([, value]) => value) }));
    fill(this.comparison, el("h2", {}, "Comparison"), el("div", { class: "toolbar" }, el("label", {}, "metric ", select)),
      lines.length ? lineChart({ title: metric, curves: lines, height: 300, yLabel: unitOf(metric) }) : el("p", { class: "empty" }, "These runs have no metrics yet."),
      el("h2", {}, "Settings that differ"), differences.length ? el("div", { class: "wide", tabindex: 0, "aria-label": "Settings that differ" }, el("table", { class: "differences" },
        el("thead", {}, el("tr", {}, el("th", {}, "process"), el("th", {}, "key"), keys.map((key) => el("th", {}, key)))),
        el("tbody", {}, differences.map(({ process, key, values }) => el("tr", {}, el("td", {}, process), el("td", {}, key), values.map((value) => el("td", {}, el("code", {}, value ?? "–")))))))) : el("p", {}, "None in the processes that all of them have."));
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") return document.activeElement?.blur();
    if (/^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement?.tagName) && document.activeElement.type !== "checkbox") return;
    if (event.key === "/") { this.search.focus(); event.preventDefault(); }
    else if (event.key === "d") this.toggleTheme();
  }

  toggleTheme() {
    toggleTheme();
    for (const chart of charts) chart.draw();
  }
}
