"""`make demo`: SFT of a tiny model from random weights, asynchronous RL, and evaluation before and after.

    python scripts/demo.py [--seed 0] [--output-dir DIR]

The task: reverse 5 random letters. Everything runs on the CPU through the same commands, processes and files as large
runs. Each demo gets a directory of its own, so it can be repeated.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from stages import ROOT, Stages, newest_weights, next_directory, parse_arguments, read_summaries, shown

from prime_rl.runtime.machine import find_free_port
from prime_rl.telemetry.busy_intervals import compute_overlap
from rollouts.training.metrics import load_last_attempts

RECIPE = Path("examples/reverse_text/tiny")
ENVIRONMENT = "reverse-text"


def main() -> int:
    """Run the four stages and print a summary; returns the exit code."""
    arguments = parse_arguments("Train a tiny model by SFT and asynchronous RL on the CPU.", "demo")
    os.chdir(ROOT)  # the recipe's paths are relative to the repository
    output_dir = arguments.output_dir or next_directory(ROOT / "outputs" / "demo")
    stages = Stages(Console(highlight=False), output_dir, num_stages=4)
    stages.console.print(
        f"Reverse 5 random letters: supervised warm-up from random weights, then asynchronous RL, "
        f"seed {arguments.seed}.\n"
        f"Everything goes to {shown(output_dir)}, all lines to {shown(output_dir / 'logs')}; Ctrl-C stops it.\n",
        soft_wrap=True,
    )
    return stages.attempt(lambda: run_stages(stages, str(arguments.seed)))


def run_stages(stages: Stages, seed: str) -> None:
    """Warm-up, evaluation, RL, evaluation, summary."""
    sft_dir, rl_dir = stages.output_dir / "sft", stages.output_dir / "rl"
    options = ["@", str(RECIPE / "sft.toml"), "--output-dir", shown(sft_dir), "--seed", seed]
    stages.run("supervised warm-up from random weights", "sft", *options, "--model.debug.seed", seed)
    before = evaluate(stages, "evaluation before RL", sft_dir, seed)
    options = ["@", str(RECIPE / "rl.toml"), "--model.name", shown(newest_weights(sft_dir))]
    options += ["--output-dir", shown(rl_dir), "--seed", seed, "--inference.server.port", str(find_free_port())]
    stages.run("asynchronous RL", "rl", *options)
    sum_up(stages, before, evaluate(stages, "evaluation after RL", rl_dir, seed))


def evaluate(stages: Stages, title: str, run_dir: Path, seed: str) -> dict[str, Any]:
    """Evaluate the last weights of a run on held-out strings; returns the summary."""
    options = ["@", str(RECIPE / "eval.toml"), "--model.name", shown(newest_weights(run_dir))]
    stages.run(title, "eval", *options, "--output-dir", shown(run_dir), "--seed", seed)
    return read_summaries(run_dir)[ENVIRONMENT]


def sum_up(stages: Stages, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Summary: rewards, time, outputs and next commands."""
    stages.console.rule("[bold]Summary", align="left")
    learned = Table(title=f"{after['examples']:.0f} held-out strings", title_justify="left")
    for column in ("", "before RL", "after RL"):
        learned.add_column(column, justify="left" if not column else "right")
    for label, key in (("mean reward", "avg@1"), ("exact match", "metrics/exact_match")):
        learned.add_row(label, f"{before[key]:.3f}", f"{after[key]:.3f}")
    took = Table(title="Time", title_justify="left", show_header=False, show_footer=True)
    took.add_column(footer="in all")
    took.add_column(justify="right", footer=f"{sum(stages.seconds.values()):.1f} s")
    for title, seconds in stages.seconds.items():
        took.add_row(title, f"{seconds:.1f} s")
    stages.console.print(learned, took)
    rl_dir = stages.output_dir / "rl"
    if stages.memory.peak:
        stages.console.print(f"Peak memory of all processes together: {stages.memory.peak / 2**30:.2f} GiB")
    if (share := compute_overlap(load_last_attempts(rl_dir / "metrics.jsonl"))) is not None:
        stages.console.print(f"Trainer and inference engine were busy at the same time for {share:.0%} of the RL run")
    weights = shown(newest_weights(rl_dir))
    stages.console.print(
        f"\nLook at\n"
        f"  {shown(rl_dir / 'metrics.jsonl')}   every metric of every process, one JSON line each\n"
        f"  {shown(rl_dir / 'samples.jsonl')}   every rollout with its reward\n"
        f"  {shown(rl_dir / 'evals' / ENVIRONMENT / 'results.jsonl')}   what the trained model answers\n"
        f"  {weights}   the trained model, a Hugging Face directory\n"
        f"  {shown(rl_dir / 'configs')}   the resolved configuration of each process\n"
        f"\nNext\n"
        f"  . .venv/bin/activate\n"
        f"  env eval @ {RECIPE / 'eval.toml'} --model.name {weights} --rollouts_per_example 8\n"
        f"  rl @ {RECIPE / 'rl.toml'} --model.name {weights} --output-dir outputs/more --max_steps 20\n"
        f"  inference --model.name {weights}\n",
        soft_wrap=True,
        markup=False,
    )


if __name__ == "__main__":
    raise SystemExit(main())
