"""Reward shaping within a group: length penalties."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from prime_rl.orchestrator.config import LengthPenaltyConfig
from rollouts.training.advantages import compute_overlong_penalty


def shape_rewards(
    rewards: Sequence[float],
    lengths: Sequence[int],
    config: LengthPenaltyConfig | None,
    *,
    seq_len: int,
    max_tokens: int | None = None,
) -> list[float]:
    """Rewards r of one group after the penalty for n sampled tokens, c = coef:

    relative   r / (1 + c n / mean(n))                                 wrong answers (r = 0) are not penalized
    linear     r - c p n / seq_len,  p = mean(r) within 0..1           no penalty while a prompt is unsolved
    overlong   r - c clip((n - (max_tokens - window)) / window, 0, 1)  DAPO, 2503.14476, equation 13
    """
    if config is None:
        return list(rewards)
    if config.type == "relative":
        mean = fmean(lengths) or 1.0
        return [r / (1 + config.coef * n / mean) for r, n in zip(rewards, lengths, strict=True)]
    if config.type == "linear":
        solved = min(max(fmean(rewards), 0.0), 1.0)
        return [r - config.coef * solved * n / seq_len for r, n in zip(rewards, lengths, strict=True)]
    assert max_tokens is not None, "validated by the config"
    costs = [compute_overlong_penalty(n, max_tokens, config.window) for n in lengths]
    return [r - config.coef * cost for r, cost in zip(rewards, costs, strict=True)]
