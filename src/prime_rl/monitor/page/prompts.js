// The same prompt at several steps: a slider over the training, with the answers at each step.

const MAX_ANSWERS = 8;

class PromptView {
  constructor(source) {
    this.source = source;
    this.list = el("ol", { class: "list", tabindex: 0, "aria-label": "Prompts" });
    this.detail = el("article", { class: "detail" });
    this.node = el("div", { class: "browser" }, el("p", { class: "lead" }, "Prompts that were answered at several steps, those whose reward rose most first. Move the slider to see how the answers change."),
      el("div", { class: "panes" }, this.list, this.detail));
    this.ready = this.load();
  }

  async load() {
    this.prompts = await this.source.prompts();
    fill(this.list, this.prompts.map((prompt, i) => el("li", { onclick: () => this.open(i) },
      el("span", { class: "change" }, rewardChip(prompt.first), "→", rewardChip(prompt.last)),
      el("span", { class: "preview" }, oneLine(prompt.prompt), el("small", {}, `${prompt.kind === "evaluation" ? "held out" : "training"}, ${prompt.env ?? "no environment"}, ${prompt.steps} steps`)))));
    if (this.prompts.length) await this.open(0);
    else fill(this.detail, el("p", { class: "empty" }, "No prompt was answered at more than one step yet. Online evaluations (orchestrator.eval) answer the same held-out prompts every time."));
  }

  async open(i) {
    for (const [k, item] of [...this.list.children].entries()) item.classList.toggle("chosen", k === i);
    const rows = await this.source.history(this.prompts[i]), byStep = [...groupBy(rows, (row) => row.step)];
    const slider = el("input", { type: "range", min: 0, max: byStep.length - 1, step: 1, value: byStep.length - 1, "aria-label": "step", oninput: () => this.show(byStep[slider.value], body, label) });
    const label = el("output", {}), body = el("div", {}), first = await this.source.detail(rows[0].id);
    fill(this.detail, el("h2", {}, "Prompt"), el("pre", { class: "prompt" }, plainText(Array.isArray(first.prompt) ? first.prompt.filter((message) => message.role !== "system") : first.prompt)),
      el("div", { class: "stepper" }, el("span", {}, `step ${byStep[0][0]}`), slider, el("span", {}, `step ${byStep.at(-1)[0]}`)), rewardsOverSteps(byStep, slider), label, body);
    await this.show(byStep.at(-1), body, label);
  }

  async show([step, rows], body, label) {
    this.step = step;
    const details = await Promise.all(rows.slice(0, MAX_ANSWERS).map((row) => this.source.detail(row.id)));
    if (this.step !== step) return;
    fill(label, el("b", {}, `Step ${step}`), step === 0 ? " (before training)" : "", `: ${count(rows.length, "answer")}`, rows.length > MAX_ANSWERS ? `, the first ${MAX_ANSWERS} shown` : "");
    fill(body, details.map((detail, k) => el("section", { class: "answer" },
      el("header", {}, rewardChip(detail.reward), el("small", {}, detail.status), el("a", { href: addressOf(rows[k], "conversation", null) }, "open the rollout")),
      valueText(detail.answer) ? comparison(valueText(detail.answer), lastAnswer(detail.completion)) : el("pre", {}, plainText(detail.completion)))));
  }
}

// Mean reward at each step as bars under the slider; a click selects the step.
function rewardsOverSteps(byStep, slider) {
  const choose = (i) => { slider.value = i; slider.dispatchEvent(new Event("input")); };
  const means = byStep.map(([, rows]) => rows.reduce((sum, row) => sum + (row.reward ?? 0), 0) / rows.length), top = Math.max(1e-9, ...means);
  return el("div", { class: "bars", "aria-hidden": true }, means.map((mean, i) => el("i", { title: `step ${byStep[i][0]}: reward ${number(mean, 3)}`, style: { height: `${Math.max(4, (100 * Math.max(mean, 0)) / top)}%` }, onclick: () => choose(i) })));
}
