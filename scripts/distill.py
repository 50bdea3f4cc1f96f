"""`make distill`: distill six facts of a context into the weights of a tiny model, with intermediate evaluations.

    python scripts/distill.py [--seed 0] [--output-dir DIR]

A warm-up from random weights trains lookup in tables. Then the model is its own teacher, with the table as context;
rewards are not used. Everything runs on the CPU through the same commands and processes as
large runs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from stages import ROOT, Stages, newest_weights, next_directory, parse_arguments, shown

from prime_rl.runtime.machine import find_free_port
from rollouts.training.metrics import load_last_attempts

RECIPE = Path("experiments/context_distill")
TASK, OTHER = "facts", "other-tables"


def main() -> int:
    """Run warm-up and distillation and print a summary; returns the exit code."""
    arguments = parse_arguments("Distill a context into a tiny model on the CPU.", "distill")
    os.chdir(ROOT)  # the recipe's paths are relative to the repository
    output_dir = arguments.output_dir or next_directory(ROOT / "outputs" / "distill")
    stages = Stages(Console(highlight=False), output_dir, num_stages=2)
    stages.console.print(
        f"Distills six facts of a context into the weights of a tiny model, seed {arguments.seed}.\n"
        f"Everything goes to {shown(output_dir)}, all lines to {shown(output_dir / 'logs')}; Ctrl-C stops it.\n",
        soft_wrap=True,
    )
    return stages.attempt(lambda: run_stages(stages, str(arguments.seed)))


def run_stages(stages: Stages, seed: str) -> None:
    """Warm-up, distillation, summary."""
    sft_dir, rl_dir = stages.output_dir / "sft", stages.output_dir / "rl"
    data = write_conversations(stages.output_dir)
    options = ["@", str(RECIPE / "tiny_sft.toml"), "--data.name", shown(data), "--output-dir", shown(sft_dir)]
    stages.run("supervised warm-up from random weights", "sft", *options, "--seed", seed, "--model.debug.seed", seed)
    options = ["@", str(RECIPE / "tiny.toml"), "--model.name", shown(newest_weights(sft_dir))]
    options += ["--output-dir", shown(rl_dir), "--seed", seed, "--inference.server.port", str(find_free_port())]
    stages.run("distillation of the context", "rl", *options)
    sum_up(stages)


def write_conversations(output_dir: Path) -> Path:
    """Write the conversations of the warm-up."""
    subprocess.run([sys.executable, "dev/make_warmup.py", TASK], check=True, stdout=subprocess.DEVNULL)
    output_dir.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(Path("outputs") / TASK / "sft.jsonl", output_dir / "sft.jsonl"))


def find_arms(rows: list[dict[str, Any]], env: str) -> list[dict[str, Any]]:
    """Scores of an environment per evaluated version."""
    key, marker = f"distill/{env}/", f"distill/{env}/student/avg"
    return [
        {"step": row["step"], **{name.removeprefix(key): value for name, value in row.items() if name.startswith(key)}}
        for row in rows
        if marker in row
    ]


def sum_up(stages: Stages) -> None:
    """Summary: gap closed, retention and time."""
    stages.console.rule("[bold]Summary", align="left")
    rl_dir = stages.output_dir / "rl"
    rows = list(load_last_attempts(rl_dir / "metrics.jsonl"))
    table = Table(title="Held-out questions, in the course of the run", title_justify="left")
    columns = ("step", "student", "with the context", "gap closed", "KL to the teacher (nats)", "other tables")
    for column in columns:
        table.add_column(column, justify="right")
    others = {row["step"]: row for row in find_arms(rows, OTHER)}
    for row in find_arms(rows, TASK):
        other = others.get(row["step"], {})
        cells = (row.get("student/avg"), row.get("student_context/avg"), row.get("gap_closed"))
        cells += (row.get("kl_rev_sequence"), other.get("student/avg"))
        table.add_row(f"{row['step']}", *("-" if cell is None else f"{cell:.3f}" for cell in cells))
    stages.console.print(table)
    seconds = ", ".join(f"{title} {seconds:.1f} s" for title, seconds in stages.seconds.items())
    weights = shown(newest_weights(rl_dir))
    stages.console.print(
        f"Time: {seconds}\n"
        f"\nLook at\n"
        f"  {shown(rl_dir / 'metrics.jsonl')}   every metric, distill/{TASK}/gap_closed among them\n"
        f"  {shown(rl_dir / 'samples.jsonl')}   every rollout with its prompt\n"
        f"  {weights}   the model that knows the facts\n"
        f"\nNext\n"
        f"  . .venv/bin/activate\n"
        f"  rl @ {RECIPE / 'tiny.toml'} --inspect-context 2\n"
        f"  {RECIPE / 'README.md'}   a teacher that a reward knows better than, and other ways\n"
        f"  docs/on_policy_distillation.md\n",
        soft_wrap=True,
        markup=False,
    )


if __name__ == "__main__":
    raise SystemExit(main())
