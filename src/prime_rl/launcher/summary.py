"""Progress and result of a run as text."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl.runtime.machine import num_cores
from prime_rl.runtime.run_dir import CKPT_PARTS, RunDir
from rollouts.training.steps import complete_steps, step_path

if TYPE_CHECKING:
    from prime_rl.config import RLConfig


def describe_stop(out: Path) -> str:
    """Progress of a stopped run and how to continue it."""
    run = RunDir(out)
    weights = [step for root in (run.weights, run.broadcasts) for step in complete_steps(root)]
    commits = complete_steps(run.checkpoints, CKPT_PARTS)
    without = "no checkpoint (--ckpt.interval 10 writes one every 10 steps)"
    how = f"checkpoint of step {commits[-1]}: continue with --resume" if commits else without
    versions = complete_steps(run.weights)
    if versions and not commits:
        newest = shlex.quote(str(step_path(run.weights, versions[-1])))
        how += f"; its last weights: --model.name {newest} --output-dir NEW"
    return f"\nStopped after step {max(weights, default=0)}; {how}"


def summarize(config: RLConfig, seconds: float, cpu_seconds: float) -> str:
    """Table of steps, times, rewards or distance to the teacher, output paths and the next command."""
    from rollouts.training.metrics import load_last_attempts

    run, loss = RunDir(config.output_dir), config.trainer.loss
    rows = list(load_last_attempts(run.metrics))
    steps = complete_steps(run.weights)
    newest = step_path(run.weights, steps[-1]) if steps else run.weights
    batches = [row["step"] for row in rows if row.get("process") == "orchestrator" and "reward/mean" in row]
    table: dict[str, object] = {"steps": f"{batches[-1] if batches else 0} in {seconds:.1f} s"}
    cores = num_cores()
    table["CPU time"] = f"{cpu_seconds:.0f} s, {100 * cpu_seconds / (seconds * cores):.0f}% of {cores} cores"
    has_teacher = config.orchestrator.teacher_model is not None and bool(loss.teacher_tau or loss.student_tau)
    if has_teacher:
        table |= summarize_distillation(rows)
    if not has_teacher or loss.adv_tau:
        table["reward"] = first_to_last(rows, "reward/mean")
    table |= {
        "weights": newest,
        "metrics": run.metrics,
        "samples": run.samples,
        "logs": run.logs,
        "page": f"monitor {shlex.quote(str(config.output_dir))} --open",
        "next": f"env eval @ {shlex.quote(str(run.config('eval')))} --model.name {shlex.quote(str(newest))}",
    }
    width = max(8, *map(len, table))
    return "\n" + "\n".join(f"  {name:<{width}} {value}" for name, value in table.items()) + "\n"


def summarize_distillation(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Distance to the teacher, gap closed and retention per environment, and the number of unscored samples."""
    table = {"teacher KL": first_to_last(rows, "teacher_kl/mean")}
    marker = "/student/avg"
    latest = {
        key.removeprefix("distill/").removesuffix(marker): row
        for row in rows
        for key in row
        if key.startswith("distill/") and key.endswith(marker)
    }
    for env, row in latest.items():
        metrics = {key.removeprefix(f"distill/{env}/"): value for key, value in row.items()}
        scores = f"student {metrics['student/avg']:.4f}, step {row['step']}"
        if (retention := metrics.get("retention")) is not None:
            table[env] = f"retention {retention:.2f} ({scores})"
        elif (closed := metrics.get("gap_closed")) is not None:
            low, high = (metrics.get(f"gap_closed/{end}") for end in ("ci_low", "ci_high"))  # not of single contexts
            interval = "" if low is None or high is None else f", {low:.2f} to {high:.2f}"
            table[env] = f"gap closed {closed:.2f}{interval} (teacher {metrics['teacher_context/avg']:.4f}, {scores})"
        else:
            table[env] = f"gap not significant ({scores})"
    skipped = sum(value for row in rows for key, value in row.items() if key.startswith("teacher/skipped/"))
    if skipped:
        table["unscored"] = f"{skipped:.0f} samples were not scored by the teacher and left out"
    return table


def first_to_last(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    """First and last value of a metric that is logged once per batch."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return f"{values[0]:.4f} -> {values[-1]:.4f} (batch mean, first -> last)" if values else "none"
