// The rollout browser: a list that filters as you type, one rollout beside it, its group side by side, and the keyboard.

const PAGE = 40;

// What training makes of a group, by the kind of the run.
const GROUP_LESSONS = {
  rl: "Training raises what scored above the mean and lowers what scored below.",
  mixed: "Training raises what scored above the mean or what the teacher finds likelier, and lowers the rest.",
  distillation: "Training moves every token to what the teacher finds likely, whatever its reward.",
};

class Browser {
  constructor(source, state) {
    this.source = source;
    const kinds = Object.keys(source.facts.kinds);
    this.query = { text: "", kind: kinds[0] ?? null, step: null, env: null, status: null, min: null, max: null, sort: "step", descending: true, ...state.query };
    this.view = state.view || "conversation";
    this.color = state.color || null;
    this.rows = [];
    this.total = 0;
    this.at = 0;
    this.asked = 0;
    this.counted = 0;
    this.list = el("ol", { class: "list", tabindex: 0, "aria-label": "Rollouts" });
    this.detail = el("article", { class: "detail" });
    this.counter = el("output", {});
    this.search = el("input", { type: "search", placeholder: "search prompts and answers  ( / )", value: this.query.text,
      oninput: () => this.change({ text: this.search.value }) });
    this.choices = { kind: this.chooser("of", "kind", String), step: this.chooser("step", "step", Number),
      env: this.chooser("environment", "env", String), status: this.chooser("status", "status", String) };
    this.filters = el("div", { class: "filters" }, this.search, Object.values(this.choices), this.bound("reward ≥", "min"), this.bound("reward ≤", "max"),
      this.sorter(), this.counter);
    this.node = el("div", { class: "browser" }, this.filters, el("div", { class: "panes" }, this.list, this.detail));
    this.list.addEventListener("scroll", () => {
      if (this.list.scrollTop + this.list.clientHeight > this.list.scrollHeight - 400) this.more();
    });
    this.fillChoices();
    this.ready = this.load();
  }

  chooser(label, key, read) {
    return el("label", {}, label, el("select", { "aria-label": label, onchange: (event) => this.change({ [key]: event.target.value === "" ? null : read(event.target.value) }) }));
  }

  bound(label, key) {
    return el("label", {}, label, el("input", { type: "number", step: "any", value: this.query[key] ?? "", "aria-label": label,
      oninput: (event) => this.change({ [key]: event.target.value === "" ? null : Number(event.target.value) }) }));
  }

  sorter() {
    const ways = [["step down", "newest first"], ["step up", "oldest first"], ["reward down", "best first"], ["reward up", "worst first"],
      ["tokens down", "longest first"], ["tokens up", "shortest first"], ["advantage down", "largest advantage"]];
    const now = `${this.query.sort} ${this.query.descending ? "down" : "up"}`;
    return el("label", {}, "sort", el("select", { "aria-label": "sort", onchange: (event) => {
      const [sort, way] = event.target.value.split(" ");
      this.change({ sort, descending: way === "down" });
    } }, ways.map(([value, label]) => el("option", { value, selected: value === now }, label))));
  }

  // What there is to choose from grows while a run goes on; the fields stay, somebody may be in one of them.
  fillChoices() {
    const { facts } = this.source, { query } = this, of = facts.kinds[query.kind] ?? facts;
    const options = { kind: Object.keys(facts.kinds), step: of.steps.slice().reverse(), env: of.envs, status: of.statuses };
    for (const [key, label] of Object.entries(this.choices)) {
      const select = label.querySelector("select"), values = options[key], told = values.join("\n");
      label.hidden = values.length < 2;
      if (select.dataset.told !== told) {
        fill(select, key !== "kind" && el("option", { value: "" }, "all"), values.map((value) => el("option", { value }, value)));
        select.dataset.told = told;
      }
      select.value = query[key] ?? "";
    }
  }

  // One question at a time, and always the newest: while an answer is awaited, further keys only change the next question.
  change(part) {
    if ("kind" in part) part = { ...part, step: null, env: null, status: null };
    Object.assign(this.query, part);
    this.at = 0;
    if ("kind" in part) this.fillChoices();
    this.stale = true;
    this.asked += 1;
    if (!this.asking) this.ready = this.catchUp();
  }

  async catchUp() {
    this.asking = true;
    try {
      while (this.stale) {
        this.stale = false;
        this.fillRows(await this.source.select(this.query, 0, PAGE));
      }
    } finally {
      this.asking = false;
    }
    await this.open(0);
  }

  async load(keep = false) {
    const { asked } = this, grown = Math.max(this.count() - this.counted, 0); // what is read may have moved down so far
    const found = await this.source.select(this.query, 0, keep ? Math.min(this.at + grown + PAGE, 1000) : PAGE);
    if (this.asked !== asked) return; // an answer to another question
    const chosen = this.rows[this.at]?.id;
    this.fillRows(found);
    if (keep && this.rows.some((row) => row.id === chosen)) this.mark(this.rows.findIndex((row) => row.id === chosen));
    else await this.open(0);
  }

  count() {
    const { facts } = this.source;
    return (facts.kinds[this.query.kind] ?? facts).count;
  }

  fillRows({ total, rows }) {
    this.total = total;
    this.rows = rows;
    const { facts } = this.source, all = this.counted = this.count();
    const outside = this.source.total > facts.count ? `; ${this.source.total.toLocaleString("en")} in the run` : "";
    this.counter.value = (total === all ? count(total, "rollout") : `${total.toLocaleString("en")} of ${count(all, "rollout")}`) + outside;
    fill(this.list, rows.map((row, i) => this.item(row, i)));
    if (!rows.length) fill(this.detail, el("p", { class: "empty" }, all ? "No rollout fits." : "No rollouts were recorded yet."));
  }

  async more() {
    if (this.loading || this.asking || this.rows.length >= this.total) return;
    this.loading = true;
    const { asked } = this, { rows } = await this.source.select(this.query, this.rows.length, PAGE).finally(() => (this.loading = false));
    if (this.asked !== asked) return;
    const held = new Set(this.rows.map((row) => row.id)), further = rows.filter((row) => !held.has(row.id));
    append(this.list, further.map((row, i) => this.item(row, this.rows.length + i)));
    this.rows.push(...further);
  }

  item(row, i) {
    return el("li", { onclick: () => this.open(i), class: i === this.at ? "chosen" : "" },
      this.chip(row, row.reward), el("span", { class: "preview" }, el("small", {}, oneLine(row.prompt)), oneLine(row.completion) || el("i", {}, row.status || "empty")),
      el("small", { class: "where" }, `step ${row.step}`, el("br"), count(row.tokens, "token"), this.isUnscored(row) && [el("br"), el("b", { class: "unscored" }, "no teacher score")]));
  }

  // Whether rollouts like this one get a reward: in training a distillation may compute none.
  hasRewards(row) {
    return row.kind === "evaluation" || this.source.data.run.kind.scores_rewards;
  }

  chip(row, reward) {
    return this.hasRewards(row) ? rewardChip(reward) : null;
  }

  isUnscored(row) {
    return this.source.data.run.kind.has_teacher && row.kind === "training" && row.scored === false;
  }

  // The most informative stream comes first: with a teacher alone all advantages of rewards are 0 or unused.
  colorings(detail) {
    const { has_teacher, trains_on_rewards } = this.source.data.run.kind, found = colorings(detail);
    return has_teacher && !trains_on_rewards ? [...found.filter((name) => name === "teacher"), ...found.filter((name) => name !== "teacher" && name !== "advantage")] : found;
  }

  mark(i) {
    this.list.children[this.at]?.classList.remove("chosen");
    this.at = i;
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
    if (this.rows[this.at]?.id === row.id) await this.draw(row, detail); // the list may have been reloaded meanwhile
  }

  async draw(row, detail) {
    const choices = this.colorings(detail);
    const color = choices.includes(this.color) ? this.color : choices[0];
    const views = [["conversation", "Conversation"], ["tokens", "Tokens"], ["group", "Group"]];
    const tabs = el("div", { class: "tabs", role: "tablist" }, views.map(([name, label]) => el("button", { role: "tab", "aria-selected": String(this.view === name),
      onclick: () => this.show(name) }, label)));
    const body = el("div", { class: "body" });
    fill(this.detail, detailHead(row, detail, this.chip(row, detail.reward), this.isUnscored(row), this.source.data.run.kind), tabs, body);
    if (this.view === "conversation") fill(body, conversation(detail, this.source.vocab));
    else if (this.view === "tokens") this.drawTokens(body, row, detail, color, choices);
    else await this.drawGroup(body, row, color);
  }

  drawTokens(body, row, detail, color, choices) {
    if (!detail.tokens.length) return fill(body, el("p", { class: "empty" }, row.tokens && row.kind === "training" && !this.source.live
      ? "The tokens of this rollout are not in the report: only its text fits. The live page (--serve) has them."
      : "No tokens were recorded of this rollout, only its text."));
    const scale = tintScale(color, [detail]);
    fill(body, this.colorBar(color, choices, scale), tokenView(detail, this.source.vocab, color, { scale }));
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
      detail.tokens.length ? tokenView(detail, this.source.vocab, color, { scale, onlyWritten: true }) : el("pre", {}, plainText(detail.completion))));
    fill(body, this.colorBar(color, this.colorings(details[0]), scale),
      el("p", { class: "lead" }, `${count(rows.length, "rollout")} of the same prompt`, this.hasRewards(row) ? `, mean reward ${number(mean, 3)}` : "", ". ",
        GROUP_LESSONS[this.source.data.run.kind.name] ?? ""),
      el("details", { class: "aside", open: true }, el("summary", {}, "the prompt"), el("pre", {}, plainText(details[0].prompt))),
      el("div", { class: "cards" }, cards));
  }

  colorBar(color, choices, scale) {
    return el("div", { class: "colors" }, el("label", {}, "color by ", el("select", { "aria-label": "color by", onchange: (event) => { this.color = event.target.value; this.open(this.at); } },
      choices.map((name) => el("option", { value: name, selected: name === color }, COLORING[name][0])))),
    legendOf(color, scale), el("p", {}, COLORING[color][1]));
  }

  show(view) {
    this.view = view;
    this.open(this.at);
  }

  key(key) {
    const actions = {
      j: () => this.open(this.at + 1), ArrowDown: () => this.open(this.at + 1),
      k: () => this.open(this.at - 1), ArrowUp: () => this.open(this.at - 1),
      c: () => this.show("conversation"), t: () => this.show("tokens"), g: () => this.show("group"),
      n: () => {
        const choices = [...this.detail.querySelectorAll("select[aria-label='color by'] option")].map((o) => o.value);
        if (!choices.length) return;
        this.color = choices[(choices.indexOf(this.color ?? choices[0]) + 1) % choices.length];
        this.open(this.at);
      },
      "/": () => this.search.focus(),
    };
    actions[key]?.();
    return key in actions;
  }

  async refresh() {
    this.query.kind ??= Object.keys(this.source.facts.kinds)[0] ?? null;
    this.fillChoices();
    await this.load(true);
  }
}

function detailHead(row, detail, chip, unscored, kind) {
  const facts = [["step", detail.step], ["environment", detail.env], ["group", detail.group], ["rollout", detail.index], ["tokens", row.tokens],
    ["advantage", !kind.trains_on_rewards || detail.advantage === null || detail.advantage === undefined ? null : number(detail.advantage, 3)], ["status", detail.status], ["ended by", detail.stop_reason], ["teacher", unscored ? "did not score this rollout" : null],
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
