"""Scheduler: selects the sequences of the next forward pass, prefill first, then one decode token each.

waiting -> running -> finished. The slot of a running sequence is its index in `running`; when one finishes, the last
one moves into its slot, so used slots stay contiguous. When the cache is full, the newest sequence is preempted to the
front of the queue and recomputed later.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from prime_rl.inference.detokenizer import StopStringMatcher
from prime_rl.inference.embedded.attention import Chunk
from prime_rl.inference.embedded.kv_cache import BLOCK, KVCache
from prime_rl.inference.embedded.prefix_cache import STRIDE, CachedPrefix, PrefixIndex
from prime_rl.inference.embedded.prompt_logprobs import PromptScorer
from prime_rl.inference.engine import GenerationRequest, SamplingParams, TopLogprobs
from prime_rl.trainer.models.attention import padded

MAX_SCORES = 2048 * 2048
"""Maximum query rows x keys of a prefill pass, which bounds the memory of its attention scores."""


@dataclass(eq=False)
class Sequence:
    """State of a request: `tokens` are prompt and completion, `num_cached` of them have cached keys."""

    request: GenerationRequest
    stop_ids: frozenset[int]
    tokens: list[int]
    num_prompt: int
    max_tokens: int  # prompt + completion
    watch: StopStringMatcher | None = None
    slot: int = -1
    num_cached: int = 0
    order: int = 0
    num_shared: int = 0  # prompt tokens read from the prefix cache
    family: Hashable = None  # prefix cache namespace
    epoch: int = 0  # weights epoch of its first keys
    is_registered: bool = False  # in the prefix index
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    scores: PromptScorer | None = None

    @property
    def params(self) -> SamplingParams:
        """The request's sampling settings."""
        return self.request.params

    @property
    def num_generated(self) -> int:
        """Number of completion tokens so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def wants_scores(self) -> bool:
        """Whether prompt tokens remain to be scored, and so must all be computed."""
        return self.params.prompt_logprobs is not None and self.num_generated == 0

    def mark_version(self, version: int) -> None:
        """Record `version` from the next token on."""
        start = self.num_generated
        if self.versions and self.versions[-1][0] == start:
            self.versions.pop()
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((start, version))


@dataclass
class Scheduler:
    """Slots, queue and prefill order."""

    max_running: int
    max_num_batched_tokens: int
    cache: KVCache
    prefixes: PrefixIndex
    enable_prefix_caching: bool = True
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    num_shared: int = 0
    num_preempted: int = 0
    epoch: int = 0
    _pending: list[Sequence] = field(default_factory=list)  # running, but not fully cached
    _order: Iterator[int] = field(default_factory=itertools.count)

    def admit(self) -> list[Sequence]:
        """Admit waiting sequences in FIFO order while slots and memory suffice; returns the admitted ones."""
        if not self.waiting:
            return []
        lengths = [len(seq.tokens) + 1 for seq in self.running]
        coming = itertools.islice(self.waiting, self.max_running - len(self.running))
        fits = self.cache.reserve(np.array(lengths + [len(seq.tokens) + 1 for seq in coming]))  # mostly: all at once
        new: list[Sequence] = []
        while self.waiting and len(self.running) < self.max_running:
            lengths.append(len(self.waiting[0].tokens) + 1)
            if not fits and not self.cache.reserve(np.array(lengths)):
                break
            seq = self.waiting.popleft()
            seq.slot, seq.order, seq.epoch = len(self.running), next(self._order), self.epoch
            self.running.append(seq)
            self._pending.append(seq)
            new.append(seq)
        return new

    def ensure_capacity(self, min_rows: int) -> None:
        """Reserve memory for one more token per running sequence, in at least `min_rows` slots; preempts if needed."""
        while not self.cache.reserve(self._lengths(max(len(self.running), min_rows))):
            self.preempt(max(self.running, key=lambda seq: seq.order))

    def next_chunks(self) -> list[tuple[Sequence, Chunk]]:
        """Select the next prefill pass within the budget of padded tokens; empty if all prompts are cached."""
        chosen: list[tuple[Sequence, Chunk]] = []
        rows = keys = 0
        for seq in self._pending:
            if not self._share_prefix(seq):
                continue
            left = len(seq.tokens) - seq.num_cached
            length = min(left, self.max_num_batched_tokens, max(64, MAX_SCORES // padded(seq.num_cached + left)))
            new_rows, new_keys = max(rows, length), max(keys, padded(seq.num_cached + length))
            num_rows = (len(chosen) + 1) * new_rows
            if chosen and (num_rows > self.max_num_batched_tokens or num_rows * new_keys > MAX_SCORES):
                break
            rows, keys = new_rows, new_keys
            chosen.append((seq, Chunk(seq.slot, seq.num_cached, length)))
        return chosen

    def mark_cached(self, chunks: list[tuple[Sequence, Chunk]]) -> list[int]:
        """Mark the chunks as cached; returns the indices of chunks that completed a prompt."""
        for seq, chunk in chunks:
            seq.num_cached = chunk.start + chunk.length
        done = [i for i, (seq, _) in enumerate(chunks) if seq.num_cached == len(seq.tokens)]
        if done:
            self._pending = [seq for seq in self._pending if seq.num_cached < len(seq.tokens)]
        return done

    def remove(self, seq: Sequence, keep: bool = False) -> None:
        """Remove a running or waiting sequence; the last slot fills the gap. `keep` puts it into the prefix cache."""
        if seq.slot < 0:
            self.waiting.remove(seq)
            return
        if (
            keep
            and self.enable_prefix_caching
            and seq.num_cached >= STRIDE
            and self.prefixes.max_prefix_cache_tokens >= seq.num_cached
        ):
            kv = self.cache.read(seq.slot, seq.num_cached)
            self.prefixes.insert(CachedPrefix(seq.tokens, seq.num_cached, seq.family, kv))
        self.prefixes.unregister(seq)
        seq.is_registered = False
        if seq in self._pending:
            self._pending.remove(seq)
        last = self.running.pop()
        if last is not seq:
            self._fill(seq.slot, last)
        seq.slot = -1

    def preempt(self, seq: Sequence) -> None:
        """Move a running sequence to the front of the queue, to be recomputed."""
        assert len(self.running) > 1, "one sequence always fits"
        self.remove(seq)
        seq.num_cached, seq.scores = 0, _scores_left(seq)
        self.waiting.appendleft(seq)
        self.num_preempted += 1

    def restart(self, seqs: list[Sequence]) -> None:
        """Invalidate the keys of these running sequences and recompute them."""
        for seq in seqs:
            seq.num_cached, seq.is_registered, seq.epoch, seq.scores = 0, False, self.epoch, _scores_left(seq)
            self.prefixes.unregister(seq)
        self._pending = [seq for seq in self.running if seq.num_cached < len(seq.tokens) - 1 or seq in self._pending]

    def clear_prefix_cache(self) -> None:
        """Invalidate the prefix cache after a weight update."""
        self.prefixes.clear()
        self.epoch += 1
        for seq in self.running:
            seq.epoch += seq.num_cached == 0
            # Keys of the old weights must not be shared; recomputed ones may be.
            seq.is_registered = seq.num_cached > 0

    def count_shared(self, rows: int) -> NDArray[np.int64]:
        """For every running sequence, the number of full key columns it shares with the previous slot."""
        shared = np.zeros(rows, dtype=np.int64)
        if self.enable_prefix_caching:
            for before, seq in itertools.pairwise(self.running):
                if before.family == seq.family and before.epoch == seq.epoch:
                    limit = min(before.num_cached, seq.num_cached) // BLOCK
                    shared[seq.slot] = _count_equal(before.tokens, seq.tokens, limit)
        return shared

    def _fill(self, slot: int, last: Sequence) -> None:
        """Move the last sequence into a free slot; columns that its slot has, every earlier slot has too."""
        self.running[slot] = last
        self.cache.move(last.slot, slot, last.num_cached)
        last.slot = slot

    def _lengths(self, rows: int) -> NDArray[np.int64]:
        lengths = [len(seq.tokens) + 1 for seq in self.running]
        return np.array(lengths + [1] * (rows - len(lengths)), dtype=np.int64)

    def _share_prefix(self, seq: Sequence) -> bool:
        """Copy a shared prefix; False if another sequence is still computing it.

        The last token is always computed, for its logits.
        """
        if seq.is_registered or not self.enable_prefix_caching:
            return True
        if seq.num_cached == 0:
            owner, shared = self.prefixes.find(seq.tokens, seq.family)
            # Positions that predict scored tokens must be computed.
            shared = min(shared, len(seq.tokens) - 1, seq.params.prompt_start - 1 if seq.wants_scores else shared)
            if owner is not None and shared >= STRIDE:
                if isinstance(owner, Sequence) and owner.num_cached < min(shared, len(owner.tokens) - 1):
                    return False
                shared = min(shared, owner.num_cached)
                if isinstance(owner, CachedPrefix):
                    self.cache.write(seq.slot, owner.kv, shared)
                elif isinstance(owner, Sequence):
                    self.cache.move(owner.slot, seq.slot, shared)
                seq.num_cached = shared
                seq.num_shared = min(shared, seq.num_prompt)
                self.num_shared += shared
        seq.is_registered = True
        self.prefixes.register(seq, len(seq.tokens), seq.family)
        return True


def _scores_left(seq: Sequence) -> PromptScorer | None:
    """Scores to keep when a sequence is recomputed: those of a completely scored prompt."""
    return None if seq.wants_scores else seq.scores


def _count_equal(a: list[int], b: list[int], limit: int) -> int:
    """Number of equal leading token blocks, at most `limit`."""
    for j in range(limit):
        if a[j * BLOCK : (j + 1) * BLOCK] != b[j * BLOCK : (j + 1) * BLOCK]:
            return j
    return limit
