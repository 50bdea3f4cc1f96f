"""Block manager: cache memory of the running sequences, and the prefixes that they share."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from prime_rl.inference.embedded.kv_cache import BLOCK, KVCache
from prime_rl.inference.embedded.prefix_cache import STRIDE, CachedPrefix, PrefixIndex
from prime_rl.inference.embedded.sequence import Sequence


class BlockManager:
    """Fills, copies and invalidates the cache of sequences; every sequence has the slot of its index in `running`.

    A new sequence copies a prefix that another one has computed. While decoding, equal blocks of adjacent slots are
    read from one of them (`block_tables` of `AttentionMetadata`).
    """

    def __init__(self, cache: KVCache, prefixes: PrefixIndex, enable_prefix_caching: bool) -> None:
        self.cache, self.prefixes, self.enable_prefix_caching = cache, prefixes, enable_prefix_caching
        self.num_shared = 0
        """Tokens whose keys were copied instead of computed."""
        self._epoch = 0

    def attach(self, seq: Sequence, slot: int) -> None:
        """Give an empty slot to a sequence."""
        seq.slot, seq.epoch = slot, self._epoch

    def share_prefix(self, seq: Sequence) -> bool:
        """Copy a shared prefix; False if another sequence is still computing it.

        The last token is always computed, for its logits.
        """
        if seq.is_registered or not self.enable_prefix_caching:
            return True
        if seq.num_cached == 0:
            owner, shared = self.prefixes.find(seq.tokens, seq.cache_namespace)
            # Positions that predict scored tokens must be computed.
            shared = min(shared, len(seq.tokens) - 1, seq.params.prompt_start - 1 if seq.wants_scores else shared)
            if owner is not None and shared >= STRIDE:
                if isinstance(owner, Sequence) and owner.num_cached < min(shared, len(owner.tokens) - 1):
                    return False
                shared = min(shared, owner.num_cached)
                if isinstance(owner, CachedPrefix):
                    self.cache.write(seq.slot, owner.kv, shared)
                else:
                    self.cache.move(owner.slot, seq.slot, shared)
                seq.num_cached, seq.num_shared = shared, min(shared, seq.num_prompt)
                self.num_shared += shared
        seq.is_registered = True
        self.prefixes.register(seq, len(seq.tokens), seq.cache_namespace)
        return True

    def keep(self, seq: Sequence) -> None:
        """Copy the keys of a finished sequence into the prefix cache."""
        if self.enable_prefix_caching and STRIDE <= seq.num_cached <= self.prefixes.max_prefix_cache_tokens:
            kv = self.cache.read(seq.slot, seq.num_cached)
            self.prefixes.insert(CachedPrefix(seq.tokens, seq.num_cached, seq.cache_namespace, kv))

    def release(self, seq: Sequence, last: Sequence) -> None:
        """Free a slot; the sequence of the last slot moves into it, and every block that it has exists there too."""
        self.prefixes.unregister(seq)
        seq.is_registered = False
        if last is not seq:
            self.cache.move(last.slot, seq.slot, last.num_cached)
            last.slot = seq.slot
        seq.slot = -1

    def invalidate(self, seqs: Iterable[Sequence]) -> None:
        """Discard the keys of these running sequences."""
        for seq in seqs:
            seq.discard_keys()
            seq.epoch = self._epoch
            self.prefixes.unregister(seq)

    def start_epoch(self, running: Iterable[Sequence]) -> None:
        """Invalidate the prefix cache after a weight update."""
        self.prefixes.clear()
        self._epoch += 1
        for seq in running:
            seq.epoch += seq.num_cached == 0
            # Keys of the old weights must not be shared; recomputed ones may be.
            seq.is_registered = seq.num_cached > 0

    def count_shared(self, running: list[Sequence], rows: int) -> NDArray[np.int64]:
        """For each of the first `rows` slots, the number of full blocks that it shares with the previous slot."""
        shared = np.zeros(rows, dtype=np.int64)
        if self.enable_prefix_caching:
            for before, seq in itertools.pairwise(running):
                if before.cache_namespace == seq.cache_namespace and before.epoch == seq.epoch:
                    limit = min(before.num_cached, seq.num_cached) // BLOCK
                    shared[seq.slot] = _count_equal(before.tokens, seq.tokens, limit)
        return shared


def _count_equal(a: list[int], b: list[int], limit: int) -> int:
    """Number of equal leading token blocks, at most `limit`."""
    for j in range(limit):
        if a[j * BLOCK : (j + 1) * BLOCK] != b[j * BLOCK : (j + 1) * BLOCK]:
            return j
    return limit
