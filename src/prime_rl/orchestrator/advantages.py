"""Advantages of a batch: length penalties and baselines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean

from prime_rl.orchestrator.config import LengthPenaltyConfig, OrchestratorConfig
from rollouts.training.advantages import assign_advantages, compute_overlong_penalty
from rollouts.training.objectives import Baseline
from rollouts.training.types import Sample


def build_advantages(config: OrchestratorConfig) -> Callable[[list[Sample]], None]:
    """Build the function that sets the advantages of a batch."""
    advantage, penalty = config.advantage, config.length_penalty
    max_tokens = config.sampling.max_tokens
    if advantage is not None and (custom := advantage.import_custom()) is not None:
        return partial(assign_advantages, custom=custom)
    baseline: Baseline = "none"
    if advantage is not None:
        baseline = "length_weighted" if advantage.length_weighted_mean else advantage.baseline
    return partial(
        assign_advantages,
        baseline=baseline,
        std="none" if advantage is None else advantage.std,
        shape=partial(shape_rewards, config=penalty, seq_len=config.seq_len, max_tokens=max_tokens),
    )


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
