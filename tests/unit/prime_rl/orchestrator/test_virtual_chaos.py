"""Chaos in virtual time: thousands of runs with engine failures, full disks, truncated files and killed processes.

Real: the orchestrator's code, the checkpoints on disk and their validation; see `simulated_run`. More trials than the
default: `make chaos TRIALS=10000`; in parts with FIRST_TRIAL=5000
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from simulated_run import Faults, World, content, make_world
from test_simulated_runs import quiet
from virtual_time import run

from prime_rl.runtime.run_dir import CKPT_PARTS, RunDir
from rollouts.training.steps import complete_steps, step_path

__all__ = ["quiet"]

NUM_TRIALS = int(os.environ.get("NUM_TRIALS", "21"))
FIRST_TRIAL = int(os.environ.get("FIRST_TRIAL", "0"))
NUM_STEPS = 5


def draw_config(draw: random.Random) -> dict[str, Any]:
    n, groups, level = draw.choice([1, 2, 3]), draw.choice([1, 2]), draw.choice([0, 0, 1, 3])
    config: dict[str, Any] = {
        "rollouts_per_example": n,
        "batch_size": n * groups,
        "max_steps": NUM_STEPS,
        "max_async_level": level,
        "oversampling_factor": draw.choice([1.0, 1.5]) if level else 1.0,
        "max_retries": 1,
        "seed": draw.randrange(1000),
        "ckpt": {"interval": draw.choice([1, 2]), "resume_step": -1},
    }
    if draw.random() < 0.3:
        config["buffer"] = {"easy_threshold": 0.9, "hard_threshold": 0.1, "hard_fraction": 0.2}
    return config


def draw_falls(draw: random.Random) -> tuple[tuple[float, float], ...]:
    moments = sorted(draw.uniform(0, 15) for _ in range(draw.choice([0, 1, 3])))
    return tuple((moment, draw.uniform(0.1, 3)) for moment in moments)


def attempt(world: World, monkeypatch: pytest.MonkeyPatch, stop_at: float | None) -> bool:
    """Run until the end (True), the moment at which everything is killed, or a full disk ends it."""
    try:
        return bool(run(lambda: world.run(monkeypatch, stop_at)))
    except (OSError, ExceptionGroup) as error:
        group = error if isinstance(error, ExceptionGroup) else ExceptionGroup("", [error])
        _, others = group.split(OSError)
        if others is not None:
            raise
        return False


def damage(out: Path, draw: random.Random) -> bool:
    """Cut a file of the newest commit, or the seal itself; then trust what can be trusted, as `rl --resume` does."""
    commits = complete_steps(out / "checkpoints", CKPT_PARTS)
    if not commits:
        return False
    files = sorted(path for path in step_path(out / "checkpoints", commits[-1]).rglob("*") if path.is_file())
    path = draw.choice(files)
    os.truncate(path, draw.randrange(max(path.stat().st_size, 1)))
    return True


def disturb(world: World, monkeypatch: pytest.MonkeyPatch, draw: random.Random, hits: Counter[str]) -> None:
    """Run to the end through kills, full disks and damaged files, resuming each time."""
    for _ in range(draw.randrange(1, 5)):
        world.writes_left = draw.randrange(30) if draw.random() < 0.4 else None
        world.faults = replace(world.faults, crashes=draw_falls(draw))
        stop_at = None if world.writes_left is not None else draw.uniform(0, 12)
        done = attempt(world, monkeypatch, stop_at)
        hits["crashes"] += world.engine.num_restarts
        if done:
            break
        hits["kills" if world.writes_left is None else "full disks"] += 1
        if draw.random() < 0.3:
            hits["cut files"] += damage(world.out, draw)
        with contextlib.redirect_stdout(io.StringIO()):
            RunDir(world.out).quarantine_corrupt_checkpoints(CKPT_PARTS)
    else:
        world.writes_left = None
        assert attempt(world, monkeypatch, None)


@pytest.mark.parametrize("part", range(3))
@pytest.mark.timeout(0)
def test_run_result_survives_any_crash(
    part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At level 0 the trainer sees the undisturbed run's batches; at any level the invariants of `World` hold."""
    monkeypatch.setattr("prime_rl.orchestrator.weight_relay.MAX_ATTEMPTS", 20)
    monkeypatch.setattr("prime_rl.orchestrator.waiting.LAG_INTERVAL_S", 50)  # virtual time is never late
    hits, checks, exact = Counter[str](), 0, 0
    for number in range(FIRST_TRIAL + part, FIRST_TRIAL + NUM_TRIALS, 3):
        draw = random.Random(number)
        config, faults = draw_config(draw), Faults(failing=draw.choice([0.0, 0.2]), poison=frozenset({2}))
        world = make_world(tmp_path / "cut", number, faults, **config)
        world.sealed = True
        disturb(world, monkeypatch, draw, hits)
        assert sorted(world.received) == list(range(1, NUM_STEPS + 1)), number
        assert (
            complete_steps(world.out / "checkpoints", CKPT_PARTS)[-1]
            == NUM_STEPS // config["ckpt"]["interval"] * (config["ckpt"]["interval"])
        )
        if config["max_async_level"] == 0:
            whole = make_world(tmp_path / "whole", number + 1, faults, **config)
            assert run(lambda whole=whole: whole.run(monkeypatch))
            assert content(world) == content(whole), (number, config)
            exact += 1
        checks += world.num_checks
        for name in ("cut", "whole"):
            shutil.rmtree(tmp_path / name, ignore_errors=True)
    assert checks > NUM_TRIALS and exact and min(hits[name] for name in ("kills", "full disks", "crashes")) > 0
    with capsys.disabled():
        if NUM_TRIALS > 100:
            print(f"\nvirtual chaos, part {part}: {NUM_TRIALS // 3} trials ({exact} exact), {dict(hits)}, losses 0")
