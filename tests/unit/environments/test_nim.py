"""Nim: rules, best play, and games against a frozen model."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
from scripted_client import play

from rollouts.training.environments import load_environment
from rollouts.training.environments.seats import SeatEnvironment


def load(**args: object) -> SeatEnvironment:
    environment = load_environment("nim", args)
    assert isinstance(environment, SeatEnvironment)
    return environment


def best(text: str) -> str:
    return str(int(text) % 4 or 1)


def test_best_play_wins_from_every_number_but_multiples_of_four() -> None:
    rows = [{"prompt": str(n), "stones": n, "frozen_seat": "second"} for n in range(1, 13)]
    rollouts = play(load(), rows, lambda row: lambda messages: best(messages[-1]["content"]))
    assert [rollout.reward for rollout in rollouts] == [-1.0 if n % 4 == 0 else 1.0 for n in range(1, 13)]
    assert all(sum(rollout.seat_rewards.values()) == 0 for rollout in rollouts)


@pytest.mark.parametrize("answer", ["", "0", "4", "1 stone", "x"])
def test_an_invalid_move_loses_at_once(answer: str) -> None:
    rows = load().rows()[:3]
    rollouts = play(load(), rows, lambda row: lambda messages: answer)
    assert all((r.num_turns, r.seat_rewards) == (1, {"first": -1.0, "second": 1.0}) for r in rollouts)


def test_an_opponent_has_each_seat_in_half_of_the_games() -> None:
    rows = load(opponent={"model": "old"}).rows()
    assert {row["frozen_seat"] for row in rows[:2]} == {"first", "second"}
    assert all(4 <= row["stones"] <= 12 and row["prompt"][-1]["content"] == str(row["stones"]) for row in rows)
    rollouts = play(load(opponent={"model": "old"}), rows[:6], lambda row: lambda messages: "x")
    assert [r.reward for r in rollouts] == [1.0 if row["frozen_seat"] == "first" else -1.0 for row in rows[:6]]


def test_warm_up_moves_are_legal_and_of_every_kind() -> None:
    build = sys.modules[type(load().start(load().rows()[0])).__module__].build_sft_examples
    rows = build(500)
    assert all(re.fullmatch("[123]", row["completion"]) for row in rows)
    assert all(int(row["completion"]) <= int(row["prompt"]) for row in rows)
    assert len({(row["prompt"], row["completion"]) for row in rows}) == 33


def test_a_program_cannot_run_a_game() -> None:
    async def run_program(*arguments: Any) -> None: ...

    with pytest.raises(ValueError, match=r"'nim' made a SeatEnvironment, whose .* leave out env\.command"):
        load_environment("nim", agent=run_program)
