"""Reinforcement learning to a fixed reward, against TRL's GRPOTrainer: CPU seconds, same task, model and batch.

    python benchmarks/bench_grpo.py [--seeds 0 1 2 3 4] [--output-dir DIR]

The task is the demo's: reverse five letters, from a model that a short SFT has warmed up. All train until three batches
in a row have a mean reward of .9, with 256 rollouts in groups of 16 per step, the same learning rate, clipping and, but
for `rl`, the same loss. Ours is trainer and engine in one process, like TRL; also measured, without a threshold, is the
`rl` command with all its processes and its own recipe. CPU seconds are given from process start and for the steps
alone. The sides alternate, seed by seed. TRL is installed into an environment of its own, `.bench/trl`. Prints medians
and ratios with their thresholds, writes `.bench/results/grpo.json`, and exits with 1 when one is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from bench_e2e import ROOT, find_free_port, load_jsonl, newest_weights
from bench_trainer import prepare_peer
from results import Row, describe_machine, finish

RECIPE = ROOT / "examples" / "reverse_text" / "tiny"
TARGET, WINDOW = 0.9, 3
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Cost:
    """CPU seconds until the reward was reached, the step it was, and a single process's peak memory; None where not."""

    whole: float | None = None
    steps: float | None = None
    step: int | None = None
    peak_mb: float | None = None


@dataclass
class CpuMeter:
    """CPU seconds of a process and all below it, sampled with time stamps."""

    pid: int
    readings: list[tuple[float, float]] = field(default_factory=list)
    _done: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        """Read until `stop`."""
        while not self._done.wait(0.1):
            self.readings.append((time.time(), cpu_of_tree(self.pid)))

    def stop(self) -> None:
        """No more readings."""
        self._done.set()

    def at(self, when: float) -> float:
        """CPU seconds at a time of the wall clock."""
        times, values = zip(*self.readings, strict=True)
        return float(np.interp(when, times, values))


def cpu_of_tree(root: int) -> float:
    """User and system seconds of a process, of those below it, and of those of them that have ended."""
    below, ticks = defaultdict(list), {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                values = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            below[int(values[1])].append(int(entry.name))
            ticks[int(entry.name)] = sum(map(int, values[11:15]))
    found, queue = 0, [root]
    while queue:
        pid = queue.pop()
        found += ticks.get(pid, 0)
        queue += below[pid]
    return found / TICKS


def run_command(model_dir: str, seed: int, out: Path) -> Cost:
    """The `rl` command of the recipe, to its end; the cost is read where the reward was reached."""
    argv = [sys.executable, "-m", "prime_rl.rl", "@", str(RECIPE / "rl.toml"), "--output-dir", str(out)]
    argv += ["--seed", str(seed), "--model.name", model_dir, "--inference.server.port", str(find_free_port())]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    with (out.parent / f"{out.name}.log").open("w") as log:
        process = subprocess.Popen(argv, cwd=ROOT, env=environment, stdout=log, stderr=log)
        meter = CpuMeter(process.pid)
        watch = threading.Thread(target=meter.watch)
        watch.start()
        code = process.wait()
        meter.stop()
        watch.join()
    if code:
        raise SystemExit(f"rl has failed: see {log.name}")
    rows = [row for row in load_jsonl(out / "metrics.jsonl") if "reward/mean" in row]
    step = first_step([row["reward/mean"] for row in rows])
    if step is None:
        return Cost()
    # The first batch is there after one step's rollouts; what came before is starting.
    begun = meter.at(rows[0]["timestamp"]) - (meter.at(rows[1]["timestamp"]) - meter.at(rows[0]["timestamp"]))
    reached = meter.at(rows[step - 1]["timestamp"])
    return Cost(reached, reached - begun, step)


def build_task(model_dir: str, seed: int, texts: list[str], out: Path) -> Path:
    """The task file of both single processes."""
    recipe = tomllib.loads((RECIPE / "rl.toml").read_text())
    task = {
        "model_dir": model_dir,
        "output_dir": str(out),
        "texts": texts,
        "seed": seed,
        "target": TARGET,
        "window": WINDOW,
        "max_steps": 3 * recipe["max_steps"],
        "batch_size": recipe["orchestrator"]["batch_size"],
        "group_size": recipe["orchestrator"]["rollouts_per_example"],
        "max_tokens": recipe["orchestrator"]["sampling"]["max_tokens"],
        "lr": recipe["trainer"]["optim"]["lr"],
        "max_norm": recipe["trainer"]["optim"]["max_norm"],
        "warmup_steps": recipe["trainer"]["scheduler"]["warmup_steps"],
    }
    path = out.parent / f"{out.name}.json"
    path.write_text(json.dumps(task))
    return path


def run_process(python: str, script: str, task: Path, path: str | None = None) -> Cost:
    """A single process, `path` its PYTHONPATH, until the reward is reached."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONPATH": path} if path else {}
    with task.with_suffix(".log").open("w") as log:
        argv = [python, str(Path(__file__).parent / script), str(task)]
        done = subprocess.run(argv, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
    if done.returncode:
        raise SystemExit(f"{script} has failed: see {log.name}")
    start, *rows = [json.loads(line) for line in done.stdout.splitlines()]
    step = first_step([row["reward"] for row in rows])
    if step is None:
        return Cost()
    reached = rows[step - 1]["cpu"]
    return Cost(reached, reached - start["start"], step, rows[step - 1]["peak_mb"])


def first_step(rewards: list[float]) -> int | None:
    """The first step whose last `WINDOW` batches have the wanted mean reward."""
    for step in range(WINDOW, len(rewards) + 1):
        if statistics.mean(rewards[step - WINDOW : step]) >= TARGET:
            return step
    return None


def warm_up(out: Path) -> str:
    """The initial model of both."""
    argv = [sys.executable, "-m", "prime_rl.trainer.sft.train", "@", str(RECIPE / "sft.toml"), "--output-dir", str(out)]
    subprocess.run(argv, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT / "src")}, check=True, capture_output=True)
    return str(newest_weights(out))


def build_texts() -> list[str]:
    """The prompts of the recipe's environment."""
    sys.path.insert(0, str(ROOT / "environments" / "reverse_text"))
    import reverse_text  # type: ignore[import-not-found]

    [env] = tomllib.loads((RECIPE / "rl.toml").read_text())["orchestrator"]["env"]
    args: dict[str, Any] = env["args"]
    texts: list[str] = reverse_text.build_texts(
        args["num_train_examples"],
        split="train",
        min_length=args["min_length"],
        max_length=args["max_length"],
        alphabet=args["alphabet"],
        seed=0,
    )
    return texts


def judge(costs: dict[str, list[Cost]]) -> list[Row]:
    """Medians of the runs that reached the reward, their ratios, and how many did."""
    reached = {side: [cost for cost in of if cost.whole is not None] for side, of in costs.items()}
    rows = []
    for side, of in reached.items():
        num = len(costs[side])
        rows.append(Row(f"runs of {side} that reached reward .9", len(of), *((">=", num) if side == "ours" else ())))
    if not reached["ours"] or not reached["TRL"]:
        return rows
    for side in ("ours", "rl"):
        limit = ("<=", 0.5) if side == "ours" else ()
        for name, of_cost in (("steps alone", "steps"), ("whole, with start", "whole")):
            if reached[side]:
                mine, other = (statistics.median(getattr(c, of_cost) for c in reached[s]) for s in (side, "TRL"))
                detail = f"{mine:.1f} CPU s against {other:.1f}"
                rows.append(
                    Row(
                        f"CPU seconds to reward .9, {side}, {name}: share of TRL's", mine / other, *limit, detail=detail
                    )
                )
    mine, other = (statistics.median(cost.peak_mb or 0 for cost in reached[side]) for side in ("ours", "TRL"))
    rows.append(Row("peak memory, ours: share of TRL's", mine / other, detail=f"{mine:.0f} MB against {other:.0f}"))
    steps = {side: statistics.median(cost.step or 0 for cost in of) for side, of in reached.items() if of}
    return [*rows, *(Row(f"steps of {side} to reward .9", num) for side, num in steps.items())]


def main() -> int:
    """Measure, show, write; returns the exit code."""
    parser = argparse.ArgumentParser(description="CPU seconds to a fixed reward, against TRL's GRPOTrainer.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--output-dir", type=Path, default=None, help="default: a new temporary directory")
    parser.add_argument("--peer-env", type=Path, default=ROOT / ".bench" / "trl", help="environment with TRL")
    arguments = parser.parse_args()
    out = (arguments.output_dir or Path(tempfile.mkdtemp(prefix="bench_grpo_"))).resolve()
    out.mkdir(parents=True, exist_ok=True)
    python, machine, texts = prepare_peer(arguments.peer_env), describe_machine(1), build_texts()
    model_dir = warm_up(out / "sft")
    costs: dict[str, list[Cost]] = {"ours": [], "TRL": [], "rl": []}
    for seed in arguments.seeds:
        mine = build_task(model_dir, seed, texts, out / f"ours_{seed}")
        costs["ours"].append(run_process(sys.executable, "grpo_peer.py", mine, str(ROOT / "src")))
        costs["TRL"].append(
            run_process(str(python), "trl_grpo.py", build_task(model_dir, seed, texts, out / f"trl_{seed}"))
        )
        costs["rl"].append(run_command(model_dir, seed, out / f"rl_{seed}"))
        sys.stdout.write(f"seed {seed}: " + ", ".join(f"{side} {of[-1]}" for side, of in costs.items()) + "\n")
        sys.stdout.flush()
    return finish("grpo", judge(costs), machine, {side: [vars(cost) for cost in of] for side, of in costs.items()})


if __name__ == "__main__":
    raise SystemExit(main())
