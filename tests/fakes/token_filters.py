"""The tokens that the settings of truncated sampling exclude."""

from __future__ import annotations

from torch import Tensor

from prime_rl.inference.embedded.sampler import apply_filters, build_filters
from prime_rl.inference.engine import SamplingParams


def filter_logprobs(logprobs: Tensor, params: list[SamplingParams]) -> Tensor:
    """Minus infinity for what the settings of each row exclude."""
    return apply_filters(logprobs, build_filters(list(range(len(params))), params, logprobs.device))
