"""Is this group worth training on? Each filter takes the scored samples of one prompt and answers yes or no."""

from __future__ import annotations

import math
from collections.abc import Callable

from rollouts.training.types import Sample, Status

Filter = Callable[[list[Sample]], bool]
SAME_REWARD = 1e-12


def check_reward_nonzero_std(samples: list[Sample]) -> bool:
    """The rewards differ. A group of one passes: it has no spread to speak of.

    Compares largest and smallest instead of computing a deviation, which rounding makes positive for equal rewards.
    Raises `ValueError` for a reward that is NaN.
    """
    rewards = [sample.reward for sample in _given(samples)]
    if any(map(math.isnan, rewards)):
        raise ValueError(f"rewards {rewards} of a group hold NaN: fix the reward function")
    return len(rewards) == 1 or max(rewards) - min(rewards) > SAME_REWARD


def check_min_reward(samples: list[Sample], threshold: float = 0.5) -> bool:
    """At least one reward is above `threshold`."""
    return any(sample.reward > threshold for sample in _given(samples))


def check_response_diversity(samples: list[Sample], min_unique_ratio: float = 0.5) -> bool:
    """At least this share of the responses are different from each other. A group of one passes."""
    if not 0 <= min_unique_ratio <= 1:
        raise ValueError(f"min_unique_ratio {min_unique_ratio} is a share: 0 to 1")
    responses = [sample.response for sample in _given(samples)]
    return len(set(responses)) / len(responses) >= min_unique_ratio


def check_reasonable_length(samples: list[Sample], min_tokens: int = 10, max_tokens: int = 2048) -> bool:
    """The mean number of tokens, prompt included, lies within the bounds."""
    if min_tokens > max_tokens:
        raise ValueError(f"min_tokens {min_tokens} is above max_tokens {max_tokens}")
    return min_tokens <= sum(len(sample.tokens) for sample in _given(samples)) / len(samples) <= max_tokens


def check_any_success(samples: list[Sample]) -> bool:
    """At least one rollout came to its end."""
    return any(sample.status == Status.COMPLETED for sample in _given(samples))


def check_quality_and_diversity(samples: list[Sample]) -> bool:
    """Rewards differ and at least half of the responses do."""
    return check_reward_nonzero_std(samples) and check_response_diversity(samples)


def make_threshold_filter(threshold: float) -> Filter:
    """`check_min_reward` at a threshold of your own."""

    def check_threshold(samples: list[Sample]) -> bool:
        return check_min_reward(samples, threshold)

    return check_threshold


def make_length_filter(min_tokens: int, max_tokens: int) -> Filter:
    """`check_reasonable_length` with bounds of your own."""

    def check_length(samples: list[Sample]) -> bool:
        return check_reasonable_length(samples, min_tokens, max_tokens)

    return check_length


def _given(samples: list[Sample]) -> list[Sample]:
    if not samples:
        raise ValueError("a filter judges a group of at least one sample")
    return samples
