"""The tiny examples: reward before and after RL, for every seed.

    python benchmarks/bench_examples.py [--examples alphabet_sort wordle wiki_search] [--seeds 0 1] [--output-dir DIR]

Each recipe of `examples/*/tiny` runs as its README says: warm-up data, `sft`, `eval`, `rl`, `eval`. Prints the curves
and every number beside its threshold, writes `.bench/results/examples.json`, and exits with 1 when one is missed.
"""

from __future__ import annotations

import argparse
import math
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bench_e2e import find_free_port, load_jsonl, load_summary, newest_weights, run
from results import Row, describe_machine, finish

COMMANDS = {"sft": "prime_rl.trainer.sft.train", "rl": "prime_rl.rl", "eval": "prime_rl.eval.eval"}
STEPS_PER_POINT = 5  # of a curve, which averages over so many batches


def measure(name: str, seed: int, out: Path) -> tuple[list[Row], list[float]]:
    """One recipe with one seed: its rows, and its curve, the reward of the rollouts of every few steps."""
    environment = name.replace("_", "-")
    recipe, sft_dir, rl_dir = Path("examples") / name / "tiny", out / "sft", out / "rl"
    started, cpu_started = time.monotonic(), cpu_seconds()
    run([sys.executable, "dev/make_warmup.py", environment, "--tiny"])
    start("sft", recipe / "sft.toml", sft_dir, seed, "--model.debug.seed", str(seed))
    model = str(newest_weights(sft_dir))
    start("eval", recipe / "eval.toml", sft_dir, seed, "--model.name", model)
    port = str(find_free_port())
    start("rl", recipe / "rl.toml", rl_dir, seed, "--model.name", model, "--inference.server.port", port)
    start("eval", recipe / "eval.toml", rl_dir, seed, "--model.name", str(newest_weights(rl_dir)))
    seconds, cpu = time.monotonic() - started, cpu_seconds() - cpu_started
    before, after = (load_summary(part, environment) for part in (sft_dir, rl_dir))
    [key] = [key for key in after if key.startswith("avg@") and "/" not in key]
    error = math.hypot(before[f"{key}/stderr"], after[f"{key}/stderr"])
    label = f"{environment}, seed {seed}"
    rows = [
        Row(f"{label}: reward before RL", before[key], ">=", 0.2),
        Row(f"{label}: reward before RL, standard error", before[f"{key}/stderr"], "<=", 0.1),
        Row(f"{label}: reward after RL", after[key], ">=", 0.2),
        Row(f"{label}: reward after RL, standard error", after[f"{key}/stderr"], "<=", 0.1),
        Row(f"{label}: gain in standard errors", (after[key] - before[key]) / error, ">=", 3),
        Row(f"{label}: rollouts of each evaluation", after["rollouts"], ">=", 128),
        Row(f"{label}: CPU seconds of all processes", cpu, "<=", 600),
    ]
    sys.stdout.write(f"{label}: {seconds:.0f} s, {key} {before[key]:.3f} -> {after[key]:.3f}\n")
    return rows, read_curve(rl_dir)


def start(command: str, config: Path, output_dir: Path, seed: int, *options: str) -> None:
    """Run one of the commands with a recipe's file."""
    argv = [sys.executable, "-m", COMMANDS[command], "@", str(config), "--output-dir", str(output_dir)]
    run([*argv, "--seed", str(seed), *options])


def read_curve(run_dir: Path) -> list[float]:
    """Mean reward of the rollouts of every `STEPS_PER_POINT` steps."""
    rewards = [row["reward/mean"] for row in load_jsonl(run_dir / "metrics.jsonl") if "reward/mean" in row]
    return [statistics.mean(rewards[i : i + STEPS_PER_POINT]) for i in range(0, len(rewards), STEPS_PER_POINT)]


def cpu_seconds() -> float:
    """CPU seconds of all processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def render_curves(curves: dict[str, list[float]]) -> str:
    """A table in markdown: a line for each run, a column for every few steps."""
    ends = [str(STEPS_PER_POINT * (i + 1)) for i in range(max(map(len, curves.values())))]
    lines = [["to step", *ends], ["---", *("---:" for _ in ends)]]
    lines += [[label, *(f"{value:.2f}" for value in curve)] for label, curve in curves.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> int:
    """Measure, show, write; returns the exit code."""
    parser = argparse.ArgumentParser(description="Measure the tiny examples.")
    parser.add_argument("--examples", nargs="+", default=["alphabet_sort", "wordle", "wiki_search"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--output-dir", type=Path, default=None, help="default: a new temporary directory")
    arguments = parser.parse_args()
    out = (arguments.output_dir or Path(tempfile.mkdtemp(prefix="bench_examples_"))).resolve()
    out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    machine = describe_machine()
    for name in arguments.examples:
        curves = {}
        for seed in arguments.seeds:
            more, curves[f"seed {seed}"] = measure(name, seed, out / name / f"seed_{seed}")
            rows += more
        sys.stdout.write(f"\nReward while training {name}\n{render_curves(curves)}\n")
    return finish("examples", rows, machine)


if __name__ == "__main__":
    raise SystemExit(main())
