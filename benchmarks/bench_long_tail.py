"""Asynchronous against synchronous RL with a long tail of slow rollouts: seconds to the same reward, real processes.

    python benchmarks/bench_long_tail.py [--seeds 0 1 2] [--output-dir DIR]

The demo's task and recipe, in an environment that scores one rollout in 32 after 6 seconds and the others after .2.
Synchronous: `max_async_level` 0, so every step waits for the last of its rollouts. Asynchronous: level 2, and 1.5 times
as many groups in flight as a batch needs. Both run until three batches in a row have a mean reward of .9; the clock
starts with the first batch. Mostly waiting, so a busy machine changes little. Prints medians and their ratio beside the
threshold, writes `.bench/results/long_tail.json`, and exits with 1 when it is missed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench_e2e import ROOT, find_free_port, load_jsonl
from bench_grpo import RECIPE, first_step, warm_up
from results import Row, describe_machine, finish

SIDES = {
    "synchronous": ["--max-async-level", "0"],
    "asynchronous": ["--max-async-level", "2", "--orchestrator.oversampling-factor", "1.5"],
}


def run(side: str, model_dir: str, seed: int, out: Path) -> tuple[float, int] | None:
    """Seconds and steps from the first batch to the reward; None where it was not reached."""
    files = ["@", str(RECIPE / "rl.toml"), "@", str(ROOT / "benchmarks" / "late_reversal.toml")]
    argv = [sys.executable, "-m", "prime_rl.rl", *files, "--output-dir", str(out), "--seed", str(seed), *SIDES[side]]
    argv += ["--model.name", model_dir, "--inference.server.port", str(find_free_port())]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    with (out.parent / f"{out.name}.log").open("w") as log:
        process = subprocess.Popen(argv, cwd=ROOT, env=environment, stdout=log, stderr=log)
        code = None
        while code is None:  # the recipe's own end may be far behind the reward
            try:
                code = process.wait(2)
            except subprocess.TimeoutExpired:
                if reached(out) is not None:
                    process.terminate()
                    process.wait()
                    break
    if code:
        raise SystemExit(f"rl has failed: see {log.name}")
    return reached(out)


def reached(out: Path) -> tuple[float, int] | None:
    """When the reward was reached, from the run's metrics."""
    path = out / "metrics.jsonl"
    rows = [row for row in load_jsonl(path) if "reward/mean" in row] if path.is_file() else []
    step = first_step([row["reward/mean"] for row in rows])
    return None if step is None else (rows[step - 1]["timestamp"] - rows[0]["timestamp"], step)


def judge(found: dict[str, list[tuple[float, int] | None]]) -> list[Row]:
    """Number of runs that reached the reward, their times, and the ratio."""
    rows = [
        Row(f"{side} runs that reached reward .9", sum(f is not None for f in of), ">=", len(of))
        for side, of in found.items()
    ]
    there = {side: [f for f in of if f is not None] for side, of in found.items()}
    if not all(there.values()):
        return rows
    seconds = {side: statistics.median(s for s, _ in of) for side, of in there.items()}
    steps = {side: statistics.median(n for _, n in of) for side, of in there.items()}
    detail = ", ".join(f"{side} {seconds[side]:.0f} s in {steps[side]:.0f} steps" for side in there)
    ratio = seconds["synchronous"] / seconds["asynchronous"]
    return [*rows, Row("seconds to reward .9, synchronous over asynchronous", ratio, ">=", 2.0, detail)]


def main() -> int:
    """Measure, show, write; returns the exit code."""
    parser = argparse.ArgumentParser(description="Asynchronous against synchronous RL with long-tailed latency.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output-dir", type=Path, default=None, help="default: a new temporary directory")
    arguments = parser.parse_args()
    out = (arguments.output_dir or Path(tempfile.mkdtemp(prefix="bench_long_tail_"))).resolve()
    out.mkdir(parents=True, exist_ok=True)
    machine, model_dir = describe_machine(1), warm_up(out / "sft")
    found: dict[str, list[tuple[float, int] | None]] = {side: [] for side in SIDES}
    for seed in arguments.seeds:
        for side, of in found.items():
            of.append(run(side, model_dir, seed, out / f"{side}_{seed}"))
            sys.stdout.write(f"seed {seed}: {side} {of[-1]}\n")
            sys.stdout.flush()
    return finish("long_tail", judge(found), machine, {side: list(of) for side, of in found.items()})


if __name__ == "__main__":
    raise SystemExit(main())
