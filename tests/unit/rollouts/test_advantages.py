"""Advantages and filters: closed forms and invariants."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rollouts.training import filters
from rollouts.training.advantages import (
    assign_advantages,
    compute_advantages,
    compute_batch_advantages,
    compute_decoupled_advantages,
    compute_group_advantages,
    compute_overlong_penalty,
    split_completions,
)
from rollouts.training.types import Sample, Status

rewards_lists = st.lists(st.floats(-10, 10), min_size=1, max_size=9)


def group(*rewards: float, response: str = "{i}", status: Status = Status.COMPLETED) -> list[Sample]:
    return [
        Sample(prompt="p", response=response.format(i=i), tokens=[0] * 20, reward=r, status=status)
        for i, r in enumerate(rewards)
    ]


def test_closed_forms() -> None:
    rewards, lengths = [1.0, 0.0, 0.0, 3.0], [1, 2, 3, 4]
    assert compute_advantages(rewards, baseline=0.5) == [0.5, -0.5, -0.5, 2.5]
    assert compute_group_advantages(rewards) == [0.0, -1.0, -1.0, 2.0]
    others = [(0 + 0 + 3) / 3, (1 + 0 + 3) / 3, (1 + 0 + 3) / 3, (1 + 0 + 0) / 3]
    leave_one_out = compute_group_advantages(rewards, baseline="leave_one_out")
    assert leave_one_out == pytest.approx([r - o for r, o in zip(rewards, others, strict=True)])
    weighted = compute_group_advantages(rewards, baseline="length_weighted", lengths=lengths)
    assert weighted == pytest.approx([r - 13 / 10 for r in rewards])
    std = statistics.stdev(rewards)
    assert compute_group_advantages(rewards, std=True) == pytest.approx([0.0, -1 / std, -1 / std, 2 / std])
    assert compute_group_advantages(rewards, baseline="none") == rewards


def test_several_rewards_are_normalized_one_by_one() -> None:
    """GDPO, 2601.05242: a reward with a small range counts as much as one with a large range; then over the batch."""
    correct, style = [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]], [[0.0, 0.01, 0.02], [5.0, 5.0, 5.0]]
    found = compute_decoupled_advantages([correct, style], [1.0, 0.5])
    a, b = 1 / math.sqrt(3), 2 / math.sqrt(3)
    sums = [[b - 0.5, -a, -a + 0.5], [a, a, -b]]
    flat = [value for row in sums for value in row]
    mean, deviation = statistics.mean(flat), statistics.stdev(flat)
    for row, expected in zip(found, sums, strict=True):
        assert row == pytest.approx([(value - mean) / deviation for value in expected], abs=1e-12)
    samples = [
        Sample(
            prompt="",
            tokens=[1, 2],
            loss_mask=[0, 1],
            group_index=g,
            index=i,
            metadata={"metrics": {"correct": correct[g][i], "style": style[g][i]}},
        )
        for g in range(2)
        for i in range(3)
    ]
    assign_advantages(samples, components={"correct": 1.0, "style": 0.5})
    assert [s.advantages[1] for s in samples if s.advantages] == pytest.approx([x for row in found for x in row])
    with pytest.raises(ValueError, match=r"names 'speed', the environment has correct, style"):
        assign_advantages(samples, components={"speed": 1.0})


def test_completions_are_the_runs_of_tokens_with_loss() -> None:
    masks = [[0, 1, 1, 0, 0, 0.5], [0, 1, 1, 1], [0, 0]]
    samples = [Sample(prompt="p", tokens=[0] * len(mask), loss_mask=mask) for mask in masks]
    assert split_completions(samples) == [2, 1, 3]
    assert split_completions(samples[2:]) == []


def test_a_kl_in_the_reward_lowers_it_by_the_log_ratios() -> None:
    """verl's use_kl_in_reward with the k1 estimator: r - coef sum_t (li - lref), before the baseline."""
    samples = [
        Sample(
            prompt="",
            tokens=[1, 2, 3],
            loss_mask=[0, 1, 1],
            inference_logprobs=[0, -1.0, -2.0],
            teacher_logprobs=[0, *reference],
            reward=reward,
            group_index=0,
            index=i,
        )
        for i, (reward, reference) in enumerate([(1.0, (-1.5, -2.0)), (0.0, (-0.5, -1.0))])
    ]
    assign_advantages(samples, kl_coef=0.1)
    shaped = [1.0 - 0.1 * 0.5, 0.0 + 0.1 * 1.5]
    expected = (shaped[0] - shaped[1]) / 2
    assert [s.advantages for s in samples] == [pytest.approx([0, e, e]) for e in (expected, -expected)]
    samples[0].teacher_logprobs, samples[0].has_teacher = None, False
    assign_advantages(samples, kl_coef=0.1)
    assert [s.advantages[1] for s in samples if s.advantages] == pytest.approx([0.425, -0.425]), "its KL costs nothing"
    samples[0].has_teacher = True
    with pytest.raises(ValueError, match="needs log-probs of a reference"):
        assign_advantages(samples, kl_coef=0.1)


def test_maxrl_is_the_gradient_of_the_log_success_rate() -> None:
    """2602.02710: the mean of A_i S_i over a group is mean(S of successes) - mean(S), for any scores S."""
    rewards, scores = [1.0, 0.0, 0.0, 1.0, 0.0], [0.3, -2.0, 0.7, 1.1, 0.4]
    [advantages] = compute_batch_advantages([rewards], std="mean")
    estimate = sum(a * s for a, s in zip(advantages, scores, strict=True)) / 5
    assert estimate == pytest.approx((0.3 + 1.1) / 2 - sum(scores) / 5, abs=1e-9)
    assert compute_batch_advantages([[0.0, 0.0], [1.0, 1.0]], std="mean") == [[0.0, 0.0], [0.0, 0.0]]
    with pytest.raises(ValueError, match="needs rewards of at least 0"):
        compute_batch_advantages([[-1.0, 0.0]], std="mean")


def test_deviation_of_the_batch() -> None:
    groups = [[1.0, 0.0], [0.5, 0.5], [3.0, 1.0]]
    whole = statistics.stdev([1.0, 0.0, 0.5, 0.5, 3.0, 1.0])
    expected = [[0.5 / whole, -0.5 / whole], [0.0, 0.0], [1 / whole, -1 / whole]]
    for found, row in zip(compute_batch_advantages(groups, std="batch"), expected, strict=True):
        assert found == pytest.approx(row)
    assert compute_batch_advantages(groups) == [compute_group_advantages(group) for group in groups]
    by_group = compute_batch_advantages(groups, std="group", lengths=[[1, 1]] * 3)
    assert by_group == [compute_group_advantages(group, std=True) for group in groups]
    with pytest.raises(ValueError, match="'world' is not one of none, group, batch, mean"):
        compute_batch_advantages(groups, std="world")  # type: ignore[arg-type]


def test_overlong_answers_lose_reward_over_the_last_tokens() -> None:
    penalties = [compute_overlong_penalty(length, 20, 5) for length in (0, 15, 16, 18, 20, 25)]
    assert penalties == pytest.approx([0, 0, 0.2, 0.6, 1, 1])
    with pytest.raises(ValueError, match="window 0"):
        compute_overlong_penalty(3, 20, 0)


@given(rewards_lists)
def test_centered_estimators_sum_to_zero(rewards: list[float]) -> None:
    for baseline in ("mean", "leave_one_out"):
        assert math.fsum(compute_group_advantages(rewards, baseline=baseline)) == pytest.approx(0, abs=1e-9)


@given(st.floats(-10, 10), st.integers(1, 9), st.booleans())
def test_equal_rewards_give_exact_zeros(reward: float, n: int, std: bool) -> None:
    for baseline in ("mean", "leave_one_out", "length_weighted"):
        lengths = list(range(1, n + 1))
        assert compute_group_advantages([reward] * n, baseline=baseline, std=std, lengths=lengths) == [0.0] * n


@given(rewards_lists, st.floats(0.1, 10))
def test_std_makes_the_scale_irrelevant(rewards: list[float], scale: float) -> None:
    assume(statistics.pstdev(rewards) > 1e-3)
    scaled = compute_group_advantages([r * scale for r in rewards], std=True)
    assert scaled == pytest.approx(compute_group_advantages(rewards, std=True), rel=1e-6, abs=1e-6)


@given(rewards_lists)
def test_equal_lengths_make_the_weighted_baseline_the_mean(rewards: list[float]) -> None:
    weighted = compute_group_advantages(rewards, baseline="length_weighted", lengths=[7] * len(rewards))
    assert weighted == pytest.approx(compute_group_advantages(rewards), abs=1e-9)


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="not finite"):
        compute_group_advantages([1.0, float("nan")])
    with pytest.raises(ValueError, match="'median' is not one of"):
        compute_group_advantages([1.0], baseline="median")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lengths"):
        compute_group_advantages([1.0, 2.0], baseline="length_weighted")


@given(st.floats(-100, 100), st.integers(2, 40))
def test_a_constant_group_has_no_spread_for_any_value(reward: float, n: int) -> None:
    assert not filters.check_reward_nonzero_std(group(*[reward] * n))


def test_filters() -> None:
    assert filters.check_reward_nonzero_std(group(0.0, 0.1))
    assert filters.check_reward_nonzero_std(group(0.3))
    assert filters.check_min_reward(group(0.2, 0.6))
    assert not filters.check_min_reward(group(0.5))
    assert filters.check_response_diversity(group(0, 0))
    assert not filters.check_response_diversity(group(0, 0, 0, response="same"))
    assert filters.check_response_diversity(group(0, response="same"))
    assert filters.check_reasonable_length(group(0))
    assert not filters.check_reasonable_length(group(0), min_tokens=21)
    assert not filters.check_any_success(group(0, status=Status.TRUNCATED))
    assert filters.check_any_success([*group(0, status=Status.FAILED), *group(0)])
    assert filters.check_quality_and_diversity(group(0, 1))
    assert not filters.check_quality_and_diversity(group(1, 1))
    assert not filters.check_quality_and_diversity(group(0, 1, 2, response="same"))


def test_filter_factories() -> None:
    assert filters.make_threshold_filter(0.9)(group(0.95)) and not filters.make_threshold_filter(0.9)(group(0.9))
    assert filters.make_length_filter(1, 20)(group(0)) and not filters.make_length_filter(1, 19)(group(0))


def test_filters_reject_invalid_groups() -> None:
    with pytest.raises(ValueError, match="NaN"):
        filters.check_reward_nonzero_std(group(0, float("nan")))
    with pytest.raises(ValueError, match="at least one sample"):
        filters.check_any_success([])


def sample(group: int, index: int, reward: float, **more: Any) -> Sample:
    return Sample("", tokens=[1, 2, 3], loss_mask=[0, 0, 1], group_index=group, index=index, reward=reward, **more)


def test_sample_advantages_skip_failed_rollouts() -> None:
    failed = Sample("", group_index=0, index=2, status=Status.FAILED, reward=9.0)
    samples = [sample(0, 0, 1.0), sample(0, 1, 0.0), failed, sample(1, 0, 1.0), sample(1, 0, 1.0), sample(1, 1, 4.0)]
    assign_advantages(samples)
    # Two samples of one rollout count once in its group's mean.
    values = [0.5, -0.5, None, -1.5, -1.5, 1.5]
    assert [s.advantages for s in samples] == [None if value is None else [0, 0, value] for value in values]
    assign_advantages(samples, shape=lambda rewards, lengths: [2 * reward for reward in rewards])
    assert [s.advantages[-1] for s in samples[:2]] == [1.0, -1.0], "the shaped rewards are compared"
    assert [s.reward for s in samples] == [1, 0, 9, 1, 1, 4]
