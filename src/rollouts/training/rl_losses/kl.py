"""Estimates of a KL divergence from the log-probs of sampled tokens."""

from __future__ import annotations

from typing import get_args

from torch import Tensor

from rollouts.training.objectives import KLEstimator


def compute_kl(gap: Tensor, estimator: KLEstimator = "k3") -> Tensor:
    """Per-token estimate of KL(policy || reference) from `gap` = logp - ref on the policy's tokens.

    k1: gap (unbiased, may be negative); k2: gap^2 / 2; k3: exp(-gap) - 1 + gap (unbiased and never negative).
    Source: Schulman, "Approximating KL divergence", 2020.
    """
    if estimator == "k1":
        return gap
    if estimator == "k2":
        return 0.5 * gap.square()
    if estimator == "k3":
        return (-gap).expm1() + gap
    raise ValueError(f"kl_estimator {estimator!r} is not one of {', '.join(get_args(KLEstimator))}")
