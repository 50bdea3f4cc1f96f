"""Rollouts until a held-out accuracy of .9: contexts from outcomes against `grpo`, in one process.

    python benchmarks/bench_outcomes.py [--seeds 0 1 2] [--only facts,modes,siblings] [--json FILE]

The model and the tasks `facts` and `modes` are those of `distill_lab`; accuracies are exact. Contexts show the teacher

    answer    the right answer of the question
    feedback  for a wrong answer: the right one; nothing for a right answer
    sibling   a random right answer of the same group, to the others of the group

and the losses are the presets. Outcome contexts that know the right answer pass if they need at most a quarter of the
rollouts of `grpo`; `grpo` runs until it reaches .9, or to four times the rollouts of the slowest of the others.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from distill_lab import (
    BEGIN,
    END,
    GROUP,
    RISING,
    VALUES,
    WAY,
    CausalLM,
    Rows,
    Task,
    add_tables,
    build_facts,
    build_modes,
    compute_accuracy,
    compute_table,
    make_inputs,
    pick,
    sample,
    warm_up,
    wrap,
)
from results import Row as Line
from results import describe_machine, finish

from rollouts.training.advantages import compute_batch_advantages
from rollouts.training.objectives import PRESETS, Objective
from rollouts.training.rl_losses import policy_loss

PROMPTS, TARGET, EVERY = 8, 0.9, 2
GRPO_RATES = (3e-4, 1e-3, 3e-3)
"""The best one of these learning rates counts."""
FACTS, REVERSE = torch.tensor([[3, 7, 1, 0, 5, 2]]), torch.tensor([[1]])
MAX_ROLLOUTS = 100_000
SHARE = 4


@dataclass(frozen=True)
class Problem:
    """A task whose contexts show an answer, and the right answers of questions."""

    task: Task
    solve: Callable[[Rows], Rows]


@dataclass(frozen=True)
class Method:
    """A preset, its contexts and the weights of its teacher."""

    objective: Objective
    context_from: str = ""
    ema_decay: float = 1.0  # 1: frozen
    lr: float = 1e-3
    top_k: int = 4
    max_share: float | None = 1 / SHARE  # of grpo's rollouts


GRPO = Method(PRESETS["grpo"])
OPSD = Method(PRESETS["opsd"], "answer")
SDPO = Method(PRESETS["sdpo"], "feedback")
SIBLING = replace(SDPO, context_from="sibling", max_share=None)


def build_facts_problem() -> Problem:
    """Six facts; a context is a table."""
    task = build_facts()
    return Problem(task, lambda questions: task.solve(questions, FACTS))


def build_modes_problem(share: float) -> Problem:
    """Letters to be reversed, as `share` of the plain answers do; a context is an answer, which is to be copied."""
    modes, shares = build_modes(), torch.tensor([1 - 3 * share, share, share, share])

    def answer_plainly(letters: Rows, draw: torch.Generator) -> Rows:
        return modes.solve(letters, torch.multinomial(shares, len(letters), True, generator=draw)[:, None])

    task = replace(
        modes,
        draw_contexts=lambda n, draw: torch.randint(VALUES, (n, 4), generator=draw),
        solve=lambda letters, shown: wrap(shown.expand(len(letters), -1), END),
        show=lambda letters, shown, first: modes.show(letters, shown - WAY, first),
        answer_plainly=answer_plainly,
    )
    return Problem(task, lambda letters: modes.solve(letters, REVERSE))


def write_context(task: Task, questions: Rows, answers: Rows, draw: torch.Generator) -> Rows:
    """Contexts that show these answers: the letters, or a table with the values of the asked keys."""
    shown = answers[:, :-1].clamp(max=VALUES - 1)
    if task.name != "facts":
        return shown
    return task.draw_contexts(len(questions), draw).scatter(1, questions, shown)


def choose_contexts(
    method: Method, task: Task, questions: Rows, answers: Rows, truth: Rows, draw: torch.Generator
) -> tuple[Rows, torch.Tensor]:
    """The context of every answer, and whether it has one."""
    right = (answers == truth).all(1)
    if method.context_from == "sibling":
        others = right.view(-1, 1, GROUP) & ~torch.eye(GROUP, dtype=torch.bool)
        has_context = others.any(-1).flatten()
        weights = torch.where(others.any(-1, keepdim=True), others.float(), 1.0)
        chosen = torch.multinomial(weights.view(-1, GROUP), 1, generator=draw)[:, 0]
        first = torch.arange(len(answers)) // GROUP * GROUP
        return write_context(task, questions, answers[first + chosen], draw), has_context
    has_context = torch.ones_like(right) if method.context_from == "answer" else ~right
    return write_context(task, questions, truth, draw), has_context


def count_rollouts(
    problem: Problem, base: CausalLM, method: Method, seed: int, limit: float = MAX_ROLLOUTS
) -> tuple[float, float]:
    """Rollouts until the exact held-out accuracy is TARGET, infinite beyond `limit`; and the accuracy at the end."""
    torch.manual_seed(seed)
    draw = torch.Generator().manual_seed(seed + 1000)
    student, teacher, task = copy.deepcopy(base), copy.deepcopy(base), problem.task
    optimizer = torch.optim.AdamW(student.parameters(), lr=method.lr)
    plain, truth = task.plain(task.eval), problem.solve(task.eval)
    objective, step = method.objective, 0
    accuracy = 0.0
    while step * PROMPTS * GROUP <= limit:
        if step % EVERY == 0 and (accuracy := compute_accuracy(student, plain, truth)) >= TARGET:
            return step * PROMPTS * GROUP, accuracy
        step += 1
        questions = pick(task.train, PROMPTS, draw).repeat_interleave(GROUP, 0)
        shown, right = task.plain(questions), problem.solve(questions)
        answers = sample(student, shown, task.length, draw)
        table = compute_table(student, shown, answers)
        rewards = (answers == right).all(1).float().view(PROMPTS, GROUP)
        choice = objective.advantage
        values = compute_batch_advantages(rewards.tolist(), baseline=choice.baseline, std=choice.std)
        advantages = torch.tensor(values).view(-1, 1).expand(-1, task.length)
        inputs = make_inputs(table, answers, table.detach(), advantages=advantages)
        if method.context_from:
            contexts, has_context = choose_contexts(method, task, questions, answers, right, draw)
            with torch.no_grad():
                prompts = task.show(questions, contexts, BEGIN)
                teacher_table = compute_table(teacher, prompts, answers, shared=False)
            inputs = make_inputs(table, answers, teacher_table, advantages=advantages)
            inputs = add_tables(inputs, table, teacher_table, objective.distill, method.top_k)
            inputs = replace(inputs, has_teacher=has_context.repeat_interleave(task.length))
        output = policy_loss(inputs, objective)
        optimizer.param_groups[0]["lr"] = method.lr * min(1.0, step / RISING)
        torch.autograd.backward(output.loss_sum / output.count)
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mine, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
                mine.lerp_(theirs, 1 - method.ema_decay)
    return math.inf, accuracy


PROBLEMS = {
    "facts": build_facts_problem,
    "modes": partial(build_modes_problem, 0.003),  # about as rare as a right answer to a question about facts
    "siblings": partial(build_modes_problem, 0.15),  # one rollout of a group of eight
}
ROWS = {
    "facts opsd answer": OPSD,
    "facts sdpo feedback": SDPO,
    "modes opsd answer": OPSD,
    "modes sdpo feedback": SDPO,
    "siblings sdpo sibling": SIBLING,
}
Found = dict[str, list[tuple[float, float]]]
"""Row, or problem and learning rate of `grpo` -> rollouts and accuracy at the end, of each seed."""


def measure(name: str, seeds: Sequence[int], found: Found) -> None:
    """Run the methods of a problem, then `grpo`."""
    problem = PROBLEMS[name]()
    for seed in seeds:
        base, slowest = warm_up(problem.task, seed), 0.0

        def record(
            row: str, method: Method, limit: float = MAX_ROLLOUTS, seed: int = seed, base: CausalLM = base
        ) -> float:
            result = count_rollouts(problem, base, method, seed, limit)
            found.setdefault(row, []).append(result)
            print(f"seed {seed} | {row} | {result[0]:,.0f} rollouts, accuracy {result[1]:.3f}", flush=True)
            return result[0]

        for row, method in ROWS.items():
            if row.startswith(name):
                slowest = max(slowest, record(row, method))
        for lr in GRPO_RATES:
            record(f"{name} grpo {lr:g}", replace(GRPO, lr=lr), SHARE * slowest)


def compare(row: str, found: Found) -> Line:
    """The rollouts of a row as a share of those of `grpo` at its best learning rate."""
    rates = [found[f"{row.split()[0]} grpo {lr:g}"] for lr in GRPO_RATES]
    least = [min(results) for results in zip(*([num for num, _ in rate] for rate in rates), strict=True)]
    best = [max(results) for results in zip(*([accuracy for _, accuracy in rate] for rate in rates), strict=True)]
    rollouts = [num for num, _ in found[row]]
    share = max(num / other for num, other in zip(rollouts, least, strict=True))
    shown = ", ".join(f"{value:.2f}" for value in best)
    detail = f"rollouts {rollouts}; grpo {least}, largest accuracy {shown}"
    limit = ROWS[row].max_share
    return Line(f"{row}: largest share of grpo's rollouts", share, "" if limit is None else "<=", limit, detail)


def main() -> int:
    """Print a line per row; exit code 1 when one misses its threshold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(PROBLEMS), help="problems")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False
    machine, cpu_began = describe_machine(1), time.process_time()
    found: Found = {}
    for name in args.only:
        measure(name, args.seeds, found)
    lines = [compare(row, found) for row in ROWS if row in found]
    lines.append(Line("CPU minutes", (time.process_time() - cpu_began) / 60))
    return finish("outcomes", lines, machine, found, args.json)


if __name__ == "__main__":
    raise SystemExit(main())
