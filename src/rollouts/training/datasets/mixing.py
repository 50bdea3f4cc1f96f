"""Order of the samples of several mixed sources, a pure function of (seed, epoch)."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence
from typing import Literal

StoppingStrategy = Literal["first_exhausted", "all_exhausted"]

DRAWS_AT_ONCE = 4096


class EpochOrder:
    """Indices of one epoch over concatenated sources, computed lazily."""

    def __init__(self, indices: Iterator[int]) -> None:
        self._made = array("q")
        self._rest = indices

    def at(self, offset: int) -> int | None:
        """The index at `offset`, or None past the end of the epoch."""
        while len(self._made) <= offset:
            index = next(self._rest, None)
            if index is None:
                return None
            self._made.append(index)
        return self._made[offset]


def build_epoch_order(
    sizes: Sequence[int],
    *,
    epoch: int = 0,
    seed: int = 0,
    shuffle: bool = True,
    probabilities: Sequence[float] | None = None,
    stopping: StoppingStrategy = "all_exhausted",
) -> EpochOrder:
    """Sample order of one epoch. Several sources are interleaved by `probabilities`, or round-robin without them.

    `stopping`: the epoch ends when the first or when all sources are exhausted; exhausted sources restart. With
    `shuffle` every epoch has a different order, otherwise the same.
    """
    if not sizes or min(sizes) < 1:
        raise ValueError(f"every source needs at least one sample, got {list(sizes)}")
    epoch = epoch if shuffle else 0
    if len(sizes) == 1:
        return EpochOrder(iter(_permutation(sizes[0], f"{seed}:{epoch}", shuffle)))
    return EpochOrder(_interleave(sizes, f"{seed}:{epoch}", shuffle, probabilities, stopping))


def _permutation(size: int, seed: str, shuffle: bool) -> list[int]:
    indices = list(range(size))
    if shuffle:
        random.Random(seed).shuffle(indices)
    return indices


def _interleave(
    sizes: Sequence[int], seed: str, shuffle: bool, probabilities: Sequence[float] | None, stopping: StoppingStrategy
) -> Iterator[int]:
    starts = [sum(sizes[:s]) for s in range(len(sizes))]
    rounds = [0] * len(sizes)
    unread: list[list[int]] = [[] for _ in sizes]
    for source in _draws(len(sizes), f"{seed}:draws", probabilities):
        if not unread[source]:
            unread[source] = _permutation(sizes[source], f"{seed}:{source}:{rounds[source]}", shuffle)[::-1]
        yield starts[source] + unread[source].pop()
        rounds[source] += not unread[source]
        if (any if stopping == "first_exhausted" else all)(rounds):
            return


def _draws(num_sources: int, seed: str, probabilities: Sequence[float] | None) -> Iterator[int]:
    draw, sources = random.Random(seed), range(num_sources)
    while True:
        yield from sources if probabilities is None else draw.choices(sources, probabilities, k=DRAWS_AT_ONCE)
