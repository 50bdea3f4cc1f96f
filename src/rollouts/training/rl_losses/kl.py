"""Estimates of a KL divergence from the log-probs of sampled tokens."""

from __future__ import annotations

from typing import get_args

from torch import Tensor

from rollouts.training.objectives import MAX_LOG_RATIO, KLEstimator
from rollouts.training.rl_losses.inputs import widen


def compute_kl(gap: Tensor, estimator: KLEstimator = "k3") -> Tensor:
    """Per-token estimate of KL(policy || reference) from `gap` = logp - ref on the policy's tokens.

    k1: gap (unbiased, may be negative); k2: gap^2 / 2; k3: exp(-gap) - 1 + gap (unbiased and never negative).
    k3 is constant below gap = -`MAX_LOG_RATIO`. Half precision is computed in fp32. Do not minimize k1: its gradient,
    that of logp, has no reference in it and a mean of 0 on policy.
    Source: Schulman, "Approximating KL divergence", 2020.
    """
    gap = widen(gap)
    if estimator == "k1":
        return gap
    if estimator == "k2":
        return 0.5 * gap.square()
    if estimator == "k3":
        bounded = gap.clamp(min=-MAX_LOG_RATIO)
        return (-bounded).expm1() + bounded
    raise ValueError(f"kl_estimator {estimator!r} is not one of {', '.join(get_args(KLEstimator))}")
