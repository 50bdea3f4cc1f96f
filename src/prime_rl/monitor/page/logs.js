// Logs of all processes: one at a time, filtered by level and words; follows a running run.

const ALERT_LEVELS = ["WARNING", "ERROR", "CRITICAL", "FAILURE"];
const MAX_LINES = 2000;

class LogView {
  constructor(source) {
    this.source = source;
    this.process = null;
    this.alertsBox = el("div", {});
    this.tabs = el("div", { class: "tabs", role: "tablist" });
    this.search = el("input", { type: "search", placeholder: "search lines  ( / )", "aria-label": "search lines", oninput: debounce(() => this.drawLines(), 100) });
    this.onlyAlerts = el("input", { type: "checkbox", onchange: () => this.drawLines() });
    this.lines = el("ol", { class: "log", tabindex: 0, "aria-label": "Log lines" });
    this.note = el("p", { class: "lead" });
    this.node = el("div", {}, this.alertsBox, el("div", { class: "toolbar" }, this.tabs, this.search, el("label", {}, this.onlyAlerts, " warnings and errors only"), this.note), this.lines);
    this.refresh();
  }

  async refresh() {
    if (this.isLoading) return;
    this.isLoading = true;
    try {
      this.logs = await this.source.logs();
    } catch {
      return; // the page reports the lost connection
    } finally {
      this.isLoading = false;
    }
    const names = Object.keys(this.logs);
    if (!names.includes(this.process)) this.process = ["rl", "trainer", "sft", "orchestrator"].find((name) => names.includes(name)) ?? names[0] ?? null;
    fill(this.alertsBox, alertsPanel(this.source.data.alerts));
    this.drawTabs();
    this.drawLines();
  }

  drawTabs() {
    const alerts = (lines) => lines.filter(([time, level]) => time && ALERT_LEVELS.includes(level)).length;
    fill(this.tabs, Object.entries(this.logs).map(([name, lines]) => el("button", { role: "tab", "aria-selected": String(name === this.process), onclick: () => { this.process = name; this.drawTabs(); this.drawLines(true); } },
      name, alerts(lines) ? el("small", { class: "count" }, ` ${alerts(lines)}`) : null)));
  }

  drawLines(toEnd = false) {
    const atEnd = toEnd || !this.lines.children.length || this.lines.scrollTop + this.lines.clientHeight > this.lines.scrollHeight - 30;
    const words = this.search.value.toLowerCase(), all = this.logs[this.process] ?? [];
    const found = all.filter(([, level, text]) => (!this.onlyAlerts.checked || ALERT_LEVELS.includes(level)) && text.toLowerCase().includes(words));
    fill(this.note, !all.length ? "This run has no logs yet." : `${count(found.length, "line")}${found.length > MAX_LINES ? `, the last ${MAX_LINES}` : ""}; the file is logs/${this.process}.log`);
    fill(this.lines, found.slice(-MAX_LINES).map(([time, level, text]) => el("li", { class: ALERT_LEVELS.includes(level) ? level.toLowerCase() : "" }, el("small", {}, time), el("span", {}, text))));
    if (atEnd) this.lines.scrollTop = this.lines.scrollHeight;
  }
}
