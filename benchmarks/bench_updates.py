"""Rollouts to a fixed reward with several updates per batch, against one update.

    python benchmarks/bench_updates.py [--seeds 0 1 2 3 4] [--num-minibatches 4] [--parallel 1] [--output-dir DIR]

The task, the model and our process are those of bench_grpo.py: five letters reversed, 256 rollouts in groups of 16 per
batch, until three batches in a row have a mean reward of .9. Only `trainer.num_minibatches` differs; learning rate,
clipping and loss are equal. Rollouts do not depend on the load of the machine, so `--parallel` runs several seeds at
once. Prints medians and their ratio with its threshold, writes `.bench/results/updates.json`, and exits with 1 when
it is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench_grpo import ROOT, Cost, build_task, build_texts, run_process, warm_up
from results import Row, describe_machine, finish

FEWER = 1.5
"""Wanted ratio of rollouts."""


def run_one(model_dir: str, seed: int, num_minibatches: int, texts: list[str], out: Path) -> Cost:
    """One run to the reward."""
    path = build_task(model_dir, seed, texts, out / f"{num_minibatches}_{seed}")
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_minibatches": num_minibatches}))
    cost = run_process(sys.executable, "grpo_peer.py", path, str(ROOT / "src"))
    sys.stdout.write(f"seed {seed}, {num_minibatches} updates per batch: {cost}\n")
    sys.stdout.flush()
    return cost


def judge(costs: dict[int, list[Cost]], batch_size: int) -> list[Row]:
    """Runs that reached the reward, the medians of their rollouts, and the ratio."""
    rows, rollouts = [], {}
    for num, of in costs.items():
        steps = [cost.step for cost in of if cost.step is not None]
        rows.append(Row(f"runs with {num} updates per batch that reached reward .9", len(steps), ">=", len(of)))
        if steps:
            rollouts[num] = batch_size * statistics.median(steps)
            detail = "batches: " + ", ".join(map(str, steps))
            rows.append(Row(f"rollouts to reward .9, {num} updates per batch", rollouts[num], detail=detail))
    if len(rollouts) == len(costs):
        one, several = rollouts.values()
        rows.append(Row("rollouts of one update over those of several", one / several, ">=", FEWER))
    return rows


def main() -> int:
    """Measure, show, write; returns the exit code."""
    parser = argparse.ArgumentParser(description="Rollouts to a fixed reward with several updates per batch.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--num-minibatches", type=int, default=4)
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time")
    parser.add_argument("--output-dir", type=Path, default=None, help="default: a new temporary directory")
    arguments = parser.parse_args()
    out = (arguments.output_dir or Path(tempfile.mkdtemp(prefix="bench_updates_"))).resolve()
    out.mkdir(parents=True, exist_ok=True)
    texts, model_dir = build_texts(), warm_up(out / "sft")
    batch_size = json.loads(build_task(model_dir, 0, texts, out / "task").read_text())["batch_size"]
    with ThreadPoolExecutor(arguments.parallel) as pool:
        runs = {
            num: [pool.submit(run_one, model_dir, seed, num, texts, out) for seed in arguments.seeds]
            for num in (1, arguments.num_minibatches)
        }
        costs = {num: [run.result() for run in of] for num, of in runs.items()}
    rows = judge(costs, batch_size)
    return finish("updates", rows, describe_machine(1), {num: [vars(c) for c in of] for num, of in costs.items()})


if __name__ == "__main__":
    raise SystemExit(main())
