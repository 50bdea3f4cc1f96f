"""Context distillation measured in one process: estimators, retention, taus, rewards with a teacher, coverage.

    python benchmarks/bench_distill.py [--seeds 0 1 2] [--only taus,hybrid] [--json FILE]

Every row prints its numbers, one per seed, and the threshold that should hold for each of them. Accuracies are exact
(the probability of the right answer, on held-out questions), divergences are of whole answers, in nats.
About 30 minutes of CPU time with three seeds on two shared cores.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from distill_lab import (
    BEGIN,
    GROUP,
    SETTLING,
    VALUES,
    CausalLM,
    Recipe,
    Task,
    aim,
    build_facts,
    build_modes,
    compare_answers,
    compute_accuracy,
    compute_table,
    context_of,
    distill,
    learn,
    main_share,
    pick,
    predicted_accuracy,
    predicted_share,
    warm_up,
)
from results import Row as Line
from results import describe_machine, finish

MARKS = (0, 10, 20, 30, 40, 60, 80, 120)
Check = Callable[[dict[str, float]], bool]


@dataclass(frozen=True)
class Row:
    """One line of a table: a recipe, the numbers that are shown, and what must hold for every seed."""

    table: str
    name: str
    recipe: Recipe
    shown: tuple[str, ...]
    threshold: str
    check: Check
    task: str = "facts"
    prepare: Callable[[Task, CausalLM, int], CausalLM] | None = None


CLOSED = ("gap_closed", "kl_reverse", "kl_forward")


def closes(gap: float = 0.95, kl: float = 0.05) -> tuple[str, Check]:
    """Thresholds of a successful distillation."""
    return f"gap > {gap}, reverse KL < {kl}", lambda m: m["gap_closed"] > gap and m["kl_reverse"] < kl


def build_rows() -> Iterator[Row]:
    """All tables."""
    yield from _estimators()
    yield from _retention()
    yield from _taus()
    yield from _hybrid()
    yield from _coverage()


def _estimators() -> Iterator[Row]:
    facts = {
        "full reverse": Recipe(aim("full")),
        "full forward": Recipe(aim("full", "forward")),
        "full jsd": Recipe(aim("full", "jsd")),
        "topk+tail, k 4": Recipe(aim("topk+tail")),
        "topk+tail, k 1": Recipe(aim("topk+tail"), top_k=1),
        "token": Recipe(aim("token")),
        "reward_to_go": Recipe(aim("reward_to_go")),
        "sequence": Recipe(aim("sequence")),
        "SFT on the teacher's answers": Recipe(aim(), on_teacher_samples=True),
    }
    for name, recipe in facts.items():
        # Rare mistakes are rarely sampled.
        steps = 200 if name in ("token", "reward_to_go", "sequence") else 160 if name.endswith("k 1") else 120
        yield Row("estimators", name, _marked(recipe, steps), CLOSED, *closes(kl=0.1 if "SFT" in name else 0.05))
    for name in ("full", "token", "sequence"):
        recipe = _marked(Recipe(aim(name)), 200 if name == "sequence" else 160)
        yield Row("estimators", f"modes: {name}", recipe, CLOSED, *closes(kl=0.05 if name == "full" else 0.2), "modes")


def _retention() -> Iterator[Row]:
    shown = ("gap_closed", "retention", "teacher", "student_with_context")

    def row(name: str, threshold: str, check: Check, **choices: object) -> Row:
        return Row("retention", name, Recipe(aim("full"), **choices), shown, threshold, check)  # type: ignore[arg-type]

    yield row("frozen", "retention < .5", lambda m: m["retention"] < 0.5)
    yield row(
        "frozen, reference 1",
        "gap > .95, retention > .9",
        lambda m: m["gap_closed"] > 0.95 < m["retention"] + 0.05,
        reference_weight=1.0,
    )
    yield row("live", "gap < .5: collapse", lambda m: m["gap_closed"] < 0.5, teacher="live")
    yield row(
        "live, reference 1", "retention > .9", lambda m: m["retention"] > 0.9, teacher="live", reference_weight=1.0
    )
    yield row("ema .95", "teacher < .9: collapse", lambda m: m["teacher"] < 0.9, teacher="ema")
    yield row(
        "ema .98, reference .3",
        "gap > .95, retention > .9",
        lambda m: m["gap_closed"] > 0.95 and m["retention"] > 0.9,
        teacher="ema",
        ema_decay=0.98,
        reference_weight=0.3,
    )


def _taus() -> Iterator[Row]:
    shown = ("predicted", "share", "entropy")

    def row(estimator: str, tt: float, st: float, far: float, direction: str = "", **choices: object) -> Row:
        # Of sampled tokens with unequal taus the mean credit is not zero, and its noise is as large: smaller steps.
        slow = estimator == "token" and tt != st
        settings: dict[str, object] = {"lr": 5e-4, "steps": 180} if slow else {"steps": 120}
        # If the target has less entropy than the teacher, the student commits to a value before it has learned which is
        # right, and tokens that it never samples have no gradient in the reverse direction: equal taus first.
        if st < tt and not direction:
            settings |= {"equal": 100, "steps": 160} if estimator == "sequence" else {"equal": 60}
        settings |= choices
        objective = aim(estimator, direction or "reverse", teacher_tau=tt, student_tau=st)
        recipe = Recipe(objective, prompts=16, noisy=True, **settings)  # type: ignore[arg-type]
        name = " ".join(filter(None, (estimator, direction, f"{tt:g}, {st:g}")))
        name += ", after 1, 1" * ("equal" in settings)
        name += "".join(f", {k} {v:g}" for k, v in choices.items())  # type: ignore[str-format]
        return Row(
            "taus",
            name,
            recipe,
            shown,
            f"|share - predicted| < {far}",
            lambda m: abs(m["share"] - m["predicted"]) < far,
        )

    for estimator, far in (("full", 0.05), ("token", 0.08), ("sequence", 0.08)):
        yield row(estimator, 1.0, 1.0, far)
        yield row(estimator, 1.0, 0.5, far)
    yield row("full", 1.0, 2.0, 0.08)
    yield row("full", 1.0, 0.05, 0.05)
    yield row("full", 1.0, 0.05, 0.05, direction="forward")
    yield row("full", 1.0, 1.0, 0.05, temperature=0.7, teacher_temperature=0.7, steps=240)
    for estimator, tau in (("full", 0.05), ("token", 0.0)):
        collapse = Recipe(aim(estimator, teacher_tau=1.0, student_tau=tau), prompts=16, steps=120, noisy=True)
        name, threshold = f"{estimator} 1, {tau:g}", "entropy < .2: collapse"
        yield Row("taus", name, collapse, shown, threshold, lambda m: m["entropy"] < 0.2)


def _hybrid() -> Iterator[Row]:
    unsure: dict[int, CausalLM] = {}

    def prepare(task: Task, base: CausalLM, seed: int) -> CausalLM:
        if seed not in unsure:
            unsure[seed] = make_unsure(task, base, seed)
        return unsure[seed]

    # One of six is wrong.
    hybrid = Recipe(
        aim(),
        truth=torch.tensor([[3, 7, 1, 0, 5, 2]]),
        context=torch.tensor([[3, 7, 1, 0, 5, 6]]),
        prompts=64,
        steps=120,
    )

    def row(estimator: str, adv: float, tau: float, threshold: str, check: Check, **choices: object) -> Row:
        objective = aim(estimator, adv_tau=adv, teacher_tau=tau, student_tau=tau)
        recipe = replace(hybrid, objective=objective, **choices)  # type: ignore[arg-type]
        name = f"{estimator} {adv:g}, {tau:g}, {recipe.prompts * GROUP} answers"
        name += ", at once to the measured ratio" * (recipe.anneal is not None)
        shown = ("teacher", "accuracy") if recipe.anneal else ("teacher", "predicted", "accuracy")
        return Row("hybrid", name, recipe, shown, threshold, check, prepare=prepare)

    arrives: tuple[str, Check] = ("|accuracy - predicted| < .05", lambda m: abs(m["accuracy"] - m["predicted"]) < 0.05)
    beats: tuple[str, Check] = ("accuracy > .95: beats the teacher", lambda m: m["accuracy"] > 0.95)
    yield row("sequence", 0, 1, *arrives)
    yield row("sequence", 1, 1, *arrives)
    yield row("sequence", 1, 0.1, *arrives, steps=240)  # the reward is worth little more than its cost: slow
    yield row("sequence", 1, 0.01, *beats)
    yield row("token", 1, 1, "accuracy < teacher + .1", lambda m: m["accuracy"] < m["teacher"] + 0.1)
    yield row("token", 1, 0.01, *beats)
    yield row("sequence", 1, 1, *beats, anneal=(0, 1, 8.0))
    # One answer in 512 is right before training, once in 16 steps with 32 answers.
    rare = "accuracy < teacher: hardly a success to learn from"
    yield row("token", 1, 0, rare, lambda m: m["accuracy"] < m["teacher"], prompts=4)


def _coverage() -> Iterator[Row]:
    wrong: dict[tuple[int, bool], CausalLM] = {}

    def row(
        name: str,
        estimator: str,
        direction: str,
        sure: bool,
        threshold: str,
        check: Check,
        auto: bool = False,
        steps: int = 100,
    ) -> Row:
        def prepare(task: Task, base: CausalLM, seed: int) -> CausalLM:
            key = seed, sure
            if key not in wrong:
                wrong[key] = make_wrong(task, base, seed, 0.0 if sure else 0.08)
            return wrong[key]

        recipe = Recipe(aim(estimator, direction), auto=auto, steps=steps)
        if steps != 100:
            name += f", {steps} steps"
        shown = ("coverage at start", "gap_closed")
        return Row("coverage", name, recipe, shown, threshold, check, prepare=prepare)

    learns: tuple[str, Check] = ("gap > .9", lambda m: m["gap_closed"] > 0.9)
    # The reverse direction and jsd give rarely sampled tokens almost no gradient: they converge late.
    yield row("full reverse", "full", "reverse", True, *learns, steps=300)
    yield row("full forward", "full", "forward", True, *learns)
    yield row("full jsd", "full", "jsd", True, *learns, steps=300)
    yield row("topk+tail forward", "topk+tail", "forward", True, *learns)
    # A right token is eventually sampled by chance, then the rest is learned: some seeds converge in 100 steps.
    yield row("token", "token", "reverse", True, "gap < .8: stalls", lambda m: m["gap_closed"] < 0.8, steps=60)
    yield row("token, 8 % noise", "token", "reverse", False, *learns, steps=160)
    yield row("auto", "topk+tail", "reverse", True, *learns, auto=True)
    yield row("auto, 8 % noise", "topk+tail", "reverse", False, *learns, auto=True)


def _marked(recipe: Recipe, steps: int) -> Recipe:
    return replace(recipe, steps=steps, prompts=16, marks=MARKS)


def make_unsure(task: Task, base: CausalLM, seed: int, eps: float = 0.03, steps: int = 60) -> CausalLM:
    """The model after learning that contexts are wrong about a value now and then, each other value being as likely.

    The cost of deviating from a context is then known: ln((1 - eps) / (eps / 7)), 5.4 nats for a value.
    """
    draw, model = torch.Generator().manual_seed(seed + 4000), copy.deepcopy(base)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        for settings in optimizer.param_groups:
            settings["lr"] = 1e-3 * min(1.0, (steps - step) / SETTLING)
        questions, plain = pick(task.train, 16 * GROUP, draw), pick(task.train, 4 * GROUP, draw)
        contexts = task.draw_contexts(len(questions), draw)
        answers = task.solve(questions, contexts)
        hit = (torch.rand(answers.shape, generator=draw) < eps * VALUES / (VALUES - 1)) & (answers < VALUES)
        answers = torch.where(hit, torch.randint(VALUES, answers.shape, generator=draw), answers)
        loss = learn(model, task.show(questions, contexts, BEGIN), answers)
        loss = loss + learn(model, task.plain(plain), task.answer_plainly(plain, draw)) / 4
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return model


def make_wrong(task: Task, base: CausalLM, seed: int, eps: float, steps: int = 40) -> CausalLM:
    """The model after learning another table by heart, contexts still work.

    A value is drawn from all with probability eps, in expectation over the token to say: with 1 in 100, samples
    would cover some keys and not others.
    """
    draw, model = torch.Generator().manual_seed(seed + 3000), copy.deepcopy(base)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    old = torch.tensor([[6, 2, 5, 4, 0, 3]])
    for _ in range(steps):
        questions = pick(task.train, 8 * GROUP, draw)
        answers = task.solve(questions, old)
        hit = (torch.rand(answers.shape, generator=draw) < eps) & (answers < VALUES)
        written = torch.where(hit, torch.randint(VALUES, answers.shape, generator=draw), answers)
        table = compute_table(model, task.plain(questions), written, shared=False)
        right, any_value = table.gather(-1, answers[..., None]).squeeze(-1), table[..., :VALUES].mean(-1)
        share = eps * (answers < VALUES)
        contexts = task.draw_contexts(len(questions), draw)
        shown = task.show(questions, contexts, BEGIN)
        loss = learn(model, shown, task.solve(questions, contexts))
        torch.autograd.backward(loss - ((1 - share) * right + share * any_value).mean())
        optimizer.step()
        optimizer.zero_grad()
    return model


def run_row(row: Row, task: Task, base: CausalLM, seed: int) -> dict[str, object]:
    """The measurements of one row at its end, with its curve."""
    recipe, extra = row.recipe, {}
    if row.prepare is not None:
        base = row.prepare(task, base, seed)
    if row.table == "coverage":
        extra["coverage at start"] = compare_answers(task, base, base, recipe, seed)["coverage"]
    model, curve = distill(task, base, recipe, seed)
    found = dict(curve[-1])
    if row.table == "estimators":
        extra |= compare_answers(task, model, base, recipe, seed)
    if row.table == "hybrid":
        extra["predicted"] = predicted_accuracy(task, base, recipe)
    if row.table == "taus":
        extra["predicted"] = predicted_share(task, base, recipe)
        extra["share"], extra["entropy"] = main_share(task, model, recipe)
    found |= extra
    return {**found, "curve": [(c["step"], c["accuracy"]) for c in curve], "ok": row.check(found)}


def main() -> int:
    """Print a line per row; exit code 1 when one misses its threshold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        help="tables, of estimators,retention,taus,hybrid,coverage, or a row such as auto",
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False  # its batch-invariant products are slower for such narrow models
    machine, began, cpu_began = describe_machine(1), time.perf_counter(), time.process_time()
    rows = [row for row in build_rows() if not args.only or {row.table, row.name.split(",")[0]} & set(args.only)]
    tasks = {task.name: task for task in (build_facts(), build_modes()) if any(r.task == task.name for r in rows)}
    bases = {}
    for seed in args.seeds:
        for task in tasks.values():
            bases[task.name, seed] = base = warm_up(task, seed)
            context = context_of(task, Recipe(aim()))
            able = compute_accuracy(base, task.show(task.eval, context, BEGIN), task.solve(task.eval, context))
            print(f"warm-up {task.name}, seed {seed}: follows the context in {able:.3f}", flush=True)
    results, lines = [], []
    for row in rows:
        found = [run_row(row, tasks[row.task], bases[row.task, seed], seed) for seed in args.seeds]
        results.append({"table": row.table, "name": row.name, "threshold": row.threshold, "seeds": found})
        numbers = "; ".join(f"{name} {' '.join(f'{m[name]:.3f}' for m in found)}" for name in row.shown)
        held = sum(bool(m["ok"]) for m in found)
        lines.append(Line(f"{row.table}: {row.name}", held, "==", len(found), f"{row.threshold}; {numbers}"))
        print(f"{lines[-1].name} | {lines[-1].detail} | {lines[-1].verdict}", flush=True)
    minutes, cpu = ((now - then) / 60 for now, then in ((time.perf_counter(), began), (time.process_time(), cpu_began)))
    limit = (30, "<=") if set(args.seeds) == {0, 1, 2} and not args.only else (None, "")
    lines.append(Line("CPU minutes", cpu, limit[1], limit[0], f"{minutes:.1f} minutes by the clock"))
    return finish("distill", lines, machine, results, args.json)


if __name__ == "__main__":
    raise SystemExit(main())
