"""Group-relative advantages: from rewards to samples."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import get_args

from rollouts.training.objectives import Baseline, Deviation
from rollouts.training.types import Sample, Status

STD_FLOOR = 1e-8
GroupAdvantages = Callable[[list[Sample]], Sequence[float]]
"""Custom advantages: the samples of one group (the last of each rollout) -> one number per rollout."""
Shape = Callable[[list[float], list[list[int]]], list[float]]
"""Rewards of a group and lengths of the completions of each rollout -> rewards to compute the advantages from."""


def compute_advantages(rewards: Sequence[float], baseline: float = 0.0) -> list[float]:
    """A_i = r_i - baseline."""
    return [reward - baseline for reward in rewards]


def compute_group_advantages(
    rewards: Sequence[float],
    *,
    baseline: Baseline = "mean",
    std: bool = False,
    lengths: Sequence[int] | None = None,
) -> list[float]:
    """Advantages of one group of n rollouts of one prompt.

        mean             A_i = r_i - mean(r)                                  GRPO, 2402.03300
        leave_one_out    A_i = r_i - mean(r without i) = n/(n-1) (r_i - mean) RLOO, 2402.14740
        length_weighted  A_i = r_i - sum(l r) / sum(l)                        OPO, 2505.23585, equation 11
        none             A_i = r_i

    `std` divides by the sample standard deviation (over n - 1), as in the common GRPO implementations. A group of equal
    rewards or of one rollout has advantages 0, except with baseline "none". Raises `ValueError` for a reward that is
    not finite.
    """
    if baseline not in get_args(Baseline):
        raise ValueError(f"baseline {baseline!r} is not one of {', '.join(get_args(Baseline))}")
    if not all(map(math.isfinite, rewards)):
        raise ValueError(f"rewards {list(rewards)} contain a value that is not finite: fix the reward function")
    if baseline != "none" and (not rewards or max(rewards) == min(rewards)):
        return [0.0] * len(rewards)
    centered = _center(rewards, baseline, lengths)
    if not std:
        return centered
    return _divide(centered, rewards)


def compute_batch_advantages(
    groups: Sequence[Sequence[float]],
    *,
    baseline: Baseline = "mean",
    std: Deviation = "none",
    lengths: Sequence[Sequence[int]] | None = None,
) -> list[list[float]]:
    """`compute_group_advantages` of every group, optionally divided by the group's or the batch's standard deviation.

    "batch" does not amplify groups of nearly equal rewards (2508.08221, section 4.1). "mean" divides by the group's
    mean reward (MaxRL, 2602.02710): of K successes in n, (n / K) (r - K / n). `ValueError` for a mean below 0.
    """
    if std not in get_args(Deviation):
        raise ValueError(f"std {std!r} is not one of {', '.join(get_args(Deviation))}")
    advantages = [
        compute_group_advantages(
            group, baseline=baseline, std=std == "group", lengths=None if lengths is None else lengths[i]
        )
        for i, group in enumerate(groups)
    ]
    if std == "mean":
        return [_divide_by_mean(row, group) for row, group in zip(advantages, groups, strict=True)]
    if std != "batch":
        return advantages
    rewards = [reward for group in groups for reward in group]
    return [_divide(group, rewards) for group in advantages]


def compute_decoupled_advantages(
    rewards: Sequence[Sequence[Sequence[float]]], weights: Sequence[float]
) -> list[list[float]]:
    """Advantages from several rewards, each normalized within its groups (GDPO, 2601.05242, equations 4 to 6).

    `rewards[k]` are the groups of reward k. A = sum over k of weights[k] (r_k - mean_group r_k) / std_group r_k, minus
    its mean over the batch and divided by its standard deviation there. All deviations are over n - 1.
    """
    tables = [compute_batch_advantages(groups, std="group") for groups in rewards]
    sums = [
        [math.fsum(w * value for w, value in zip(weights, values, strict=True)) for values in zip(*rows, strict=True)]
        for rows in zip(*tables, strict=True)
    ]
    flat = [value for group in sums for value in group]
    mean = math.fsum(flat) / max(len(flat), 1)
    return [_divide([value - mean for value in group], flat) for group in sums]


def split_groups(samples: Iterable[Sample]) -> list[list[list[Sample]]]:
    """Nest samples into groups of rollouts by `group_index`, `seat` and `index`.

    A rollout has several samples if a turn's prompt does not extend the previous one; they share its reward. The seats
    of an episode of several players form groups of their own.
    """
    listed = list(samples)
    nested = split_positions((sample.group_index, sample.seat, sample.index) for sample in listed)
    return [[[listed[i] for i in rollout] for rollout in group] for group in nested]


def split_positions(keys: Iterable[tuple[Hashable, Hashable, Hashable]]) -> list[list[list[int]]]:
    """`split_groups` of the positions of samples with these group indices, seats and indices."""
    groups: dict[Hashable, dict[Hashable, list[int]]] = defaultdict(lambda: defaultdict(list))
    for i, (group, seat, index) in enumerate(keys):
        groups[group, seat][index].append(i)
    return [list(rollouts.values()) for rollouts in groups.values()]


def compute_custom_advantages(custom: GroupAdvantages, group: list[Sample]) -> list[float]:
    """`custom(group)`; `ValueError` unless it returns one finite number per sample."""
    values = [float(value) for value in custom(group)]
    name = getattr(custom, "__name__", "the advantage function")
    if len(values) != len(group) or not all(map(math.isfinite, values)):
        raise ValueError(f"{name} returned {values} for a group of {len(group)}: return one finite number for each")
    return values


def assign_advantages(
    samples: Iterable[Sample],
    *,
    baseline: Baseline = "mean",
    std: Deviation = "none",
    shape: Shape | None = None,
    custom: GroupAdvantages | None = None,
    components: Mapping[str, float] = MappingProxyType({}),
    kl_coef: float = 0.0,
) -> None:
    """Set `advantages` of the samples: every trained token gets that of its rollout in its group, other tokens get 0.

    They are computed from `shape(rewards, completions)` of each group, if given, with the lengths of the completions of
    each rollout; `sample.reward` is unchanged. `custom` replaces the estimator, and so do `components`: weights by name
    of the reward functions whose values are normalized one by one. `kl_coef` times the sum of log-ratios of sampler and
    reference is subtracted from each reward. Failed samples are left out.
    """
    groups = split_groups(sample for sample in samples if sample.status != Status.FAILED)
    completions = [[split_completions(rollout) for rollout in group] for group in groups]
    lengths = [[sum(rollout) for rollout in group] for group in completions]
    rewards = [[rollout[0].reward for rollout in group] for group in groups]
    if kl_coef:
        costs = [[kl_coef * sum_log_ratios(rollout) for rollout in group] for group in groups]
        rewards = [[r - c for r, c in zip(*pair, strict=True)] for pair in zip(rewards, costs, strict=True)]
    if shape is not None:
        rewards = [shape(*pair) for pair in zip(rewards, completions, strict=True)]
    if custom is not None:
        table = [compute_custom_advantages(custom, [rollout[-1] for rollout in group]) for group in groups]
    elif components:
        values = [[[read_component(rollout[0], name) for rollout in group] for group in groups] for name in components]
        table = compute_decoupled_advantages(values, list(components.values()))
    else:
        table = compute_batch_advantages(rewards, baseline=baseline, std=std, lengths=lengths)
    for group, advantages in zip(groups, table, strict=True):
        for rollout, advantage in zip(group, advantages, strict=True):
            for sample in rollout:
                sample.advantages = [advantage if mask > 0 else 0.0 for mask in sample.loss_mask]


def split_completions(rollout: Iterable[Sample]) -> list[int]:
    """Number of tokens of each completion of a rollout: of each run of tokens with loss."""
    masks = (groupby(mask > 0 for mask in sample.loss_mask) for sample in rollout)
    return [sum(1 for _ in run) for mask in masks for is_sampled, run in mask if is_sampled]


def sum_log_ratios(rollout: Sequence[Sample]) -> float:
    """Sum over the sampled tokens of a rollout of log-prob minus reference log-prob, an estimate of their KL in nats.

    Samples that have no teacher by configuration (`has_teacher` False) add 0. `ValueError` for others without
    reference log-probs.
    """
    total = 0.0
    for sample in rollout:
        if not sample.has_teacher:
            continue
        if sample.teacher_logprobs is None or sample.inference_logprobs is None:
            raise ValueError("advantage.kl_coef needs log-probs of a reference: set orchestrator.teacher_model")
        pairs = zip(sample.inference_logprobs, sample.teacher_logprobs, sample.loss_mask, strict=True)
        total += math.fsum(own - reference for own, reference, mask in pairs if mask > 0)
    return total


def read_component(sample: Sample, name: str) -> float:
    """Value of a reward function for a rollout, 0 if its metadata has "zeroed"; `ValueError` if the environment has no
    function of this name."""
    metrics = sample.metadata.get("metrics", {})
    if name not in metrics:
        raise ValueError(f"advantage.rewards names {name!r}, the environment has {', '.join(metrics) or 'none'}")
    value = math.nan if metrics[name] is None else float(metrics[name])  # None: not finite, from a checkpoint
    return 0.0 if sample.metadata.get("zeroed") else value


def assign_role_advantages(samples: Iterable[Sample], baselines: dict[str, float], decay: float) -> None:
    """Set `advantages` to reward minus a running mean of the rewards of the same environment and seat.

    RAE, SPIRAL, 2506.24119: A = r - b, with b before its update to decay b + (1 - decay) r, from 0, as in the authors'
    code: b does not depend on r. `baselines` is changed. Failed samples are left out.
    """
    for group in split_groups(sample for sample in samples if sample.status != Status.FAILED):
        for rollout in group:
            role = f"{rollout[0].metadata.get('env')}/{rollout[0].seat or ''}"
            reward, baseline = rollout[0].reward, baselines.get(role, 0.0)
            for sample in rollout:
                sample.advantages = [reward - baseline if mask > 0 else 0.0 for mask in sample.loss_mask]
            baselines[role] = decay * baseline + (1 - decay) * reward


def compute_overlong_penalty(length: int, max_tokens: int, window: int) -> float:
    """Length penalty: 0 up to `max_tokens - window` tokens, then linear up to 1 at `max_tokens`.

    DAPO, 2503.14476, equation 13.
    """
    if not 0 < window <= max_tokens:
        raise ValueError(f"window {window} must lie between 1 and max_tokens {max_tokens}")
    return min(1.0, max(0.0, (length - (max_tokens - window)) / window))


def _divide(values: Sequence[float], rewards: Sequence[float]) -> list[float]:
    scale = statistics.stdev(rewards) if len(rewards) > 1 else 1.0
    return [value / scale if scale > STD_FLOOR else 0.0 for value in values]


def _divide_by_mean(values: Sequence[float], rewards: Sequence[float]) -> list[float]:
    mean = math.fsum(rewards) / len(rewards) if rewards else 0.0
    if mean < -STD_FLOOR:
        raise ValueError(f"std mean divides by the mean reward, which is {mean:g}: it needs rewards of at least 0")
    return [value / mean if mean > STD_FLOOR else 0.0 for value in values]


def _center(rewards: Sequence[float], baseline: Baseline, lengths: Sequence[int] | None) -> list[float]:
    if baseline == "none":
        return list(rewards)
    if baseline == "length_weighted":
        if lengths is None or len(lengths) != len(rewards):
            raise ValueError(f"length_weighted needs the {len(rewards)} lengths of the rollouts, got {lengths}")
        total = sum(lengths)
        center = (
            math.fsum(r * n for r, n in zip(rewards, lengths, strict=True)) / total
            if total
            else math.fsum(rewards) / len(rewards)
        )
        return compute_advantages(rewards, center)
    centered = compute_advantages(rewards, math.fsum(rewards) / len(rewards))
    if baseline == "mean":
        return centered
    n = len(rewards)
    return [value * n / (n - 1) for value in centered]
