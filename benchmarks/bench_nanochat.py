"""RL of a nanochat model from random weights on a CPU: improvement and time for every seed.

    python benchmarks/bench_nanochat.py [--seeds 0 1] [--output-dir DIR]

For each seed the three commands of docs/nanochat.md: problems, tokenizer and warm-up, RL. The share of right answers to
held-out problems, sampled at temperature 1, is compared before and after RL.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from results import ROOT, Row, describe_machine, finish

PROBLEMS = ("--synthetic", '--templates=["find"]', "--max-validation=400")
RECIPE = "examples/nanochat/tiny/prime_rl.toml"


def measure(seed: int, base: Path) -> list[Row]:
    """One seed, in a folder of its own."""
    began = cpu_minutes()
    run(base, "scripts.prepare_aqua", *PROBLEMS, f"--seed={seed}")
    run(base, "scripts.tiny_bootstrap", f"--seed={seed}")
    warm = cpu_minutes() - began
    run(base, "scripts.prime_rl_train", "@", RECIPE, f"--seed={seed}")
    minutes = cpu_minutes() - began
    lines = (base / "prime_rl_runs" / "tiny" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    evaluations = [row for row in map(json.loads, lines) if "eval/accuracy" in row]
    before, after = evaluations[0], evaluations[-1]
    gain = after["eval/accuracy"] - before["eval/accuracy"]
    # Treats the two evaluations as independent, although the problems are the same: z is underestimated.
    error = (before["eval/accuracy_se"] ** 2 + after["eval/accuracy_se"] ** 2) ** 0.5
    return [
        Row(f"seed {seed}: accuracy before RL", before["eval/accuracy"], detail=f"se {before['eval/accuracy_se']:.3f}"),
        Row(f"seed {seed}: accuracy after RL", after["eval/accuracy"], detail=f"se {after['eval/accuracy_se']:.3f}"),
        Row(f"seed {seed}: gain", gain, ">=", 0.05, f"{after['step']} steps"),
        Row(f"seed {seed}: gain over its standard error", gain / error, ">=", 3),
        Row(f"seed {seed}: held-out samples", after["eval/samples"], ">=", 500),
        Row(f"seed {seed}: CPU minutes", minutes, "<=", 15, f"{warm:.1f} of them before RL"),
    ]


def cpu_minutes() -> float:
    """Of the commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (used.ru_utime + used.ru_stime) / 60


def run(base: Path, module: str, *options: str) -> None:
    """A command of the repository, on one thread, with everything below `base`."""
    environ = {**os.environ, "NANOCHAT_BASE_DIR": str(base), "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    print(f"$ python -m {module} {' '.join(options)}", flush=True)
    subprocess.run([sys.executable, "-m", module, *options], cwd=ROOT, env=environ, check=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Every seed; the exit code, 1 when a threshold is missed."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--output-dir", type=Path, help="keeps what the runs write; otherwise it is deleted")
    arguments = parser.parse_args(argv)
    machine = describe_machine(threads=1)
    with tempfile.TemporaryDirectory() as aside:
        out = (arguments.output_dir or Path(aside)).absolute()
        rows = [row for seed in arguments.seeds for row in measure(seed, out / f"seed_{seed}")]
    return finish("nanochat", rows, machine)


if __name__ == "__main__":
    sys.exit(main())
