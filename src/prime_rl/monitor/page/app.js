// Page frame: header, sections, keyboard shortcuts, theme and live updates.

const SECTIONS = [["overview", "Overview"], ["curves", "Curves"], ["timeline", "Timeline"], ["rollouts", "Rollouts"], ["config", "Config"]];

const KEYS = [["1 … 5", "sections"], ["j  k", "next, previous rollout"], ["c  t  g", "conversation, tokens, group"], ["n", "next coloring"],
  ["/", "search"], ["Esc", "leave the search field"], ["d", "light or dark"], ["?", "this help"]];

class Page {
  constructor(source) {
    this.source = source;
    this.browser = null;
    this.section = null;
    this.state = {};
    addEventListener("hashchange", () => this.open());
    addEventListener("keydown", (event) => this.key(event));
    document.title = `${source.data.run.name} · prime-rl`;
    if (source.live) source.listen(() => this.update(), (state) => this.setConnection(state));
    this.drawHeader();
    this.open();
  }

  drawHeader() {
    const { run } = this.source.data;
    this.badge = el("span", { class: "badge" });
    this.lost = el("p", { class: "lost-bar", role: "status", hidden: true });
    document.body.append(this.lost);
    this.drawBadge();
    this.nav = el("nav", {}, SECTIONS.map(([name, label], i) => el("a", { href: `#${name}`, title: `key ${i + 1}` }, label)));
    fill(document.getElementById("top"), el("h1", { title: run.path }, run.name), this.badge, this.nav,
      el("button", { class: "quiet", title: "keys (?)", onclick: () => this.help() }, "?"),
      el("button", { class: "quiet", title: "light or dark (d)", onclick: () => this.toggleTheme() }, "◐"));
  }

  // A report shows the state at the time of writing.
  drawBadge() {
    const { run } = this.source.data, isOld = !this.source.live && run.state === "running";
    this.badge.textContent = isOld ? `was running at ${new Date(run.written * 1000).toLocaleString()}` : run.status;
    this.badge.className = `badge ${run.state}`;
    this.badge.title = this.badge.textContent;
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
      this.state = { query: "step" in query ? { ...query, step: Number(query.step) } : query };
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
    else if (this.section === "curves") fill(main, curvesView(data, onStep));
    else if (this.section === "timeline") fill(main, timelineView(data));
    else if (this.section === "config") fill(main, configView(data));
    else fill(main, (this.browser ||= new Browser(this.source, this.state)).node);
  }

  nearestStep(step) {
    const { steps } = this.source.facts;
    return steps.length ? steps[nearest(steps, step)] : step;
  }

  // New data: redraw the section, keeping the scroll position, the open rollout and text being typed.
  update() {
    this.drawBadge();
    if (this.section === "rollouts") this.browser.refresh();
    else if (document.activeElement?.tagName !== "INPUT") {
      const position = scrollY;
      this.draw();
      scrollTo(0, position);
      if (this.browser) this.browser = null;
    }
  }

  setConnection(state) {
    const lost = state === "lost";
    this.badge.classList.toggle("lost", lost);
    this.lost.hidden = !lost;
    clearInterval(this.clock);
    if (!lost) return;
    const showAge = () => { this.lost.textContent = `Connection to the server lost. Last update ${duration(Math.round((Date.now() - this.source.updated) / 1000))} ago.`; };
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
    const root = document.documentElement, dark = getComputedStyle(root).getPropertyValue("--dark").trim() === "1";
    root.dataset.theme = dark ? "light" : "dark";
    this.draw();
  }
}

openSource().then((source) => { window.page = new Page(source); }).catch((error) => {
  fill(document.getElementById("main"), el("p", { class: "loading" }, `This run cannot be shown: ${error.message}`));
  throw error;
});
