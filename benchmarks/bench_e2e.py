"""End-to-end benchmark of the demo: learning on every seed, asynchrony, and determinism at level 0.

    python benchmarks/bench_e2e.py [--seeds 0 1 2] [--output-dir DIR]

Runs `scripts/demo.py` for each seed (SFT, RL at level 2, evaluations), then the RL part twice at level 0. Prints every
number beside its threshold, writes `.bench/results/e2e.json`, and exits with 1 when one is missed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
from results import Row, describe_machine, finish  # noqa: E402

from prime_rl.runtime.machine import find_free_port  # noqa: E402
from prime_rl.telemetry.busy_intervals import compute_overlap  # noqa: E402
from rollouts.training.metrics import load_jsonl  # noqa: E402
from rollouts.training.steps import latest_step, step_path  # noqa: E402

LEVEL_0_STEPS = 16


def measure_demo(seed: int, out: Path) -> list[Row]:
    """One demo: rewards, time and overlap."""
    started = time.monotonic()
    run([sys.executable, "scripts/demo.py", "--seed", str(seed), "--output-dir", str(out)])
    seconds = time.monotonic() - started
    before, after = (load_summary(out / part) for part in ("sft", "rl"))
    gain = after["metrics/exact_match"] - before["metrics/exact_match"]
    overlap = compute_overlap(load_jsonl(out / "rl" / "metrics.jsonl"))
    assert overlap is not None, "the run left no timeline"
    return [
        Row(f"seed {seed}: reward before RL", before["avg@1"], ">=", 0.3),
        Row(f"seed {seed}: reward before RL", before["avg@1"], "<=", 0.7),
        Row(f"seed {seed}: reward after RL", after["avg@1"], ">=", 0.9),
        Row(f"seed {seed}: gain of exact match", gain, ">=", 0.4),
        Row(f"seed {seed}: held-out strings", after["examples"], ">=", 256),
        Row(f"seed {seed}: seconds", seconds, "<=", 180),
        Row(f"seed {seed}: trainer and engine busy at once, level 2", overlap, ">=", 0.3),
    ]


def measure_level_0(model: Path, out: Path) -> list[Row]:
    """Two synchronous runs of one seed: identical weights, no overlap, no mismatch."""
    digests, overlaps, mismatches = set(), [], []
    for attempt in ("a", "b"):
        run_dir = out / attempt
        options = ["--model.name", str(model), "--max-async-level", "0", "--max-steps", str(LEVEL_0_STEPS)]
        options += ["--output-dir", str(run_dir), "--inference.server.port", str(find_free_port())]
        run([sys.executable, "-m", "prime_rl.rl", "@", "examples/reverse_text/tiny/rl.toml", *options])
        digests.add(hash_file(newest_weights(run_dir) / "model.safetensors"))
        rows = list(load_jsonl(run_dir / "metrics.jsonl"))
        overlaps.append(compute_overlap(rows) or 0.0)
        mismatches += [abs(row[key]) for row in rows for key in ("mismatch_kl/max", "mismatch_kl/min") if key in row]
        rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    return [
        Row("level 0: different weights among two runs of one seed", len(digests) - 1, "==", 0),
        Row("level 0: trainer and engine busy at once", max(overlaps), "<=", 0.02),
        Row("level 0: largest mismatch KL of any token", max(mismatches), "==", 0.0),
        Row("level 0: gain of reward (so the runs were not idle)", rewards[-1] - rewards[0], ">=", 0.05),
    ]


def run(argv: list[str]) -> None:
    """Run a command quietly; print its output if it fails."""
    environment = {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(argv, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(argv)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def load_summary(run_dir: Path, environment: str = "reverse-text") -> dict[str, Any]:
    """The evaluation of a stage."""
    summary: dict[str, Any] = json.loads((run_dir / "evals" / environment / "summary.json").read_text())
    return summary


def newest_weights(run_dir: Path) -> Path:
    """The last version that a run published."""
    step = latest_step(run_dir / "weights")
    assert step is not None, f"{run_dir} holds no weights"
    return step_path(run_dir / "weights", step)


def hash_file(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> int:
    """Measure, show, write; returns the exit code."""
    parser = argparse.ArgumentParser(description="Measure the demo and the guarantees of level 0.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output-dir", type=Path, default=None, help="default: a new temporary directory")
    arguments = parser.parse_args()
    out = (arguments.output_dir or Path(tempfile.mkdtemp(prefix="bench_e2e_"))).resolve()
    out.mkdir(parents=True, exist_ok=True)
    machine = describe_machine()
    rows: list[Row] = []
    for seed in arguments.seeds:
        rows += measure_demo(seed, out / f"seed_{seed}")
    rows += measure_level_0(newest_weights(out / f"seed_{arguments.seeds[0]}" / "sft"), out / "level_0")
    return finish("e2e", rows, machine)


if __name__ == "__main__":
    raise SystemExit(main())
