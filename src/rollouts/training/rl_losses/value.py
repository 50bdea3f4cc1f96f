"""Values of a critic: generalized advantage estimation and the clipped value loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

WHITEN_EPSILON = 1e-8


def compute_gae(
    rewards: Sequence[float], values: Sequence[float], sequence: Sequence[int], gamma: float, gae_lambda: float
) -> tuple[list[float], list[float]]:
    """Advantages and returns of tokens, in order and by sequence (1506.02438, equations 11 and 16).

        d_t = r_t + gamma V_t+1 - V_t        A_t = d_t + gamma gae_lambda A_t+1        return_t = A_t + V_t

    V and A are 0 behind the last token of a sequence. Only sampled tokens are passed, so a turn of the environment is
    not a step.
    """
    advantages = [0.0] * len(values)
    for t in reversed(range(len(values))):
        is_last = t + 1 == len(values) or sequence[t + 1] != sequence[t]
        next_value, next_advantage = (0.0, 0.0) if is_last else (values[t + 1], advantages[t + 1])
        advantages[t] = rewards[t] + gamma * next_value - values[t] + gamma * gae_lambda * next_advantage
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def whiten(
    advantages: Float[Tensor, " tokens"], count: float, total: float, squares: float
) -> Float[Tensor, " tokens"]:
    """(A - mean) / sqrt(variance + 1e-8), with the sums of the whole batch; the variance is over count - 1."""
    mean = total / count
    variance = max(squares / count - mean * mean, 0.0) * count / max(count - 1, 1)
    return (advantages - mean) / (variance + WHITEN_EPSILON) ** 0.5


def compute_value_losses(
    values: Float[Tensor, " tokens"],
    old_values: Float[Tensor, " tokens"],
    returns: Float[Tensor, " tokens"],
    clip: float | None = None,
) -> tuple[Float[Tensor, " tokens"], Bool[Tensor, " tokens"]]:
    """max((V - R)^2, (clip(V) - R)^2) / 2 of each token, and where the second is larger.

    clip(V) is within `clip` of the old value; None: unbounded.
    """
    errors = (values - returns).square()
    if clip is None:
        return errors / 2, torch.zeros_like(errors, dtype=torch.bool)
    change = values - old_values
    bounded = (old_values + change.clamp(-clip, clip) - returns).square()
    return torch.maximum(errors, bounded) / 2, (bounded > errors) & (change.abs() > clip)
