"""Block managers: which pages of the cache a sequence has, and the prefixes that sequences share.

`PagedBlocks` shares pages between sequences, which needs a kernel that reads scattered pages in place: the fused
decode step of a CPU, or that of `rollouts.kernels.gpu` in a CUDA graph. Torch operations would have to gather all keys
of a batch in every layer and step, which doubles the traffic of the largest reads. For them, `SlotBlocks` keeps the
pages of a batch contiguous: page i of every block is that of the sequence in slot i.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from prime_rl.inference.embedded.attention import AttentionMetadata, Chunk, decode_metadata
from prime_rl.inference.embedded.kv_cache import BLOCK, KVCache, count_slots, num_blocks
from prime_rl.inference.embedded.prefix_cache import STRIDE, CachedPrefix, PrefixIndex, PrefixOwner
from prime_rl.inference.embedded.sequence import Sequence


class BlockManager(ABC):
    """Cache memory of the running sequences: what they share, and what is kept when they finish."""

    is_contiguous: bool
    """Whether page i of every block is that of the sequence in slot i."""

    def __init__(self, cache: KVCache, prefixes: PrefixIndex, enable_prefix_caching: bool) -> None:
        self.cache, self.prefixes, self.enable_prefix_caching = cache, prefixes, enable_prefix_caching
        self.num_shared = 0
        """Tokens whose keys were shared instead of computed."""
        self._epoch = 0

    @abstractmethod
    def reserve(self, seqs: Seq[Sequence], rows: int = 0) -> bool:
        """Reserve memory for one more token of each of these running sequences, and for `rows` rows of a decode step.

        False without changes if it is too short.
        """

    @abstractmethod
    def extend(self, running: list[Sequence]) -> None:
        """Give the running sequences the memory of their next token, which is reserved."""

    def prepare(self, seq: Sequence) -> Sequence | None:
        """Share a prefix with another sequence; returns that one, without changes, if it is still computing it.

        The last token is always computed, for its logits.
        """
        if not seq.is_registered and self.enable_prefix_caching:
            if seq.num_cached == 0 and (owner := self._share(seq)) is not None:
                return owner
            self._register(seq)
        return None

    def copy(self, owner: Sequence, seq: Sequence) -> None:
        """Share all tokens of a sequence with one that has the same tokens and waited for it (`prepare`)."""
        self._share_with(seq, owner, len(seq.tokens), len(seq.tokens))
        self._register(seq)

    def keep(self, seq: Sequence) -> None:
        """Keep the keys of a finished sequence in the prefix cache, unless they are of earlier weights."""
        fits = STRIDE <= seq.num_cached <= self.prefixes.max_prefix_cache_tokens
        if self.enable_prefix_caching and fits and seq.epoch == self._epoch:
            self.prefixes.insert(self._keep(seq))

    @abstractmethod
    def release(self, seq: Sequence, running: list[Sequence]) -> None:
        """Remove a sequence from `running`, and free its memory and its slot."""

    def count_cached(self, running: Iterable[Sequence]) -> int:
        """Cached positions of these running sequences; those that share memory count once."""
        return sum(seq.num_cached for seq in running)

    @abstractmethod
    def clear(self, seq: Sequence, start: int = 0) -> None:
        """Zero non-finite keys and values of a sequence from a position on."""

    def invalidate(self, seqs: Seq[Sequence]) -> None:
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
            seq.epoch = self._epoch if seq.num_cached == 0 else seq.epoch
            # Keys of the old weights must not be shared; recomputed ones may be.
            seq.is_registered = seq.num_cached > 0

    @abstractmethod
    def prefill_metadata(self, seqs: Seq[Sequence], chunks: Seq[Chunk]) -> AttentionMetadata:
        """Metadata of `chunks[i]` of `seqs[i]`."""

    @abstractmethod
    def decode_metadata(
        self, running: list[Sequence], positions: NDArray[np.int64], slots: NDArray[np.int64]
    ) -> AttentionMetadata:
        """Metadata of a token at `positions[i]` of the sequence in `slots[i]`; slots beyond `running` are padding."""

    def attach(self, seq: Sequence, slot: int) -> None:
        """Give an empty slot to a sequence."""
        seq.slot, seq.epoch = slot, self._epoch

    def _register(self, seq: Sequence) -> None:
        seq.is_registered = True
        self.prefixes.register(seq, len(seq.tokens), seq.cache_namespace)

    def _share(self, seq: Sequence) -> Sequence | None:
        owner, shared = self.prefixes.find(seq.tokens, seq.cache_namespace)
        if seq.wants_scores:  # positions that predict scored tokens must be computed
            shared = min(shared, seq.params.prompt_start - 1)
        num_cached = min(shared, len(seq.tokens) - 1)
        if owner is None or num_cached < STRIDE:
            return None
        written = owner.num_cached
        if isinstance(owner, Sequence):
            if owner.num_cached < min(num_cached, len(owner.tokens) - 1):
                return owner
            written = max(written, BLOCK * owner.num_shared_blocks)  # its last token is stored, but computed again
        shared = min(shared, written)
        self._share_with(seq, owner, min(num_cached, shared), shared)
        return None

    def _share_with(self, seq: Sequence, owner: PrefixOwner, num_cached: int, shared: int) -> None:
        seq.num_cached = num_cached
        # The last token counts as computed, so that reports do not depend on whether the owner was found in time.
        num_shared = min(num_cached, len(seq.tokens) - 1)
        seq.num_shared = min(num_shared, seq.num_prompt)
        self.num_shared += num_shared
        self._read(owner, seq, shared)

    @abstractmethod
    def _read(self, owner: PrefixOwner, seq: Sequence, shared: int) -> None:
        """Give a sequence without memory the first `seq.num_cached` of the `shared` positions of another one."""

    @abstractmethod
    def _keep(self, seq: Sequence) -> CachedPrefix: ...


class SlotBlocks(BlockManager):
    """Page i of every block is that of the sequence in slot i, which copies a prefix that another one has computed.

    Block j has as many pages as the last slot that reaches it needs, so that a decode step reads contiguous memory
    without copies. Equal blocks of adjacent slots are read from one of them.
    """

    is_contiguous = True

    def reserve(self, seqs: Seq[Sequence], rows: int = 0) -> bool:
        """As `BlockManager`."""
        lengths = np.array([len(seq.tokens) + 1 for seq in seqs] + [1] * (rows - len(seqs)))
        return self.cache.reserve(count_slots(lengths), int(lengths.max(initial=0)))

    def extend(self, running: list[Sequence]) -> None:
        """As `BlockManager`: slots have all reserved memory."""

    def release(self, seq: Sequence, running: list[Sequence]) -> None:
        """As `BlockManager`: the sequence of the last slot moves here, and every block that it has exists here too."""
        self.prefixes.unregister(seq)
        last = running.pop()
        if last is not seq:
            running[seq.slot] = last
            for j, width in _split(last.num_cached):
                self.cache.copy_page(j, last.slot, seq.slot, width)
            last.slot = seq.slot
        seq.is_registered, seq.slot = False, -1

    def clear(self, seq: Sequence, start: int = 0) -> None:
        """As `BlockManager`."""
        for j, num_pages in enumerate(self.cache.num_pages):
            if seq.slot < num_pages:
                self.cache.clear_page(j, seq.slot, max(start - j * BLOCK, 0))

    def prefill_metadata(self, seqs: Seq[Sequence], chunks: Seq[Chunk]) -> AttentionMetadata:
        """As `BlockManager`."""
        starts, lengths = np.array([(c.start, c.length) for c in chunks], dtype=np.int64).T
        slots = np.array([seq.slot for seq in seqs])
        tables = np.broadcast_to(slots.astype(np.int32), (num_blocks(int((starts + lengths).max())), len(slots)))
        return AttentionMetadata(slots, starts, lengths, tables)

    def decode_metadata(
        self, running: list[Sequence], positions: NDArray[np.int64], slots: NDArray[np.int64]
    ) -> AttentionMetadata:
        """As `BlockManager`."""
        return decode_metadata(positions, self._count_shared(running, int(slots[-1]) + 1), slots)

    def _read(self, owner: PrefixOwner, seq: Sequence, shared: int) -> None:
        if isinstance(owner, CachedPrefix):
            assert owner.kv is not None
            self.cache.write(seq.slot, owner.kv, seq.num_cached)
        else:
            for j, width in _split(seq.num_cached):
                self.cache.copy_page(j, owner.slot, seq.slot, width)

    def _keep(self, seq: Sequence) -> CachedPrefix:
        kv = self.cache.read(seq.slot, seq.num_cached)
        return CachedPrefix(seq.tokens, seq.num_cached, seq.cache_namespace, kv)

    def _count_shared(self, running: list[Sequence], rows: int) -> NDArray[np.int64]:
        """For each of the first `rows` slots, the number of full blocks that it shares with the previous slot."""
        shared = np.zeros(rows, dtype=np.int64)
        if self.enable_prefix_caching:
            for before, seq in itertools.pairwise(running):
                if before.cache_namespace == seq.cache_namespace and before.epoch == seq.epoch:
                    limit = min(before.num_cached, seq.num_cached) // BLOCK
                    shared[seq.slot] = _count_equal(before.tokens, seq.tokens, limit)
        return shared


def _split(length: int) -> Iterable[tuple[int, int]]:
    """The blocks of the first `length` positions, and the number of these in each."""
    return ((j, min(length - j * BLOCK, BLOCK)) for j in range(num_blocks(length)))


def _count_equal(a: list[int], b: list[int], limit: int) -> int:
    """Number of equal leading token blocks, at most `limit`."""
    for j in range(limit):
        if a[j * BLOCK : (j + 1) * BLOCK] != b[j * BLOCK : (j + 1) * BLOCK]:
            return j
    return limit
