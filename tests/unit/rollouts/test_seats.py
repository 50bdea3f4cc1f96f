"""Episodes of several seats: samples by seat, frozen players, and advantages by role."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from fake_transport import END, Wire, check, encode, turn

from prime_rl.configuration.sections import SamplingConfig
from prime_rl.orchestrator.config import BufferConfig
from prime_rl.orchestrator.filters import build_group_filter
from prime_rl.orchestrator.rollout_manager import GroupGenerator
from prime_rl.utils.vf import build_sampling_args
from rollouts.training.advantages import assign_advantages, assign_role_advantages
from rollouts.training.agent_integration import Rollout, rollout_to_samples
from rollouts.training.environments import Frozen, SeatEnvironment
from rollouts.training.rollout_gen.groups import mean_reward
from rollouts.training.types import Sample, Status


class Counting:
    """Two seats name numbers in turn, and see all that was named; the one that reaches 3 loses."""

    def __init__(self) -> None:
        self.named: list[str] = []

    @property
    def seat(self) -> str | None:
        return None if "3" in self.named else "ab"[len(self.named) % 2]

    def messages(self) -> list[dict[str, Any]]:
        roles = ["user" if i % 2 == len(self.named) % 2 else "assistant" for i in range(len(self.named) + 1)]
        texts = ["go" if len(self.named) % 2 == 0 else "begin", *self.named]
        first = 0 if roles[0] == "user" else 1
        return [{"role": r, "content": t} for r, t in zip(roles[first:], texts[first:], strict=True)]

    def move(self, text: str) -> None:
        self.named.append(text)

    def rewards(self) -> dict[str, float]:
        loser = "ab"[(len(self.named) - 1) % 2]
        return {seat: -1.0 if seat == loser else 1.0 for seat in "ab"}


def play(
    *script: str, max_tokens: int | None = None, seq_len: int | None = None, **options: Any
) -> tuple[Wire, Rollout]:
    environment = SeatEnvironment([{"prompt": "count"}], lambda row: Counting(), **options)
    wire = Wire(script=[turn([*encode(text), END]) for text in script], seq_len=seq_len)
    args = [build_sampling_args(SamplingConfig(max_tokens=max_tokens), 0)]
    [rollout] = anyio.run(environment.run_group, environment.rows()[0], wire, "m", args)
    return wire, rollout


def test_each_seat_has_samples_of_its_own_with_its_reward() -> None:
    wire, rollout = play("1", "2", "3")
    assert (rollout.status, rollout.num_turns, rollout.reward) == (Status.COMPLETED, 3, -1.0)
    assert rollout.metrics == {"reward_a": -1.0, "reward_b": 1.0}
    samples = rollout_to_samples(rollout, group_index=0, index=0)
    assert {(s.seat, s.reward) for s in samples} == {("a", -1.0), ("b", 1.0)}
    assert sum(s.response_length for s in samples if s.seat == "a") == 4, "1 and 3, and the ends of their turns"
    assert sum(s.response_length for s in samples if s.seat == "b") == 2
    check(wire, samples)


def test_moves_of_a_game_have_seeds_of_their_own() -> None:
    """An engine draws by seed and position: equal seeds would correlate moves after prompts of equal length."""
    seeds = [[body["seed"] for _, body in play("1", "2", "3")[0].seen if "seed" in body] for _ in range(2)]
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 3


def test_a_frozen_seat_is_played_by_its_model_and_not_trained() -> None:
    wire, rollout = play("1", "2", "3", frozen=lambda row: {"a": Frozen("old")})
    requests = [body["model"] for _, body in wire.seen]  # one move may take several
    assert [name for name, _ in groupby(requests)] == ["old", "m", "old"]
    samples = rollout_to_samples(rollout)
    assert {s.seat for s in samples} == {"b"} and rollout.num_sampled == sum(s.response_length for s in samples)
    assert rollout.reward == 1.0, "that of the trained seat"


def test_an_endless_game_ends_after_max_turns() -> None:
    _, rollout = play("1", "2", "1", "2", max_turns=4)
    assert (rollout.num_turns, rollout.status, rollout.stop_reason) == (4, Status.TRUNCATED, "max_turns")


def test_a_game_beyond_the_context_is_truncated() -> None:
    _, rollout = play("1", "2", "1", "2", seq_len=15)
    assert (rollout.num_turns, rollout.status, rollout.stop_reason) == (2, Status.TRUNCATED, "prompt_too_long")
    assert rollout.metrics == {"reward_a": 1.0, "reward_b": -1.0}


def test_a_game_with_a_move_cut_off_is_truncated() -> None:
    _, rollout = play("1", "2x", "3", max_tokens=2)
    assert (rollout.num_turns, rollout.status, rollout.stop_reason) == (3, Status.TRUNCATED, "length")
    assert rollout.reward == -1.0 and {s.status for s in rollout_to_samples(rollout)} == {Status.TRUNCATED}
    _, rollout = play("1", "2x", "3", max_tokens=2, frozen=lambda row: {"b": Frozen("old")})
    assert (rollout.num_turns, rollout.status, rollout.stop_reason) == (2, Status.COMPLETED, None)


@pytest.mark.parametrize("rewards", [{"a": 1.0}, {"a": 1.0, "b": math.nan}])
def test_a_seat_without_a_reward_fails_the_rollout(rewards: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counting, "rewards", lambda game: rewards)
    _, rollout = play("1", "3")
    assert rollout.failed and rollout.error_type == "RewardError" and "b" in str(rollout.error)


def test_a_game_without_a_move_of_the_policy_is_no_failure() -> None:
    _, rollout = play("3", frozen=lambda row: {"a": Frozen("old")})
    assert (rollout.num_turns, rollout.reward, rollout.num_sampled) == (0, 1.0, 0)
    errors = Counter[str]()
    generator: Any = SimpleNamespace(is_scored=True, zero_truncated=False, _errors=errors)
    assert GroupGenerator._to_samples(generator, rollout, "e", 0, 0, 0) == [] and not errors and not rollout.failed


def sample(index: int, seat: str | None, reward: float, group: int = 0) -> Sample:
    return Sample(
        prompt="",
        tokens=[1, 2],
        loss_mask=[0, 1],
        reward=reward,
        group_index=group,
        index=index,
        seat=seat,
        metadata={"env": "e"},
    )


def test_group_means_compare_a_seat_with_itself() -> None:
    samples = [sample(0, "a", 1.0), sample(0, "b", -1.0), sample(1, "a", 0.0), sample(1, "b", 0.0)]
    assign_advantages(samples)
    assert [s.advantages for s in samples] == [[0, 0.5], [0, -0.5], [0, -0.5], [0, 0.5]]


def test_filters_judge_one_seat_at_a_time() -> None:
    judge = partial(anyio.run, build_group_filter(BufferConfig(filters=[{"name": "zero_variance"}])))
    assert judge([sample(i, *pair) for i in (0, 1) for pair in (("a", 1.0), ("b", -1.0))]) == "zero_variance"
    assert judge([sample(0, "a", 1.0), sample(0, "b", 0.0), sample(1, "a", 1.0), sample(1, "b", 0.5)]) is None
    assert mean_reward([sample(0, "a", 1.0), sample(0, "b", -1.0), sample(1, "a", 0.0)]) == 0.5, (
        "that of the first seat"
    )


def test_role_baselines_are_running_means_by_seat() -> None:
    """RAE, SPIRAL, 2506.24119: each reward is compared with the mean before it."""
    samples = [sample(0, "a", 1.0), sample(0, "b", -1.0), sample(0, "a", 1.0, 1), sample(0, "b", -1.0, 1)]
    failed = sample(1, "a", 9.0)
    failed.status = Status.FAILED
    baselines = {"e/b": -0.5}
    assign_role_advantages([*samples, failed], baselines, 0.9)
    found = [s.advantages[1] for s in samples if s.advantages]
    assert found == pytest.approx([1.0, -0.5, 0.9, -0.45])
    assert baselines == pytest.approx({"e/a": 0.19, "e/b": -0.595}) and failed.advantages is None
