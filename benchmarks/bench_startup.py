"""Startup time of commands: help, dry run, error, first optimizer step.

    python benchmarks/bench_startup.py [--repeats 5]

Medians over whole processes, after one warm-up process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from results import ROOT, Row, describe_machine, finish

NAMES = "rl trainer sft orchestrator inference eval synthesize monitor plan".split()
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
COMMANDS = {name: SCRIPTS[name].partition(":")[0] for name in NAMES}
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}


def seconds(module: str, *options: str, code: int = 0) -> float:
    """Wall-clock seconds of one process from start to exit."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", module, *options], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True
    )
    took = time.perf_counter() - started
    if done.returncode != code:
        raise SystemExit(f"{module} {' '.join(options)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return took


def main() -> int:
    """Measure, show, write; returns the exit code."""
    parser = argparse.ArgumentParser(description="Measure how long commands take to answer.")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    machine = describe_machine()
    rows = []

    def add(name: str, bound: float, *command: str, code: int = 0) -> None:
        runs = [[word.format(run=run) for word in command] for run in range(options.repeats + 1)]
        times = [seconds(*words, code=code) for words in runs][1:]
        rows.append(Row(name, statistics.median(times), "<=", bound, f"s, {min(times):.2f} - {max(times):.2f}"))

    with tempfile.TemporaryDirectory() as scratch:
        for name, module in COMMANDS.items():
            add(f"{name} --help", 1.0, module, "--help")
        add("rl --dry-run", 1.0, COMMANDS["rl"], "@", "examples/reverse_text/tiny/rl.toml", "--dry-run")
        add("rl, a wrong key", 1.0, COMMANDS["rl"], "--trainer.optim.learning-rate", "1", code=2)
        fake = ("@", "configs/debug/rl/train.toml", "--max-steps", "1", "--output-dir", str(Path(scratch, "{run}")))
        add("trainer on fake data, one step", 15.0, COMMANDS["trainer"], *fake)
    return finish("startup", rows, machine)


if __name__ == "__main__":
    raise SystemExit(main())
