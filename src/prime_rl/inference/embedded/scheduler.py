"""Which sequences compute what in the next forward pass: prompts first, then one token for everybody.

waiting -> running -> finished. A running sequence owns the slot that is its place in `running`; when one finishes, the
last one moves into its slot, so the slots in use stay the first ones. When memory runs short the youngest goes back to
the front of the queue and is computed anew later.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from prime_rl.inference.embedded.attend import Chunk
from prime_rl.inference.embedded.cache import BLOCK, KVCache
from prime_rl.inference.embedded.prefix import STRIDE, Kept, PrefixIndex
from prime_rl.inference.embedded.scoring import PromptScores
from prime_rl.inference.engine import GenerationRequest, SamplingParams, TopLogprobs
from prime_rl.inference.text import StopWatch
from prime_rl.trainer.models.attention import padded

MAX_SCORES = 2048 * 2048
"""Bounds query rows x keys of one prefill pass, that is the memory of its attention scores."""


@dataclass(eq=False)
class Sequence:
    """A request on its way: `tokens` are prompt and completion, `num_cached` of them have keys in the cache."""

    request: GenerationRequest
    stop_ids: frozenset[int]
    tokens: list[int]
    num_prompt: int
    max_tokens: int  # of prompt and completion
    watch: StopWatch | None = None
    slot: int = -1
    num_cached: int = 0
    order: int = 0
    num_shared: int = 0  # prompt tokens that were not computed for this sequence
    family: Hashable = None  # sequences of one family may share keys
    epoch: int = 0  # of the weights that computed its first keys
    found: bool = False  # registered with the prefix index
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    scores: PromptScores | None = None

    @property
    def params(self) -> SamplingParams:
        """The request's sampling settings."""
        return self.request.params

    @property
    def num_generated(self) -> int:
        """Tokens drawn so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def wants_scores(self) -> bool:
        """Whether prompt tokens are still to be scored, so that all of them must be computed."""
        return self.params.prompt_logprobs is not None and self.num_generated == 0

    def mark_version(self, version: int) -> None:
        """From the next token on, the weights are those of `version`."""
        start = self.num_generated
        if self.versions and self.versions[-1][0] == start:
            self.versions.pop()
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((start, version))


@dataclass
class Scheduler:
    """Slots, queue and prefill order."""

    max_running: int
    max_prefill_tokens: int
    cache: KVCache
    prefixes: PrefixIndex
    share_prefixes: bool = True
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    num_shared: int = 0
    num_preempted: int = 0
    epoch: int = 0
    _pending: list[Sequence] = field(default_factory=list)  # running, but not wholly in the cache
    _order: Iterator[int] = field(default_factory=itertools.count)

    def admit(self) -> list[Sequence]:
        """Give free slots to those who wait, first come first served, while memory lasts; returns who came in."""
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

    def make_room(self, min_rows: int) -> None:
        """Memory for one more token of every running sequence, in at least `min_rows` slots; sends some back for it."""
        while not self.cache.reserve(self._lengths(max(len(self.running), min_rows))):
            self.preempt(max(self.running, key=lambda seq: seq.order))

    def next_chunks(self) -> list[tuple[Sequence, Chunk]]:
        """The next prefill pass, as large as the budget of padded tokens allows; empty when all prompts are cached."""
        chosen: list[tuple[Sequence, Chunk]] = []
        rows = keys = 0
        for seq in self._pending:
            if not self._share_prefix(seq):
                continue
            left = len(seq.tokens) - seq.num_cached
            length = min(left, self.max_prefill_tokens, max(64, MAX_SCORES // padded(seq.num_cached + left)))
            new_rows, new_keys = max(rows, length), max(keys, padded(seq.num_cached + length))
            num_rows = (len(chosen) + 1) * new_rows
            if chosen and (num_rows > self.max_prefill_tokens or num_rows * new_keys > MAX_SCORES):
                break
            rows, keys = new_rows, new_keys
            chosen.append((seq, Chunk(seq.slot, seq.num_cached, length)))
        return chosen

    def mark_cached(self, chunks: list[tuple[Sequence, Chunk]]) -> list[int]:
        """Note what a prefill pass has put into the cache; returns the indices of the chunks that ended a prompt."""
        for seq, chunk in chunks:
            seq.num_cached = chunk.start + chunk.length
        done = [i for i, (seq, _) in enumerate(chunks) if seq.num_cached == len(seq.tokens)]
        if done:
            self._pending = [seq for seq in self._pending if seq.num_cached < len(seq.tokens)]
        return done

    def remove(self, seq: Sequence, keep: bool = False) -> None:
        """Take a sequence out, running or waiting; the last slot moves into a hole. `keep` its keys for others."""
        if seq.slot < 0:
            self.waiting.remove(seq)
            return
        if (
            keep
            and self.share_prefixes
            and seq.num_cached >= STRIDE
            and self.prefixes.max_kept_tokens >= seq.num_cached
        ):
            kv = self.cache.read(seq.slot, seq.num_cached)
            self.prefixes.keep(Kept(seq.tokens, seq.num_cached, seq.family, kv))
        self.prefixes.unregister(seq)
        seq.found = False
        if seq in self._pending:
            self._pending.remove(seq)
        last = self.running.pop()
        if last is not seq:
            self._fill(seq.slot, last)
        seq.slot = -1

    def preempt(self, seq: Sequence) -> None:
        """Send a running sequence back to the front of the queue, to be computed anew."""
        assert len(self.running) > 1, "one sequence always fits"
        self.remove(seq)
        seq.num_cached, seq.scores = 0, _scores_left(seq)
        self.waiting.appendleft(seq)
        self.num_preempted += 1

    def restart(self, seqs: list[Sequence]) -> None:
        """The keys of these running sequences are void: compute them anew."""
        for seq in seqs:
            seq.num_cached, seq.found, seq.epoch, seq.scores = 0, False, self.epoch, _scores_left(seq)
            self.prefixes.unregister(seq)
        self._pending = [seq for seq in self.running if seq.num_cached < len(seq.tokens) - 1 or seq in self._pending]

    def forget_prefixes(self) -> None:
        """No key computed so far is shared any more: the weights have changed."""
        self.prefixes.clear()
        self.epoch += 1
        for seq in self.running:
            seq.epoch += seq.num_cached == 0
            # What was cached by old weights must not be found; what is computed from now on may be.
            seq.found = seq.num_cached > 0

    def count_shared(self, rows: int) -> NDArray[np.int64]:
        """For every running sequence, the whole columns of keys it has in common with the slot before it."""
        shared = np.zeros(rows, dtype=np.int64)
        if self.share_prefixes:
            for before, seq in itertools.pairwise(self.running):
                if before.family == seq.family and before.epoch == seq.epoch:
                    most = min(before.num_cached, seq.num_cached) // BLOCK
                    shared[seq.slot] = _count_equal(before.tokens, seq.tokens, most)
        return shared

    def _fill(self, slot: int, last: Sequence) -> None:
        """Move the last sequence into a hole: what it has reached in its own slot, every slot before it has too."""
        self.running[slot] = last
        self.cache.move(last.slot, slot, last.num_cached)
        last.slot = slot

    def _lengths(self, rows: int) -> NDArray[np.int64]:
        lengths = [len(seq.tokens) + 1 for seq in self.running]
        return np.array(lengths + [1] * (rows - len(lengths)), dtype=np.int64)

    def _share_prefix(self, seq: Sequence) -> bool:
        """Copy what another sequence has computed already; False when it is about to and must be waited for.

        The last token is always computed, for its logits.
        """
        if seq.found or not self.share_prefixes:
            return True
        if seq.num_cached == 0:
            holder, shared = self.prefixes.find(seq.tokens, seq.family)
            # What predicts a token that is to be scored must be computed.
            shared = min(shared, len(seq.tokens) - 1, seq.params.prompt_start - 1 if seq.wants_scores else shared)
            if holder is not None and shared >= STRIDE:
                if isinstance(holder, Sequence) and holder.num_cached < min(shared, len(holder.tokens) - 1):
                    return False
                shared = min(shared, holder.num_cached)
                if isinstance(holder, Kept):
                    self.cache.write(seq.slot, holder.kv, shared)
                elif isinstance(holder, Sequence):
                    self.cache.move(holder.slot, seq.slot, shared)
                seq.num_cached = shared
                seq.num_shared = min(shared, seq.num_prompt)
                self.num_shared += shared
        seq.found = True
        self.prefixes.register(seq, len(seq.tokens), seq.family)
        return True


def _scores_left(seq: Sequence) -> PromptScores | None:
    """Scores that stay when a sequence is computed anew: those of a prompt that was scored whole."""
    return None if seq.wants_scores else seq.scores


def _count_equal(a: list[int], b: list[int], most: int) -> int:
    """Equal blocks of tokens at the beginning, `most` at most."""
    for j in range(most):
        if a[j * BLOCK : (j + 1) * BLOCK] != b[j * BLOCK : (j + 1) * BLOCK]:
            return j
    return most
