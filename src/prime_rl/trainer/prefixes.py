"""Tokens of a pack with the same past are computed once: a group's prompt, the turns that rollouts have in common.

All that a decoder does to a token but attention depends on the token alone, and attention on its past. So tokens that
agree, as their pasts do, have the same hidden states, in every bit where attention is exact; their gradients add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

LEAST = 64
"""Packs of fewer different tokens are computed whole: there is nothing to gain."""

WORTH = 0.9
"""As are those of which more than this part is different: the way there and back costs time too."""


@dataclass(frozen=True)
class SharedPrefixes:
    """Which tokens of a pack are computed (`first` of their kind), and where each token finds itself among them."""

    first: Int[Tensor, " different"]
    place: Int[Tensor, " tokens"]


def find_shared(ids: Sequence[int], lengths: Sequence[int]) -> SharedPrefixes | None:
    """The tokens of sequences side by side that differ in themselves or their past; None where too few are equal."""
    if len(lengths) < 2:
        return None
    first: list[int] = []
    place: list[int] = []
    after: dict[tuple[int, int], int] = {}  # (where the past ends, token) -> where it is
    start = 0
    for length in lengths:
        past = -1
        for i in range(start, start + length):
            found = after.setdefault((past, ids[i]), len(first))
            if found == len(first):
                first.append(i)
            place.append(found)
            past = found
        start += length
    if not LEAST <= len(first) <= WORTH * len(place):
        return None
    return SharedPrefixes(torch.tensor(first), torch.tensor(place))
