"""`make demo`: SFT of a tiny model from random weights, asynchronous RL, and evaluation before and after.

    python scripts/demo.py [--seed 0] [--output-dir DIR]

The task: reverse 5 random letters. Everything runs on the CPU through the same commands, processes and files as large
runs. Each demo gets a directory of its own, so it can be repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
RECIPE = Path("examples/reverse_text/tiny")
ENVIRONMENT = "reverse-text"
MODULES = {
    "sft": "prime_rl.trainer.sft.train",
    "rl": "prime_rl.rl",
    "eval": "prime_rl.eval.eval",
}
MEMORY_EVERY_S = 0.5
SHOWN_STEPS = {"sft": 20, "rl": 5}  # every so many; the logs have all
# The sources of this checkout, whatever is installed; and nothing is looked up on a hub.
ENVIRONMENT_VARIABLES = {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")])),
    "HF_HUB_OFFLINE": "1",
}

sys.path.insert(0, str(ROOT / "src"))
from prime_rl.runtime.machine import find_free_port  # noqa: E402
from prime_rl.runtime.process import ChildFailed, Supervisor  # noqa: E402
from prime_rl.telemetry.busy_intervals import compute_overlap  # noqa: E402
from rollouts.training.metrics import load_last_attempts  # noqa: E402
from rollouts.training.steps import latest_step, step_path  # noqa: E402


@dataclass
class Memory:
    """Peak memory of all processes of the demo, in bytes."""

    peak: int = 0
    looked: float = field(default_factory=time.monotonic)

    def look(self, pids: Iterable[int]) -> None:
        """Sample the memory, at most twice a second."""
        if time.monotonic() - self.looked < MEMORY_EVERY_S:
            return
        self.looked = time.monotonic()
        self.peak = max(self.peak, sum(map(read_memory, [os.getpid(), *pids])))


@dataclass
class Demo:
    """One run of the demo: output directory and duration of its stages."""

    console: Console
    output_dir: Path
    seed: int
    num_stages: int = 4
    memory: Memory = field(default_factory=Memory)
    seconds: dict[str, float] = field(default_factory=dict)

    def run(self, title: str, command: str, *options: str) -> None:
        """Run one command and show its output; raises `ChildFailed` when it fails."""
        self.console.rule(f"[bold]{len(self.seconds) + 1}/{self.num_stages}  {title}", align="left")
        self.console.print(f"$ {command} {shlex.join(options)}\n", highlight=False, soft_wrap=True)
        started = time.monotonic()
        with Supervisor(self.output_dir / "logs", sys.stdout, thin_out, grace_s=30) as stage:
            stage.start(command, [sys.executable, "-m", MODULES[command], *options], env=ENVIRONMENT_VARIABLES)
            for _ in stage.poll([command]):
                self.memory.look(stage.find_pids())
        self.seconds[title] = time.monotonic() - started
        self.console.print()

    def evaluate(self, title: str, run_dir: Path) -> dict[str, Any]:
        """Evaluate the last weights of a run on held-out strings; returns the summary."""
        weights = newest_weights(run_dir)
        options = ["@", str(RECIPE / "eval.toml"), "--model.name", shown(weights), "--output-dir", shown(run_dir)]
        self.run(title, "eval", *options, "--seed", str(self.seed))
        summary: dict[str, Any] = json.loads((run_dir / "evals" / ENVIRONMENT / "summary.json").read_text())
        return summary


def main() -> int:
    """Run the four stages and print a summary; returns the exit code."""
    arguments = parse_arguments()
    os.chdir(ROOT)  # the recipe's paths are relative to the repository
    output_dir = arguments.output_dir or next_directory(ROOT / "outputs" / "demo")
    demo = Demo(Console(highlight=False), output_dir, arguments.seed)
    demo.console.print(
        f"Reverse 5 random letters: supervised warm-up from random weights, then asynchronous RL, seed {demo.seed}.\n"
        f"Everything goes to {shown(output_dir)}, all lines to {shown(output_dir / 'logs')}; Ctrl-C stops it.\n",
        soft_wrap=True,
    )
    try:
        before, after = run_stages(demo)
    except ChildFailed as failure:
        [child] = failure.children
        demo.console.print(f"\nerror: {child.name} ended with {child.describe_end()}, see {shown(child.log_path)}")
        return 1
    except KeyboardInterrupt:
        demo.console.print("\nstopped")
        return 130
    demo.console.rule("[bold]Summary", align="left")
    sum_up(demo, before, after)
    return 0


def run_stages(demo: Demo) -> tuple[dict[str, Any], dict[str, Any]]:
    """Warm-up, evaluation, RL, evaluation; returns the two evaluations."""
    sft_dir, rl_dir, seed = demo.output_dir / "sft", demo.output_dir / "rl", str(demo.seed)
    options = ["@", str(RECIPE / "sft.toml"), "--output-dir", shown(sft_dir), "--seed", seed]
    demo.run("supervised warm-up from random weights", "sft", *options, "--model.debug.seed", seed)
    before = demo.evaluate("evaluation before RL", sft_dir)
    options = ["@", str(RECIPE / "rl.toml"), "--model.name", shown(newest_weights(sft_dir))]
    options += ["--output-dir", shown(rl_dir), "--seed", seed, "--inference.server.port", str(find_free_port())]
    demo.run("asynchronous RL", "rl", *options)
    return before, demo.evaluate("evaluation after RL", rl_dir)


def sum_up(demo: Demo, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Summary: rewards, time, outputs and next commands."""
    learned = Table(title=f"{after['examples']:.0f} held-out strings", title_justify="left")
    for column in ("", "before RL", "after RL"):
        learned.add_column(column, justify="left" if not column else "right")
    for label, key in (("mean reward", "avg@1"), ("exact match", "metrics/exact_match")):
        learned.add_row(label, f"{before[key]:.3f}", f"{after[key]:.3f}")
    took = Table(title="Time", title_justify="left", show_header=False, show_footer=True)
    took.add_column(footer="in all")
    took.add_column(justify="right", footer=f"{sum(demo.seconds.values()):.1f} s")
    for title, seconds in demo.seconds.items():
        took.add_row(title, f"{seconds:.1f} s")
    demo.console.print(learned, took)
    rl_dir = demo.output_dir / "rl"
    if demo.memory.peak:
        demo.console.print(f"Peak memory of all processes together: {demo.memory.peak / 2**30:.2f} GiB")
    if (share := compute_overlap(load_last_attempts(rl_dir / "metrics.jsonl"))) is not None:
        demo.console.print(f"Trainer and inference engine were busy at the same time for {share:.0%} of the RL run")
    weights = shown(newest_weights(rl_dir))
    demo.console.print(
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


def thin_out(command: str, line: str) -> str | None:
    """Select the lines of a stage to show: some of the steps, and no engine versions."""
    step = re.search(r"Step (\d+) \|", line)
    skipped = step is not None and int(step[1]) > 1 and int(step[1]) % SHOWN_STEPS.get(command, 1)
    return None if skipped or re.search(r"version \d+ in service", line) else f"  {line}"


def read_memory(pid: int) -> int:
    """Bytes of a process, shared pages counted proportionally; 0 if unknown."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0


def newest_weights(run_dir: Path) -> Path:
    """The last step that a run published."""
    step = latest_step(run_dir / "weights")
    if step is None:
        raise SystemExit(f"error: {run_dir / 'weights'} holds no weights although the stage before succeeded")
    return step_path(run_dir / "weights", step)


def next_directory(root: Path) -> Path:
    """`root/run_N` with the next free number; earlier demos stay as they are."""
    numbers = [int(p.name[4:]) for p in root.glob("run_*") if p.name[4:].isdigit()]
    return root / f"run_{max(numbers, default=0) + 1}"


def shown(path: Path) -> str:
    """Path relative to the repository."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def parse_arguments(
    description: str = "Train a tiny model by SFT and asynchronous RL on the CPU.", root: str = "demo"
) -> argparse.Namespace:
    """The seed, and the directory of this demo."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights, the data order and every sample")
    parser.add_argument("--output-dir", type=lambda text: Path(text).resolve(), help=f"default: outputs/{root}/run_N")
    arguments = parser.parse_args()
    if arguments.output_dir and arguments.output_dir.exists() and any(arguments.output_dir.iterdir()):
        parser.error(f"--output-dir {arguments.output_dir} is not empty: choose a new one")
    return arguments


if __name__ == "__main__":
    raise SystemExit(main())
