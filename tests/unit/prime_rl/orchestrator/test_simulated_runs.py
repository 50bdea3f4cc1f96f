"""Asynchrony, faults and resuming of the orchestrator's real code, over many random schedules in virtual time."""

from __future__ import annotations

import math
import os
import random
import time
from pathlib import Path
from typing import Any

import anyio
import pytest
from loguru import logger
from simulated_run import Faults, World, content, make_world
from virtual_time import run

NUM_SCHEDULES = int(os.environ.get("NUM_SCHEDULES", "60"))  # thousands of them: NUM_SCHEDULES=3000


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Any:
    """No log, and no end of hope: nine prompts that are often too easy or failing starve sooner than a real run."""
    monkeypatch.setattr("rollouts.training.rollout_gen.async_rollout_manager.REJECTED_BATCHES", 1000)
    logger.disable("prime_rl")
    yield
    logger.enable("prime_rl")


def draw_config(draw: random.Random) -> dict[str, Any]:
    """Settings of every kind."""
    n, groups = draw.choice([1, 2, 3]), draw.choice([1, 2, 4])
    factor = draw.choice([1.0, 1.0, 1.3, 2.0])
    config: dict[str, Any] = {
        "rollouts_per_example": n,
        "batch_size": n * groups,
        "max_steps": draw.choice([3, 5]),
        "max_async_level": draw.choice([0, 1, 2, 4]),
        "oversampling_factor": factor,
        "strict_async_level": factor == 1.0 and draw.random() < 0.3,
        "max_off_policy_steps": draw.choice([0, 1, 8]),
        "max_retries": draw.choice([0, 2]),
        "max_concurrent": draw.choice([None, n * 2]),
        "seed": draw.randrange(1000),
        "buffer": {},
    }
    if draw.random() < 0.5:
        config["buffer"] = draw.choice(
            [
                {"online_difficulty_filtering": n > 1},
                {"easy_threshold": 0.9, "hard_threshold": 0.1, "hard_fraction": 0.2},
                {"filters": [{"name": "zero_variance"}]},
                {"env_ratios": [1.0, 2.5]},
            ]
        )
    return config


def draw_faults(draw: random.Random) -> Faults:
    start = draw.random() * 5
    return Faults(
        failing=draw.choice([0.0, 0.1, 0.4]),
        poison=frozenset(draw.sample(range(9), draw.choice([0, 0, 1, 2]))),
        outages=draw.choice([(), (), ((start, start + 1.0),)]),
        latency_s=draw.choice([0.05, 1.0, 3.0]),
        train_s=draw.choice([0.05, 1.0, 3.0]),
        update_s=draw.choice([0.0, 0.3, 2.0]),
    )


@pytest.mark.parametrize("part", range(4))
def test_invariants_under_random_schedules_and_faults(
    part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The assertions are in `World.check`, at every pause of everything, and in `Trainer._check`, for every batch."""
    checks = 0
    for number in range(part, NUM_SCHEDULES, 4):
        draw = random.Random(number)
        config, faults = draw_config(draw), draw_faults(draw)
        sizes = {"a": 9, "b": 4} if "env_ratios" in config["buffer"] else {"env": 9}
        world = make_world(tmp_path / str(number), number, faults, sizes, **config)
        assert run(lambda world=world: world.run(monkeypatch)), (number, config, faults)
        assert sorted(world.received) == list(range(1, config["max_steps"] + 1))
        if world.orchestrator.rollouts.in_order:
            order = [s.group_index for step in sorted(world.received) for s in world.received[step]]
            assert order == sorted(order), "groups leave in the order they were drawn"
        checks += world.num_checks
    assert checks > 20 * NUM_SCHEDULES / 4


@pytest.mark.parametrize("max_steps", [12, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_token_accounts_cover_every_fate(max_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Filters, failures, retries and overlong samples, checked at every pause; slow: 100,000 rollouts and more."""
    config = {
        "rollouts_per_example": 5,
        "batch_size": 50,
        "seq_len": 6,
        "max_steps": max_steps,
        "max_async_level": 1,
        "oversampling_factor": 2.0,
        "max_retries": 1,
        "buffer": {"online_difficulty_filtering": True},
    }
    faults = Faults(failing=0.3, poison=frozenset({2}), latency_s=2.0, train_s=0.5)
    world = make_world(tmp_path, 1, faults, {"env": 40}, **config)
    monkeypatch.setattr("simulated_run.DEADLINE_S", 1e6)
    assert run(lambda: world.run(monkeypatch))
    tokens = world.orchestrator.rollouts.tokens
    assert min(tokens.trained, tokens.unscored) > 0 and {"hard", "overlong"} <= set(tokens.dropped)
    _, row = world.rows[-1]
    fates = [row[f"tokens/{name}"] for name in ("trained", "dropped", "unscored", "in_flight")]
    assert row["tokens/generated"] == sum(fates) and min(fates) > 0
    num_rollouts = world.orchestrator.rollouts.groups.next_group_index * 5
    assert num_rollouts >= 50 * max_steps and world.num_checks > num_rollouts


def interrupted(world: World, monkeypatch: pytest.MonkeyPatch, draw: random.Random) -> int:
    """Run a world with interruptions at random moments, each resumed from its checkpoint; how often it was stopped."""
    moments = [draw.random() * 12 for _ in range(5)]
    for stops, stop_at in enumerate([*moments, None]):
        if run(lambda stop_at=stop_at: world.run(monkeypatch, stop_at)):
            return stops
    raise AssertionError("not to the end without an interruption")


@pytest.mark.parametrize("level", [0, 2])
def test_run_is_exactly_repeatable(level: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At level 0, and in strict mode at any, latencies change nothing, pools and filters included."""
    for number in range(6):
        draw = random.Random(number)
        config = draw_config(draw) | {"max_async_level": level, "strict_async_level": level > 0, "max_steps": 5}
        config |= {"oversampling_factor": 1.0, "max_off_policy_steps": 8, "max_retries": 1}
        faults = Faults(failing=0.2, poison=frozenset({3}))
        sizes = {"a": 9, "b": 4} if "env_ratios" in config["buffer"] else {"env": 9}
        worlds = [make_world(tmp_path / f"{number}{i}", 100 * number + i, faults, sizes, **config) for i in range(2)]
        for world in worlds:
            assert run(lambda world=world: world.run(monkeypatch))
        assert content(worlds[0]) == content(worlds[1]), (number, config)


def test_resumed_run_equals_uninterrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At level 0, stopped at random moments again and again, the trainer sees the uninterrupted run's batches."""
    stops = 0
    for number in range(8):
        draw = random.Random(number)
        config = draw_config(draw) | {
            "max_async_level": 0,
            "oversampling_factor": 1.0,
            "max_steps": 6,
            "max_retries": 1,
        }
        config |= {"strict_async_level": False, "ckpt": {"interval": draw.choice([1, 2]), "resume_step": -1}}
        faults = Faults(failing=0.2, poison=frozenset({2}))
        sizes = {"a": 9, "b": 4} if "env_ratios" in config["buffer"] else {"env": 9}
        whole = make_world(tmp_path / f"{number}whole", number, faults, sizes, **config)
        assert run(lambda whole=whole: whole.run(monkeypatch))
        cut = make_world(tmp_path / f"{number}cut", number + 1, faults, sizes, **config)
        stops += interrupted(cut, monkeypatch, draw)
        assert content(cut) == content(whole), (number, config)
        assert cut.rows[-1][1]["groups/drawn"] == whole.rows[-1][1]["groups/drawn"]
    assert stops > 8, "runs were really interrupted"


@pytest.mark.parametrize("level", [0, 2])
def test_lost_notifications_and_clock_jumps(level: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the file notifications are lost, and the system clock jumps by days."""
    config: dict[str, Any] = {"rollouts_per_example": 2, "batch_size": 4, "max_steps": 6, "max_async_level": level}
    plain, odd = (make_world(tmp_path / name, 1, Faults(lost=lost), **config) for name, lost in (("a", 0), ("b", 0.5)))
    assert run(lambda: plain.run(monkeypatch))
    draw, now = random.Random(2), time.time
    monkeypatch.setattr("time.time", lambda: now() + draw.uniform(-3e5, 3e5))
    assert run(lambda: odd.run(monkeypatch))
    assert sorted(odd.received) == sorted(plain.received) == list(range(1, 7))
    if level == 0:
        assert content(odd) == content(plain)
    assert all(math.isfinite(value) for _, row in odd.rows for value in row.values())


def test_resume_keeps_prompt_order_at_any_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(8):
        draw = random.Random(number)
        config = {"rollouts_per_example": 2, "batch_size": 4, "max_steps": 6, "max_async_level": draw.choice([1, 3])}
        config |= {"ckpt": {"interval": 2, "resume_step": -1}}
        cut = make_world(tmp_path / str(number), number, Faults(), **config)
        interrupted(cut, monkeypatch, draw)
        prompts = [s.prompt for step in sorted(cut.received) for s in cut.received[step]][::2]
        first, rest = prompts[:9], prompts[9:12]
        assert first == [f"env {i}" for i in range(9)] and len(set(rest)) == 3


def test_slow_evaluation_does_not_block_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In virtual time the claim is exact: every batch is received at the very same moment with and without it."""
    config = {"rollouts_per_example": 2, "batch_size": 4, "max_steps": 8, "max_async_level": 1}
    fixed = Faults(latency_s=0.0, train_s=0.0, update_s=0.0)
    plain = make_world(tmp_path / "plain", 1, fixed, **config)
    judged = make_world(tmp_path / "judged", 1, fixed, **config, eval={"env": [{"id": "judged"}], "interval": 2})
    judged.eval_latency_s = 50.0
    for world in (plain, judged):

        async def pause(mean_s: float, key: str | None = None, world: World = world) -> None:
            world.check()
            await anyio.sleep(50 if mean_s == 25.0 else 1.0)

        monkeypatch.setattr(world, "pause", pause)
        assert run(lambda world=world: world.run(monkeypatch))
    assert judged.received_at == plain.received_at
    found = [(step, row) for step, row in judged.rows if "eval/judged/avg@1" in row]
    assert found[0][0] == 0 and found[-1][0] == 8, "the model before training, and the last version"
    assert any(row["eval/judged/version/max"] > row["eval/judged/version/min"] for _, row in found)
    assert all(row["eval/judged/version/min"] >= step for step, row in found)
    assert (tmp_path / "judged" / "evals" / "step_8" / "judged" / "summary.json").exists()
