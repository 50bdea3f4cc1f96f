"""Prefix deduplication: tokens with identical prefixes in a pack (prompts of a group, shared turns) are computed once.

In a causal decoder hidden states depend only on the token and its prefix, so tokens with equal prefixes have equal
hidden states (bit for bit with exact attention), and their gradients add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

MIN_UNIQUE_TOKENS = 64
"""Packs with fewer unique tokens are not deduplicated."""

MAX_UNIQUE_FRACTION = 0.9
"""Packs with a larger fraction of unique tokens are not deduplicated, because gather and scatter cost time."""


@dataclass(frozen=True)
class SharedPrefixes:
    """Indices of the unique tokens (`first` occurrence), and the unique index of every token (`place`)."""

    first: Int[Tensor, " different"]
    place: Int[Tensor, " tokens"]


def find_shared_prefixes(ids: Sequence[int], lengths: Sequence[int]) -> SharedPrefixes | None:
    """Find the unique (prefix, token) pairs of packed sequences; None when too few are shared."""
    if len(lengths) < 2:
        return None
    first: list[int] = []
    place: list[int] = []
    unique: dict[tuple[int, int], int] = {}  # (unique index of the prefix, token) -> unique index
    start = 0
    for length in lengths:
        prefix = -1
        for i in range(start, start + length):
            index = unique.setdefault((prefix, ids[i]), len(first))
            if index == len(first):
                first.append(i)
            place.append(index)
            prefix = index
        start += length
    if not MIN_UNIQUE_TOKENS <= len(first) <= MAX_UNIQUE_FRACTION * len(place):
        return None
    return SharedPrefixes(torch.tensor(first), torch.tensor(place))
