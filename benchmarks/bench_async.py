"""Effect of each asynchrony option on throughput and staleness: the orchestrator's real code in virtual time.

    python benchmarks/bench_async.py [--steps 60] [--json FILE]

Engine and trainer are simulated: a rollout takes `latency` on average with a long tail (every thirtieth half-rollout
takes twenty times as long, also after a restart), a step `train`. Virtual seconds: the same on any machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "fakes")]

CASES: list[tuple[str, dict[str, Any]]] = [
    ("max_async_level 0", {"max_async_level": 0}),
    ("max_async_level 1", {"max_async_level": 1}),
    ("max_async_level 2", {"max_async_level": 2}),
    ("max_async_level 4", {"max_async_level": 4}),
    ("2, strict_async_level", {"max_async_level": 2, "strict_async_level": True}),
    ("2, max_off_policy_steps 0", {"max_async_level": 2, "max_off_policy_steps": 0}),
    ("0, oversampling_factor 1.5", {"max_async_level": 0, "oversampling_factor": 1.5}),
    ("2, oversampling_factor 1.5", {"max_async_level": 2, "oversampling_factor": 1.5}),
]


def measure(knobs: dict[str, Any], steps: int, latency_s: float, train_s: float, seed: int) -> dict[str, float]:
    """Steps per 100 virtual seconds, mean staleness of tokens, restarted groups per step."""
    import pytest
    from simulated_run import Faults, World
    from virtual_time import run

    from prime_rl.orchestrator.config import OrchestratorConfig

    values = {"rollouts_per_example": 4, "batch_size": 32, "max_steps": steps, "env": [{"id": "env"}], **knobs}
    with tempfile.TemporaryDirectory(dir=_fast_dir()) as out, pytest.MonkeyPatch.context() as patch:
        config = OrchestratorConfig.model_validate({**values, "output_dir": Path(out), "weights_timeout": 1e6})
        faults = Faults(latency_s=latency_s, train_s=train_s, update_s=0.05)
        world = World(Path(out), config, faults, seed, {"env": 1000}, sticky=True)
        patch.setattr("simulated_run.DEADLINE_S", 1e6)
        run(lambda: world.run(patch))
    rows = [metrics for _, metrics in world.rows if "reward/mean" in metrics]
    seconds = world.received_at[steps] - world.received_at[1]
    restarts = sum(value for name, value in rows[-1].items() if name.startswith("restarts/"))
    lost = rows[-1].get("drops/stale", 0.0)
    return {
        "steps_per_100_s": 100 * (steps - 1) / seconds,
        "staleness_mean": sum(row["batch/off_policy_level/mean"] for row in rows) / len(rows),
        "staleness_max": max(row["batch/off_policy_level/max"] for row in rows),
        "restarts_per_step": restarts / steps,
        "lost_per_step": lost / steps,
        "trainer_waits": 1 - world.trained_s / seconds,
    }


def _fast_dir() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def main() -> None:
    """Print one row per setting."""
    from loguru import logger

    logger.remove()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = []
    for title, latency_s, train_s in (("as long as a step", 1.0, 3.0), ("generation dominates", 3.0, 1.0)):
        print(f"\nrollouts of {latency_s:g} s, steps of {train_s:g} s ({title})\n")
        print("| knobs | steps per 100 s | staleness mean | max | restarted groups per step | lost | trainer waits |")
        print("|---|---|---|---|---|---|---|")
        for name, knobs in CASES:
            found = measure(knobs, args.steps, latency_s, train_s, seed=1)
            results.append({"knobs": name, "latency_s": latency_s, "train_s": train_s, **found})
            numbers = [
                f"{found['steps_per_100_s']:.1f}",
                f"{found['staleness_mean']:.2f}",
                f"{found['staleness_max']:.0f}",
                f"{found['restarts_per_step']:.1f}",
                f"{found['lost_per_step']:.1f}",
                f"{found['trainer_waits']:.0%}",
            ]
            print(f"| {name} | {' | '.join(numbers)} |")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
