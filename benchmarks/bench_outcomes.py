"""Rollouts until a held-out accuracy of .9: contexts from outcomes against `grpo`, in one process.

    python benchmarks/bench_outcomes.py [--seeds 0 1 2] [--only answer,feedback] [--json FILE]

The model and the task `facts` are those of `distill_lab`; accuracies are exact. Contexts show the teacher

    answer    the right answer of the question
    feedback  for a wrong answer: the right one; nothing for a right answer

and the losses are the presets. A row passes if outcome contexts need at most a quarter of the rollouts of `grpo`, so
`grpo` runs until it reaches .9, or to four times the rollouts of the slowest of the others.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from distill_lab import (
    BEGIN,
    GROUP,
    RISING,
    VALUES,
    CausalLM,
    Rows,
    Task,
    add_tables,
    build_facts,
    compute_accuracy,
    compute_table,
    make_inputs,
    pick,
    sample,
    warm_up,
)
from results import Row as Line
from results import describe_machine, finish

from rollouts.training.advantages import compute_batch_advantages
from rollouts.training.objectives import PRESETS, Objective
from rollouts.training.rl_losses import policy_loss

PROMPTS, TARGET, EVERY = 8, 0.9, 2
GRPO_RATES = (1e-3, 3e-3)
"""The better one of these learning rates counts."""
FACTS = torch.tensor([[3, 7, 1, 0, 5, 2]])
MAX_ROLLOUTS = 100_000
SHARE = 4


@dataclass(frozen=True)
class Method:
    """A preset, its contexts and the weights of its teacher."""

    objective: Objective
    context_from: str = ""
    ema_decay: float = 1.0  # 1: frozen
    lr: float = 1e-3
    top_k: int = 4


GRPO = Method(PRESETS["grpo"])
OPSD = Method(PRESETS["opsd"], "answer")
SDPO = Method(PRESETS["sdpo"], "feedback")  # with a decay of .95 one seed of three collapses


def write_context(task: Task, questions: Rows, answers: Rows, draw: torch.Generator) -> Rows:
    """Tables with the values of the asked keys from these answers, and random values elsewhere."""
    table = task.draw_contexts(len(questions), draw)
    return table.scatter(1, questions, answers[:, :-1].clamp(max=VALUES - 1))


def choose_contexts(
    method: Method, task: Task, questions: Rows, answers: Rows, truth: Rows, draw: torch.Generator
) -> tuple[Rows, torch.Tensor]:
    """The context of every answer, and whether it has one."""
    right = (answers == truth).all(1)
    if method.context_from == "answer":
        return write_context(task, questions, truth, draw), torch.ones_like(right)
    return write_context(task, questions, truth, draw), ~right


def count_rollouts(
    task: Task, base: CausalLM, method: Method, seed: int, limit: float = MAX_ROLLOUTS
) -> tuple[float, float]:
    """Rollouts until the exact held-out accuracy is TARGET, infinite beyond `limit`; and the accuracy at the end."""
    torch.manual_seed(seed)
    draw = torch.Generator().manual_seed(seed + 1000)
    student, teacher = copy.deepcopy(base), copy.deepcopy(base)
    optimizer = torch.optim.AdamW(student.parameters(), lr=method.lr)
    plain, truth = task.plain(task.eval), task.solve(task.eval, FACTS)
    objective, step = method.objective, 0
    accuracy = 0.0
    while step * PROMPTS * GROUP <= limit:
        if step % EVERY == 0 and (accuracy := compute_accuracy(student, plain, truth)) >= TARGET:
            return step * PROMPTS * GROUP, accuracy
        step += 1
        questions = pick(task.train, PROMPTS, draw).repeat_interleave(GROUP, 0)
        shown, right = task.plain(questions), task.solve(questions, FACTS)
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


ROWS = {
    "opsd answer": OPSD,
    "sdpo feedback": SDPO,
}


def main() -> int:
    """Print a line per row; exit code 1 when one misses its threshold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", type=lambda text: text.split(","), help="words of rows, such as answer,feedback")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False
    machine, cpu_began = describe_machine(1), time.process_time()
    rows = {name: method for name, method in ROWS.items() if not args.only or set(name.split()) & set(args.only)}
    task = build_facts()
    found: dict[str, list[float]] = {}
    ends: dict[str, list[float]] = {}

    def record(row: str, seed: int, result: tuple[float, float]) -> float:
        found.setdefault(row, []).append(result[0])
        ends.setdefault(row, []).append(result[1])
        spent = time.process_time() - cpu_began
        print(f"seed {seed} | {row} | {result[0]:,.0f} rollouts, accuracy {result[1]:.3f} | {spent:.0f} s", flush=True)
        return result[0]

    for seed in args.seeds:
        base, slowest = warm_up(task, seed), 0.0
        for row, method in rows.items():
            slowest = max(slowest, record(row, seed, count_rollouts(task, base, method, seed)))
        for lr in GRPO_RATES:
            result = count_rollouts(task, base, replace(GRPO, lr=lr), seed, SHARE * slowest)
            record(f"grpo {lr:g}", seed, result)
    lines = []
    for row in rows:
        rates = [f"grpo {lr:g}" for lr in GRPO_RATES]
        least = [min(numbers) for numbers in zip(*(found[rate] for rate in rates), strict=True)]
        share = max(num / other for num, other in zip(found[row], least, strict=True))
        best = [max(numbers) for numbers in zip(*(ends[rate] for rate in rates), strict=True)]
        shown = ", ".join(f"{value:.2f}" for value in best)
        detail = f"rollouts {found[row]}; grpo after {SHARE} times those of the slowest row: accuracy {shown}"
        lines.append(Line(f"{row}: largest share of grpo's rollouts", share, "<=", 1 / SHARE, detail))
    lines.append(Line("CPU minutes", (time.process_time() - cpu_began) / 60))
    return finish("outcomes", lines, machine, {"rollouts": found, "accuracy": ends}, args.json)


if __name__ == "__main__":
    raise SystemExit(main())
