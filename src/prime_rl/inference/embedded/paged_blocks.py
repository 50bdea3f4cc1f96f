"""Paged block manager: sequences with a common prefix have its full blocks in common, in memory too."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from prime_rl.inference.embedded.attention import AttentionMetadata, Chunk
from prime_rl.inference.embedded.block_manager import BlockManager
from prime_rl.inference.embedded.kv_cache import BLOCK, KVCache, num_blocks
from prime_rl.inference.embedded.prefix_cache import CachedPrefix, PrefixIndex, PrefixOwner
from prime_rl.inference.embedded.sequence import Sequence

PADDING = 0
"""The page of block 0 to which padding rows write."""


class PagePool:
    """The pages of every block in use, by running sequences or by the prefix cache.

    The lowest free page is taken first: memory is only used up to the highest page that was ever taken.
    """

    def __init__(self) -> None:
        self.num_used = 0
        """Pages of running sequences; those that they share count once."""
        self._users: list[list[int]] = []  # for each block and page, the number of running sequences
        self._owners: list[list[int]] = []  # and of all owners; 0: free

    def highest(self) -> list[int]:
        """For each block, the number of pages up to the highest one in use."""
        return [len(pages) for pages in self._owners]

    def count_needed(self, new: list[int]) -> list[int]:
        """For each block, the number of pages if `new[j]` of block j are taken."""
        taken = [len(pages) - pages.count(0) for pages in self._owners]
        taken += [0] * (len(new) - len(taken))
        new = new + [0] * (len(taken) - len(new))
        highest = self.highest() + [0] * (len(taken) - len(self._owners))
        return [max(high, num + more) for high, num, more in zip(highest, taken, new, strict=True)]

    def take(self, block: int) -> int:
        """A free page, for a running sequence."""
        while len(self._owners) <= block:
            self._owners.append([])
            self._users.append([])
        owners = self._owners[block]
        if 0 not in owners:
            owners.append(0)
            self._users[block].append(0)
        page = owners.index(0)
        self.use(block, page)
        return page

    def use(self, block: int, page: int) -> None:
        """Count a running sequence as an owner of a page."""
        self.num_used += self._users[block][page] == 0
        self._users[block][page] += 1
        self.hold(block, page)

    def leave(self, block: int, page: int) -> None:
        """Undo `use`."""
        self._users[block][page] -= 1
        self.num_used -= self._users[block][page] == 0
        self.drop(block, page)

    def hold(self, block: int, page: int) -> None:
        """Count an owner of a page."""
        self._owners[block][page] += 1

    def drop(self, block: int, page: int) -> None:
        """Undo `hold`."""
        owners = self._owners[block]
        owners[page] -= 1
        while owners and owners[-1] == 0:
            owners.pop()
            self._users[block].pop()

    def is_shared(self, block: int, page: int) -> bool:
        """Whether a page has several owners."""
        return self._owners[block][page] > 1


class PagedBlocks(BlockManager):
    """`seq.pages[j]` is the page of block j of a sequence, which may be that of other sequences too.

    Full blocks of a common prefix are shared, and the positions after them copied. Finished sequences stay in the
    prefix cache without a copy. At most `max_tokens` positions are used by running sequences.
    """

    is_contiguous = False

    def __init__(self, cache: KVCache, prefixes: PrefixIndex, enable_prefix_caching: bool, max_tokens: int) -> None:
        super().__init__(cache, prefixes, enable_prefix_caching)
        prefixes.on_removal = self._drop
        self._pool, self._max_pages, self._longest = PagePool(), max_tokens // BLOCK, 1
        self._promised: list[int] = []  # pages of every block that `reserve` has allocated for the next pass
        assert self._pool.take(0) == PADDING
        self._reserve([0])

    def reserve(self, seqs: Seq[Sequence], rows: int = 0) -> bool:
        """As `BlockManager`: the full blocks of equal prompts, which will be shared, count once."""
        new: list[int] = []
        prompts: set[Hashable] = set()
        for seq in seqs:
            have, need = len(seq.pages), num_blocks(len(seq.tokens) + 1)
            if self.enable_prefix_caching and not seq.wants_scores:
                prompt = (seq.cache_namespace, seq.epoch if seq.slot >= 0 else self._epoch, seq.prompt_key)
                if not have and prompt in prompts:
                    have = seq.num_prompt // BLOCK
                prompts.add(prompt)
            new += [0] * (need - len(new))
            for j in range(have, need):
                new[j] += 1
        if self._pool.num_used + sum(new) > self._max_pages:
            return False
        self._longest = max([self._longest, *(len(seq.tokens) + 1 for seq in seqs)])
        self._promised = []
        self._reserve(new)
        return True

    def extend(self, running: list[Sequence]) -> None:
        """As `BlockManager`, except for sequences that have no memory yet: they may share a prefix (`prepare`)."""
        for seq in running:
            if seq.pages:
                self._allocate(seq)

    def prepare(self, seq: Sequence) -> Sequence | None:
        """As `BlockManager`, and give the sequence the memory of its tokens and the next one."""
        owner = super().prepare(seq)
        if owner is None:
            self._complete(seq)
        return owner

    def copy(self, owner: Sequence, seq: Sequence) -> None:
        """As `BlockManager`, and give the sequence the memory of the next token."""
        super().copy(owner, seq)
        self._complete(seq)

    def release(self, seq: Sequence, running: list[Sequence]) -> None:
        """As `BlockManager`: rows that share pages stay adjacent."""
        self.prefixes.unregister(seq)
        self._leave(seq)
        del running[seq.slot]
        for after in running[seq.slot :]:
            after.slot -= 1
        seq.is_registered, seq.slot = False, -1

    def count_cached(self, running: Iterable[Sequence]) -> int:
        """As `BlockManager`: shared pages are full."""
        full, rest = set[tuple[int, int]](), 0
        for seq in running:
            length = max(seq.num_cached, BLOCK * seq.num_shared_blocks)  # the last token may be stored already
            full.update(enumerate(seq.pages[: length // BLOCK]))
            rest += length % BLOCK
        return BLOCK * len(full) + rest

    def clear(self, seq: Sequence, start: int = 0) -> None:
        """As `BlockManager`. Every owner of a shared page that has such values fails: the last of them clears it."""
        for j, page in enumerate(seq.pages):
            if j >= start // BLOCK and not self._pool.is_shared(j, page):
                self.cache.clear_page(j, page, max(start - j * BLOCK, 0))

    def invalidate(self, seqs: Seq[Sequence]) -> None:
        """As `BlockManager`."""
        super().invalidate(seqs)
        for seq in seqs:
            self._leave(seq)

    def prefill_metadata(self, seqs: Seq[Sequence], chunks: Seq[Chunk]) -> AttentionMetadata:
        """As `BlockManager`; the last token of a prompt may be stored already, in a shared page."""
        starts, lengths = np.array([(c.start, c.length) for c in chunks], dtype=np.int64).T
        slots = np.array([seq.slot for seq in seqs])
        tables = _build_tables(seqs, num_blocks(int((starts + lengths).max())))
        shared = [BLOCK * seq.num_shared_blocks for seq in seqs]
        return AttentionMetadata(slots, starts, lengths, tables, np.maximum(starts, shared))

    def decode_metadata(
        self, running: list[Sequence], positions: NDArray[np.int64], slots: NDArray[np.int64]
    ) -> AttentionMetadata:
        """As `BlockManager`."""
        tables = _build_tables(running, num_blocks(int(positions.max()) + 1), int(slots[-1]) + 1)
        return AttentionMetadata(slots, positions, np.ones_like(slots), tables.take(slots, axis=1))

    def _read(self, owner: PrefixOwner, seq: Sequence, shared: int) -> None:
        full = shared // BLOCK
        seq.pages, seq.num_shared_blocks = owner.pages[:full], full
        for j, page in enumerate(seq.pages):
            self._pool.use(j, page)
        if (rest := seq.num_cached - full * BLOCK) > 0:
            seq.pages.append(self._pool.take(full))
            self.cache.copy_page(full, owner.pages[full], seq.pages[full], rest)

    def _keep(self, seq: Sequence) -> CachedPrefix:
        self._longest = max(self._longest, seq.num_cached)  # it has grown since memory was last reserved
        pages = seq.pages[: num_blocks(seq.num_cached)]
        for j, page in enumerate(pages):
            self._pool.hold(j, page)
        size = BLOCK * len(pages) if self.cache.has_whole_pages else seq.num_cached
        return CachedPrefix(seq.tokens, seq.num_cached, seq.cache_namespace, pages=pages, size=size)

    def _drop(self, prefix: CachedPrefix) -> None:
        for j, page in enumerate(prefix.pages):
            self._pool.drop(j, page)

    def _complete(self, seq: Sequence) -> None:
        have, need = len(seq.pages), num_blocks(len(seq.tokens) + 1)
        self._reserve([0] * have + [1] * (need - have))  # more than is promised if that of an equal prompt was removed
        self._allocate(seq)

    def _allocate(self, seq: Sequence) -> None:
        for j in range(len(seq.pages), num_blocks(len(seq.tokens) + 1)):
            seq.pages.append(self._pool.take(j))

    def _leave(self, seq: Sequence) -> None:
        for j, page in enumerate(seq.pages):
            self._pool.leave(j, page)
        seq.pages, seq.num_shared_blocks = [], 0

    def _reserve(self, new: list[int]) -> None:
        needed = self._pool.count_needed(new)
        self._promised = [max(each) for each in itertools.zip_longest(needed, self._promised, fillvalue=0)]
        self.cache.reserve(self._promised, self._longest, required=True)


def _build_tables(seqs: Seq[Sequence], blocks: int, rows: int = 0) -> NDArray[np.int32]:
    """Pages `[blocks, rows]`; those of padding rows, and beyond the end of a sequence, are 0."""
    tables = np.full((blocks, max(rows, len(seqs))), PADDING, dtype=np.int32)
    for i, seq in enumerate(seqs):
        pages = seq.pages[:blocks]
        tables[: len(pages), i] = pages
    return tables
