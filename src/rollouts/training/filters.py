"""Group filters: whether to train on the scored samples of one prompt."""

from __future__ import annotations

import math
from collections.abc import Callable

from rollouts.training.types import Sample, Status

Filter = Callable[[list[Sample]], bool]
SAME_REWARD = 1e-12


def check_reward_nonzero_std(samples: list[Sample]) -> bool:
    """The rewards differ. A group of one passes.

    Compares maximum and minimum, because rounding can make a standard deviation positive for equal rewards. Raises
    `ValueError` for a reward that is NaN.
    """
    rewards = [sample.reward for sample in _require_samples(samples)]
    if any(map(math.isnan, rewards)):
        raise ValueError(f"rewards {rewards} of a group hold NaN: fix the reward function")
    return len(rewards) == 1 or max(rewards) - min(rewards) > SAME_REWARD


def check_min_reward(samples: list[Sample], threshold: float = 0.5) -> bool:
    """At least one reward is above `threshold`."""
    return any(sample.reward > threshold for sample in _require_samples(samples))


def check_response_diversity(samples: list[Sample], min_unique_ratio: float = 0.5) -> bool:
    """The share of distinct responses is at least `min_unique_ratio`. A group of one passes."""
    if not 0 <= min_unique_ratio <= 1:
        raise ValueError(f"min_unique_ratio {min_unique_ratio} is a share: 0 to 1")
    responses = [sample.response for sample in _require_samples(samples)]
    return len(set(responses)) / len(responses) >= min_unique_ratio


def check_reasonable_length(samples: list[Sample], min_tokens: int = 10, max_tokens: int = 2048) -> bool:
    """The mean number of tokens, prompt included, is within the bounds."""
    if min_tokens > max_tokens:
        raise ValueError(f"min_tokens {min_tokens} is above max_tokens {max_tokens}")
    return min_tokens <= sum(len(sample.tokens) for sample in _require_samples(samples)) / len(samples) <= max_tokens


def check_any_success(samples: list[Sample]) -> bool:
    """At least one rollout is completed."""
    return any(sample.status == Status.COMPLETED for sample in _require_samples(samples))


def check_quality_and_diversity(samples: list[Sample]) -> bool:
    """The rewards differ, and at least half of the responses are distinct."""
    return check_reward_nonzero_std(samples) and check_response_diversity(samples)


def make_threshold_filter(threshold: float) -> Filter:
    """`check_min_reward` with the given threshold."""

    def check_threshold(samples: list[Sample]) -> bool:
        return check_min_reward(samples, threshold)

    return check_threshold


def make_length_filter(min_tokens: int, max_tokens: int) -> Filter:
    """`check_reasonable_length` with the given bounds."""

    def check_length(samples: list[Sample]) -> bool:
        return check_reasonable_length(samples, min_tokens, max_tokens)

    return check_length


def _require_samples(samples: list[Sample]) -> list[Sample]:
    if not samples:
        raise ValueError("a filter needs a group of at least one sample")
    return samples
