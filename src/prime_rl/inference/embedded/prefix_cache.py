"""Prefix cache: maps token prefixes to cached KV entries of running and finished sequences.

Lookup by chained hashes over blocks of `STRIDE` tokens, linear in the prompt length. Entries of finished sequences are
bounded and evicted oldest first; the cache is cleared after every weight update (`clear`). Where no request continues a
finished sequence (one turn each), the cache stays small: it grows once a request would have found an evicted entry.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from prime_rl.inference.embedded.sequence import Sequence

STRIDE = 8
"""Minimum shared prefix in tokens."""

MOST_EVICTED = 4096
"""Evicted entries that are remembered."""
FIRST_SHARE = 16
"""The cache takes 1 / FIRST_SHARE of its maximum until an evicted entry is missed."""


@dataclass(eq=False)
class CachedPrefix:
    """KV entries of a finished sequence: a copy, `[2, layers, kv_heads, num_cached, head_dim]`, or its pages."""

    tokens: list[int]
    num_cached: int
    cache_namespace: Hashable
    kv: Tensor | None = None
    pages: list[int] = field(default_factory=list)
    size: int = 0
    """The positions that it takes in memory; 0: `num_cached`."""

    def __post_init__(self) -> None:
        self.size = self.size or self.num_cached


PrefixOwner = CachedPrefix | Sequence
"""A finished or running sequence whose first `num_cached` tokens have cached keys."""


class PrefixIndex:
    """Finds the owner with the longest common prefix within a namespace (adapter)."""

    def __init__(self, max_prefix_cache_tokens: int) -> None:
        self.max_prefix_cache_tokens = max_prefix_cache_tokens
        self.on_removal: Callable[[CachedPrefix], None] = lambda prefix: None
        """Called for every entry that is evicted or invalidated."""
        self.num_kept_tokens = 0
        """The sum of their sizes."""
        self._limit = max_prefix_cache_tokens // FIRST_SHARE
        self._evicted: dict[Hashable, None] = {}  # last keys of evicted entries, while the cache may grow
        self._owners: dict[Hashable, dict[PrefixOwner, None]] = {}
        self._keys: dict[PrefixOwner, list[Hashable]] = {}
        self._cached: OrderedDict[CachedPrefix, None] = OrderedDict()

    def find(self, tokens: list[int], namespace: Hashable) -> tuple[PrefixOwner | None, int]:
        """Return the owner with the longest common prefix and its length.

        Of several, one with the same tokens is preferred, else the one with the most keys, else the first registered.
        """
        best: dict[PrefixOwner, None] = {}
        is_best = True
        for key in _chain(tokens, len(tokens), namespace):
            if key in self._evicted:
                self._limit = self.max_prefix_cache_tokens
                self._evicted.clear()
            matches = self._owners.get(key)
            is_best = is_best and bool(matches)
            if is_best and matches:
                best = matches
        owner = max(best, key=lambda h: (h.tokens == tokens, h.num_cached), default=None)
        if owner is None:
            return None, 0
        if isinstance(owner, CachedPrefix):
            self._cached.move_to_end(owner)
        return owner, _count_common(tokens, owner.tokens)

    def register(self, owner: PrefixOwner, num_tokens: int, namespace: Hashable) -> None:
        """Register the first `num_tokens` of `owner`, computed or not."""
        keys = list(_chain(owner.tokens, num_tokens, namespace))
        for key in keys:
            self._owners.setdefault(key, {})[owner] = None
        self._keys[owner] = keys

    def unregister(self, owner: PrefixOwner) -> None:
        """Unregister an owner; no effect if it is not registered."""
        for key in self._keys.pop(owner, ()):
            owners = self._owners[key]
            del owners[owner]
            if not owners:
                del self._owners[key]

    def insert(self, prefix: CachedPrefix) -> None:
        """Insert the entries of a finished sequence, evicting the oldest if the cache is full."""
        self._cached[prefix] = None
        self.num_kept_tokens += prefix.size
        self.register(prefix, prefix.num_cached, prefix.cache_namespace)
        while self.num_kept_tokens > max(self._limit, prefix.size):
            oldest, _ = self._cached.popitem(last=False)
            self.num_kept_tokens -= oldest.size
            if self._limit < self.max_prefix_cache_tokens:
                self._evicted[self._keys[oldest][-1]] = None
                if len(self._evicted) > MOST_EVICTED:
                    del self._evicted[next(iter(self._evicted))]
            self.unregister(oldest)
            self.on_removal(oldest)

    def clear(self) -> None:
        """Invalidate the cache after a weight update."""
        for prefix in self._cached:
            self.on_removal(prefix)
        self._owners.clear()
        self._keys.clear()
        self._cached.clear()
        self._evicted.clear()
        self.num_kept_tokens = 0


def _chain(tokens: list[int], num_tokens: int, namespace: Hashable) -> Iterator[Hashable]:
    key: Hashable = namespace
    for start in range(0, num_tokens - STRIDE + 1, STRIDE):
        # Hash of the past plus the tokens themselves: a false match requires a 64-bit hash collision of the pasts.
        key = (hash(key), tuple(tokens[start : start + STRIDE]))
        yield key


def _count_common(a: list[int], b: list[int]) -> int:
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])
