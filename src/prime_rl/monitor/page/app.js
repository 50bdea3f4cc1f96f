// Page frame: header, sections, keyboard shortcuts, theme and live updates.

const SECTIONS = [["overview", "Overview"], ["curves", "Curves"], ["timeline", "Timeline"], ["rollouts", "Rollouts"], ["prompts", "Prompts"],
  ["logs", "Logs"], ["config", "Config"]];

const KEYS = [["1 … 7", "sections"], ["j  k", "next, previous rollout"], ["c  t  g", "conversation, tokens, group"], ["n", "next coloring"],
  ["/", "search"], ["Esc", "leave the search field"], ["d", "light or dark"], ["?", "this help"]];

class Page {
  constructor(source) {
    this.source = source;
    this.browser = null;
    this.section = null;
    this.state = {};
    this.kept = { zoom: null, search: "" }; // of sections that are drawn again at every change
    addEventListener("hashchange", () => this.open());
    addEventListener("keydown", (event) => this.key(event));
    document.title = `${source.data.run.name} · prime-rl`;
    this.drawHeader();
    if (source.live) {
      source.listen(() => this.update(), (state) => this.setConnection(state));
      setInterval(() => this.tick(), 1000);
    }
    this.open();
  }

  drawHeader() {
    const { run } = this.source.data;
    this.badge = el("span", { class: "badge" });
    this.lost = el("p", { class: "lost-bar", role: "status", hidden: true });
    document.body.append(this.lost);
    this.drawBadge();
    this.nav = el("nav", {}, SECTIONS.map(([name, label], i) => el("a", { href: `#${name}`, title: `key ${i + 1}` }, label)));
    fill(document.getElementById("top"), this.source.data.home && el("a", { href: "/", class: "home", title: "all runs" }, "‹ all runs"), el("h1", { title: run.path }, run.name), this.badge, this.nav,
      this.source.live && "Notification" in window && el("button", { class: "quiet", title: "notify me when the run ends or an alert appears", onclick: (event) => this.askNotifications(event.target) }, "notify me"),
      el("button", { class: "quiet", title: "keys (?)", "aria-label": "keys", onclick: () => this.help() }, "?"),
      el("button", { class: "quiet", title: "light or dark (d)", "aria-label": "light or dark", onclick: () => this.toggleTheme() }, "◐"));
  }

  // A report shows the state at the time of writing; without a connection the state is not known.
  drawBadge() {
    const { run } = this.source.data, isOld = !this.source.live && run.state === "running", isUnknown = this.isLost && run.state !== "finished" && run.state !== "stopped";
    this.badge.textContent = isUnknown ? `no connection, was ${run.state}` : isOld ? `was running at ${new Date(run.written * 1000).toLocaleString()}` : run.status;
    this.badge.className = `badge ${isUnknown ? "lost" : run.state}`;
    this.badge.title = this.badge.textContent;
  }

  // Times advance between two updates.
  tick() {
    const times = document.querySelector(".progress .times");
    if (times && !this.isLost) times.textContent = timesText(this.source.data.run, this.source);
    if (this.section === "logs" && this.source.data.run.state === "running" && !this.isLost) this.logs?.refresh();
  }

  async askNotifications(button) {
    this.notifies = !this.notifies && (await Notification.requestPermission()) === "granted";
    button.setAttribute("aria-pressed", String(this.notifies));
    button.classList.toggle("on", this.notifies);
    this.remember();
  }

  // What a notification has reported or the user has seen.
  remember() {
    const { run, alerts } = this.source.data;
    this.known = { state: run.state, alerts: new Set(alerts.map(alertKey)) };
  }

  notify() {
    const { run, alerts } = this.source.data;
    if (!this.notifies) return;
    if (run.state !== this.known.state && run.state !== "running") new Notification(run.name, { body: run.status });
    for (const alert of alerts) if (!this.known.alerts.has(alertKey(alert))) new Notification(`${run.name}: ${alert.process}`, { body: alert.text });
    this.remember();
  }

  go(section) {
    location.hash = section;
  }

  open() {
    const [name, parameters] = location.hash.slice(1).split("?");
    this.section = SECTIONS.some(([section]) => section === name) ? name : "overview";
    for (const link of this.nav.children) link.toggleAttribute("aria-current", link.hash === `#${this.section}`);
    if (parameters) {
      const query = Object.fromEntries(new URLSearchParams(parameters));
      const { index, view, color, ...conditions } = query;
      for (const name of ["step", "group", "min", "max"]) if (name in conditions) conditions[name] = Number(conditions[name]);
      if ("equal" in conditions) conditions.equal = conditions.equal === "true";
      this.state = { query: conditions, view, color, index: index === undefined ? null : Number(index) };
      this.browser = null;
    }
    this.draw();
    scrollTo(0, 0);
  }

  draw() {
    hideTip();
    const main = document.getElementById("main"), { data } = this.source;
    main.className = this.section;
    const onStep = this.source.facts.count ? (step) => this.go(`rollouts?step=${this.nearestStep(step)}`) : null;
    if (this.section === "overview") fill(main, overview(data, this.source, (section) => this.go(section)));
    else if (this.section === "curves") fill(main, curvesView(data, onStep, this.source.live, this.kept));
    else if (this.section === "timeline") fill(main, timelineView(data, this.kept));
    else if (this.section === "config") fill(main, configView(data));
    else if (this.section === "logs") fill(main, (this.logs = new LogView(this.source)).node);
    else if (this.section === "prompts") fill(main, (this.prompts ||= new PromptView(this.source)).node);
    else fill(main, (this.browser ||= new Browser(this.source, this.state)).node);
  }

  nearestStep(step) {
    const { steps } = this.source.facts;
    return steps.length ? steps[nearest(steps, step)] : step;
  }

  // New data: redraw the section, keeping the scroll position, the open rollout and text being typed.
  update() {
    this.drawBadge();
    this.notify();
    if (this.section !== "prompts") this.prompts = null; // read again when it is opened
    if (this.section === "rollouts") this.browser.refresh();
    else if (this.section === "logs") this.logs.refresh();
    else if (this.section === "prompts" || this.section === "config" && document.querySelector("main input[type=search]")?.value) return;
    else if (document.activeElement?.tagName !== "INPUT") {
      const position = scrollY;
      this.draw();
      scrollTo(0, position);
      if (this.browser) this.browser = null;
    }
  }

  setConnection(state) {
    this.isLost = state === "lost";
    this.drawBadge();
    this.lost.hidden = !this.isLost;
    clearInterval(this.clock);
    if (!this.isLost) return;
    const hasEnded = ["finished", "stopped"].includes(this.source.data.run.state);
    const showAge = () => {
      const age = `Last update ${duration(Math.round((Date.now() - this.source.updated) / 1000))} ago.`;
      this.lost.textContent = hasEnded ? `This page is no longer served; the run has ended. ${age}` : `Connection to the server lost. ${age}`;
    };
    showAge();
    this.clock = setInterval(showAge, 1000);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") { event.preventDefault(); document.activeElement?.blur(); document.querySelector("dialog")?.close(); return; }
    if (/^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement?.tagName)) return;
    const position = Number(event.key);
    if (position >= 1 && position <= SECTIONS.length) this.go(SECTIONS[position - 1][0]);
    else if (event.key === "?") this.help();
    else if (event.key === "d") this.toggleTheme();
    else if (this.section === "rollouts" && document.activeElement?.tagName !== "CANVAS" && this.browser.key(event.key)) event.preventDefault();
    else if (event.key === "/") {
      const field = document.querySelector("main input[type=search]");
      if (field) { field.focus(); event.preventDefault(); }
    }
  }

  help() {
    document.querySelector("dialog")?.remove();
    const box = el("dialog", { onclick: () => box.close() }, el("h2", {}, "Keys"), el("table", {}, KEYS.map(([key, what]) => el("tr", {}, el("th", {}, el("kbd", {}, key)), el("td", {}, what)))));
    document.body.append(box);
    box.showModal();
  }

  toggleTheme() {
    toggleTheme();
    this.draw();
  }
}

function alertKey(alert) {
  return `${alert.process} ${alert.text}`;
}

function toggleTheme() {
  const root = document.documentElement, dark = getComputedStyle(root).getPropertyValue("--dark").trim() === "1";
  root.dataset.theme = dark ? "light" : "dark";
}

async function openPage() {
  window.page = document.body.dataset.view === "runs" ? new RunsPage() : new Page(await openSource());
}

openPage().catch((error) => {
  fill(document.getElementById("main"), el("p", { class: "loading" }, `This run cannot be shown: ${error.message}`));
  throw error;
});
