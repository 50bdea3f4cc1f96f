// Rollout browser: a filtered list, the selected rollout, its group, and keyboard shortcuts.

const PAGE = 40;

// Effect of training on a group, by the kind of the run.
const GROUP_HELP = {
  rl: "Training raises the probability of rollouts above the mean reward and lowers that of the others.",
  mixed: "Training raises the probability of rollouts above the mean reward and of tokens that the teacher finds more likely.",
  distillation: "Training moves the student toward the teacher's probabilities; rewards are not used.",
};

class Browser {
  constructor(source, state) {
    this.source = source;
    const kinds = Object.keys(source.facts.kinds);
    this.query = { text: "", kind: kinds[0] ?? null, step: null, env: null, status: null, min: null, max: null, group: null, index: null, equal: null, sort: "step", descending: true, ...state.query };
    this.wanted = state.index ?? null; // the rollout of the group that the address names
    this.view = state.view || "conversation";
    this.color = state.color || null;
    this.rows = [];
    this.total = 0;
    this.selected = 0;
    this.numRequests = 0;
    this.lastCount = 0;
    this.list = el("ol", { class: "list", tabindex: 0, "aria-label": "Rollouts" });
    this.detail = el("article", { class: "detail" });
    this.counter = el("output", {});
    this.search = el("input", { type: "search", placeholder: "search rollouts  ( / )", value: this.query.text,
      oninput: () => this.change({ text: this.search.value }) });
    this.options = { kind: this.chooser("kind", "kind", String), step: this.chooser("step", "step", Number),
      env: this.chooser("environment", "env", String), status: this.chooser("status", "status", String),
      equal: this.chooser("rewards in group", "equal", (value) => value === "true") };
    this.groupChip = el("button", { class: "chosen-group", title: "show all groups", hidden: true, onclick: () => this.change({ group: null, step: null, env: null }) });
    this.filters = el("div", { class: "filters" }, this.search, this.groupChip, Object.values(this.options), this.rewardBound("reward ≥", "min"), this.rewardBound("reward ≤", "max"),
      this.sorter(), this.counter);
    this.node = el("div", { class: "browser" }, this.filters, el("div", { class: "panes" }, this.list, this.detail));
    this.list.addEventListener("scroll", () => {
      if (this.list.scrollTop + this.list.clientHeight > this.list.scrollHeight - 400) this.more();
    });
    this.fillOptions();
    this.ready = this.load();
  }

  chooser(label, key, read) {
    return el("label", {}, label, el("select", { "aria-label": label, onchange: (event) => this.change({ [key]: event.target.value === "" ? null : read(event.target.value) }) }));
  }

  rewardBound(label, key) {
    return el("label", {}, label, el("input", { type: "number", step: "any", value: this.query[key] ?? "", "aria-label": label,
      oninput: (event) => this.change({ [key]: event.target.value === "" ? null : Number(event.target.value) }) }));
  }

  sorter() {
    const orders = [["step down", "newest first"], ["step up", "oldest first"], ["reward down", "highest reward first"], ["reward up", "lowest reward first"],
      ["tokens down", "longest first"], ["tokens up", "shortest first"], ["advantage down", "largest advantage"]];
    const now = `${this.query.sort} ${this.query.descending ? "down" : "up"}`;
    return el("label", {}, "sort", el("select", { "aria-label": "sort", onchange: (event) => {
      const [sort, direction] = event.target.value.split(" ");
      this.change({ sort, descending: direction === "down" });
    } }, orders.map(([value, label]) => el("option", { value, selected: value === now }, label))));
  }

  // Options grow during a run. The elements are kept, because one of them may have the focus.
  fillOptions() {
    const { facts } = this.source, { query } = this, available = facts.kinds[query.kind] ?? facts;
    const values = { kind: Object.keys(facts.kinds), step: available.steps.slice().reverse(), env: available.envs, status: available.statuses, equal: ["true", "false"] };
    this.groupChip.hidden = query.group === null;
    this.groupChip.textContent = `group ${query.group} ✕`;
    for (const [key, label] of Object.entries(this.options)) {
      const select = label.querySelector("select"), known = values[key], signature = known.join("\n");
      label.hidden = known.length < 2;
      if (select.dataset.signature !== signature) {
        fill(select, key !== "kind" && el("option", { value: "" }, "all"), known.map((value) => el("option", { value }, key === "equal" ? { true: "equal", false: "different" }[value] : value)));
        select.dataset.signature = signature;
      }
      select.value = query[key] ?? "";
    }
  }

  // At most one request runs. Further changes only replace the query of the next one.
  change(part) {
    if ("kind" in part) part = { ...part, step: null, env: null, status: null, group: null, equal: null };
    Object.assign(this.query, part);
    this.selected = 0;
    if ("kind" in part || "group" in part) this.fillOptions();
    this.isOutdated = true;
    this.numRequests += 1;
    if (!this.isSelecting) this.ready = this.reload();
  }

  async reload() {
    this.isSelecting = true;
    try {
      while (this.isOutdated) {
        this.isOutdated = false;
        this.fillRows(await this.source.select(this.query, 0, PAGE));
      }
    } finally {
      this.isSelecting = false;
    }
    await this.open(0);
  }

  async load(keep = false) {
    const { numRequests } = this, grown = Math.max(this.count() - this.lastCount, 0); // the selected rollout may have moved down by this much
    const found = await this.source.select(this.query, 0, keep ? Math.min(this.selected + grown + PAGE, 1000) : PAGE);
    if (this.numRequests !== numRequests) return; // the response to an outdated query
    const chosen = this.rows[this.selected]?.id;
    this.fillRows(found);
    if (keep && this.rows.some((row) => row.id === chosen)) this.mark(this.rows.findIndex((row) => row.id === chosen));
    else await this.open(Math.max(this.rows.findIndex((row) => row.index === this.wanted), 0));
  }

  count() {
    const { facts } = this.source;
    return (facts.kinds[this.query.kind] ?? facts).count;
  }

  fillRows({ total, rows }) {
    this.total = total;
    this.rows = rows;
    const { facts } = this.source, all = this.lastCount = this.count();
    const outside = this.source.total > facts.count ? `; ${this.source.total.toLocaleString("en")} in the run` : "";
    this.counter.value = (total === all ? count(total, "rollout") : `${total.toLocaleString("en")} of ${count(all, "rollout")}`) + outside;
    fill(this.list, rows.map((row, i) => this.item(row, i)));
    if (!rows.length) fill(this.detail, el("p", { class: "empty" }, all ? "No matching rollouts." : "No rollouts yet."));
  }

  async more() {
    if (this.loading || this.isSelecting || this.rows.length >= this.total) return;
    this.loading = true;
    const { numRequests } = this, { rows } = await this.source.select(this.query, this.rows.length, PAGE).finally(() => (this.loading = false));
    if (this.numRequests !== numRequests) return;
    const known = new Set(this.rows.map((row) => row.id)), added = rows.filter((row) => !known.has(row.id));
    append(this.list, added.map((row, i) => this.item(row, this.rows.length + i)));
    this.rows.push(...added);
  }

  item(row, i) {
    return el("li", { onclick: () => this.open(i), class: i === this.selected ? "chosen" : "" },
      this.chip(row, row.reward), el("span", { class: "preview" }, el("small", {}, oneLine(row.prompt)), oneLine(row.completion) || el("i", {}, row.status || "empty")),
      el("small", { class: "where" }, `step ${row.step}`, el("br"), count(row.tokens, "token"), this.isUnscored(row) && [el("br"), el("b", { class: "unscored" }, "no teacher score")]));
  }

  // Whether such rollouts have rewards: distillation may skip the reward functions during training.
  hasRewards(row) {
    return row.kind === "evaluation" || this.source.data.run.kind.scores_rewards;
  }

  chip(row, reward) {
    return this.hasRewards(row) ? rewardChip(reward) : null;
  }

  isUnscored(row) {
    return this.source.data.run.kind.has_teacher && row.kind === "training" && row.scored === false;
  }

  // The most informative stream comes first: in a pure distillation the advantages are 0 or unused.
  colorings(detail) {
    const { has_teacher, trains_on_rewards } = this.source.data.run.kind, found = colorings(detail);
    return has_teacher && !trains_on_rewards ? [...found.filter((name) => name === "teacher"), ...found.filter((name) => name !== "teacher" && name !== "advantage")] : found;
  }

  mark(i) {
    this.list.children[this.selected]?.classList.remove("chosen");
    this.selected = i;
    this.list.children[i]?.classList.add("chosen");
    this.list.children[i]?.scrollIntoView({ block: "nearest" });
  }

  async open(i) {
    if (i < 0 || i >= this.rows.length) return;
    hideTip();
    this.mark(i);
    if (i > this.rows.length - 20) this.more();
    const row = this.rows[i];
    const detail = await this.source.detail(row.id);
    if (this.rows[this.selected]?.id !== row.id) return; // the list was reloaded
    if (this.isAddressed) history.replaceState(null, "", addressOf(row, this.view, this.color)); // the address follows what the user opens
    this.isAddressed = true;
    await this.draw(row, detail);
  }

  async draw(row, detail) {
    const options = this.colorings(detail);
    const color = options.includes(this.color) ? this.color : options[0];
    const views = [["conversation", "Conversation"], ["tokens", "Tokens"], ["group", "Group"]];
    const tabs = el("div", { class: "tabs", role: "tablist" }, views.map(([name, label]) => el("button", { role: "tab", "aria-selected": String(this.view === name),
      onclick: () => this.show(name) }, label)));
    const body = el("div", { class: "body" });
    append(tabs, [el("a", { class: "link", href: addressOf(row, this.view, this.color), title: "address of this rollout, to keep or to send" }, "link")]);
    fill(this.detail, detailHead(row, detail, this.chip(row, detail.reward), this.isUnscored(row), this.source.data.run.kind), tabs, body);
    if (this.view === "conversation") fill(body, conversation(detail, this.source.vocab));
    else if (this.view === "tokens") this.drawTokens(body, row, detail, color, options);
    else await this.drawGroup(body, row, color);
  }

  drawTokens(body, row, detail, color, options) {
    if (!detail.tokens.length) return fill(body, el("p", { class: "empty" }, row.tokens && row.kind === "training" && !this.source.live
      ? "The report contains only the text of this rollout. The live page (--serve) shows its tokens."
      : "No tokens were recorded for this rollout."));
    const scale = tintScale(color, [detail]);
    fill(body, this.colorBar(color, options, scale), tokenView(detail, this.source.vocab, color, { scale }));
  }

  async drawGroup(body, row, color) {
    const rows = await this.source.group(row);
    const details = await Promise.all(rows.slice(0, 32).map((other) => this.source.detail(other.id)));
    const scale = tintScale(color, details);
    const rewards = rows.map((other) => other.reward).filter((r) => r !== null);
    const mean = rewards.reduce((a, b) => a + b, 0) / Math.max(rewards.length, 1);
    const cards = details.map((detail) => el("section", { class: detail.id === row.id ? "card chosen" : "card" },
      el("header", {}, this.chip(row, detail.reward), el("small", {}, `#${detail.index ?? detail.id}`),
        this.source.data.run.kind.trains_on_rewards && el("small", { title: "advantage" }, `A ${detail.advantage > 0 ? "+" : ""}${number(detail.advantage, 3)}`)),
      detail.tokens.length ? tokenView(detail, this.source.vocab, color, { scale, onlyGenerated: true }) : el("pre", {}, plainText(detail.completion))));
    fill(body, this.colorBar(color, this.colorings(details[0]), scale),
      el("p", { class: "lead" }, `${count(rows.length, "rollout")} of the same prompt`, this.hasRewards(row) ? `, mean reward ${number(mean, 3)}` : "", ". ",
        GROUP_HELP[this.source.data.run.kind.name] ?? ""),
      el("details", { class: "aside", open: true }, el("summary", {}, "prompt"), el("pre", {}, plainText(details[0].prompt))),
      valueText(details[0].answer) && collapsible("expected answer", valueText(details[0].answer), true),
      el("div", { class: "cards" }, cards));
  }

  colorBar(color, options, scale) {
    return el("div", { class: "colors" }, el("label", {}, "color by ", el("select", { "aria-label": "color by", onchange: (event) => { this.color = event.target.value; this.open(this.selected); } },
      options.map((name) => el("option", { value: name, selected: name === color }, COLORING[name][0])))),
    legendOf(color, scale), el("p", {}, COLORING[color][1]));
  }

  show(view) {
    this.view = view;
    this.open(this.selected);
  }

  key(key) {
    const actions = {
      j: () => this.open(this.selected + 1), ArrowDown: () => this.open(this.selected + 1),
      k: () => this.open(this.selected - 1), ArrowUp: () => this.open(this.selected - 1),
      c: () => this.show("conversation"), t: () => this.show("tokens"), g: () => this.show("group"),
      n: () => {
        const options = [...this.detail.querySelectorAll("select[aria-label='color by'] option")].map((o) => o.value);
        if (!options.length) return;
        this.color = options[(options.indexOf(this.color ?? options[0]) + 1) % options.length];
        this.open(this.selected);
      },
      "/": () => this.search.focus(),
    };
    actions[key]?.();
    return key in actions;
  }

  async refresh() {
    this.query.kind ??= Object.keys(this.source.facts.kinds)[0] ?? null;
    this.fillOptions();
    await this.load(true);
  }
}

// The address of one rollout. It stays valid when the run grows.
function addressOf(row, view, color) {
  const parts = { kind: row.kind, step: row.step, ...(row.group === null ? {} : { env: row.env ?? "none", group: row.group, index: row.index }), view, ...(color ? { color } : {}) };
  return `#rollouts?${new URLSearchParams(parts)}`;
}

function detailHead(row, detail, chip, unscored, kind) {
  const facts = [["step", detail.step], ["environment", detail.env], ["group", detail.group], ["rollout", detail.index], ["tokens", row.tokens],
    ["advantage", !kind.trains_on_rewards || detail.advantage === null || detail.advantage === undefined ? null : number(detail.advantage, 3)], ["status", detail.status], ["stop reason", detail.stop_reason], ["teacher", unscored ? "no score" : null],
    ...Object.entries(detail.metrics || {}).map(([name, value]) => [name, number(value, 3)])];
  return el("header", { class: "facts" }, chip,
    facts.filter(([, value]) => value !== null && value !== undefined).map(([name, value]) => el("span", {}, el("small", {}, name), String(value))));
}

function rewardChip(reward) {
  const known = reward !== null && reward !== undefined;
  const chip = el("span", { class: "chip", title: "reward" }, known ? number(reward, 3) : "–");
  if (known) chip.style.setProperty("--share", `${Math.round(Math.min(Math.max(reward, 0), 1) * 100)}%`);
  return chip;
}

function oneLine(text) {
  return text.replace(/\s+/g, " ").trim();
}
