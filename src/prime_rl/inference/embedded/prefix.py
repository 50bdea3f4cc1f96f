"""Prompts that begin alike are computed once: who holds the keys of which tokens, and what finished sequences left.

Found by a chain of hashes over blocks of `STRIDE` tokens, so a look-up costs the length of the prompt. What is kept is
bounded and dropped oldest first; nothing here outlives the weights that computed it (`clear`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

STRIDE = 8
"""Prompts that share fewer tokens than this share nothing."""


class Holder(Protocol):
    """A sequence, running or gone, whose first `num_cached` tokens have keys somewhere."""

    tokens: list[int]
    num_cached: int


@dataclass(eq=False)
class Kept:
    """What a finished sequence left: `kv` is `[2, layers, kv_heads, num_cached, head_dim]`."""

    tokens: list[int]
    num_cached: int
    family: Hashable
    kv: Tensor


class PrefixIndex:
    """Finds the holder with the longest common beginning; only holders of the same family (adapter) are compared."""

    def __init__(self, max_kept_tokens: int) -> None:
        self.max_kept_tokens = max_kept_tokens
        self.num_kept_tokens = 0
        self._holders: dict[Hashable, dict[Holder, None]] = {}
        self._keys: dict[Holder, list[Hashable]] = {}
        self._kept: OrderedDict[Kept, None] = OrderedDict()

    def find(self, tokens: list[int], family: Hashable) -> tuple[Holder | None, int]:
        """The holder that shares most, and how many tokens; those that registered first come first."""
        best: dict[Holder, None] = {}
        for key in _chain(tokens, len(tokens), family):
            found = self._holders.get(key)
            if not found:
                break
            best = found
        holder = max(best, key=lambda h: h.num_cached, default=None)
        if holder is None:
            return None, 0
        if isinstance(holder, Kept):
            self._kept.move_to_end(holder)
        return holder, _count_common(tokens, holder.tokens)

    def register(self, holder: Holder, num_tokens: int, family: Hashable) -> None:
        """From now on the first `num_tokens` of `holder` may be found, computed yet or not."""
        keys = list(_chain(holder.tokens, num_tokens, family))
        for key in keys:
            self._holders.setdefault(key, {})[holder] = None
        self._keys[holder] = keys

    def unregister(self, holder: Holder) -> None:
        """The holder is found no more; nothing happens when it never was."""
        for key in self._keys.pop(holder, ()):
            holders = self._holders[key]
            del holders[holder]
            if not holders:
                del self._holders[key]

    def keep(self, kept: Kept) -> None:
        """Keep what a finished sequence computed, and drop the oldest of what is too much."""
        self._kept[kept] = None
        self.num_kept_tokens += kept.num_cached
        self.register(kept, kept.num_cached, kept.family)
        self.shrink(self.max_kept_tokens)

    def shrink(self, num_tokens: int) -> None:
        """Drop the oldest until at most `num_tokens` are kept."""
        while self.num_kept_tokens > num_tokens:
            oldest, _ = self._kept.popitem(last=False)
            self.num_kept_tokens -= oldest.num_cached
            self.unregister(oldest)

    def clear(self) -> None:
        """Forget everybody: the weights have changed."""
        self._holders.clear()
        self._keys.clear()
        self._kept.clear()
        self.num_kept_tokens = 0


def _chain(tokens: list[int], num_tokens: int, family: Hashable) -> Iterator[Hashable]:
    key: Hashable = family
    for start in range(0, num_tokens - STRIDE + 1, STRIDE):
        # A pair of a hash and the tokens themselves: two prompts meet only if 64-bit hashes of their pasts do.
        key = (hash(key), tuple(tokens[start : start + STRIDE]))
        yield key


def _count_common(a: list[int], b: list[int]) -> int:
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])
