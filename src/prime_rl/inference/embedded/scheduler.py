"""Which sequences compute what in the next forward pass: prompts first, then one token for everybody.

waiting -> running -> finished. A running sequence owns the slot that is its place in `running`; when one finishes, the
last one moves into its slot, so the slots in use stay the first ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from prime_rl.inference.embedded.cache import Chunk
from prime_rl.inference.engine import GenerationRequest, SamplingParams, TopLogprobs
from prime_rl.inference.text import StopWatch
from prime_rl.trainer.models.attention import padded

CopySlot = Callable[[int, int, int], None]

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
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    prefix: tuple[int, ...] = ()

    @property
    def params(self) -> SamplingParams:
        """The request's sampling settings."""
        return self.request.params

    @property
    def num_generated(self) -> int:
        """Tokens drawn so far."""
        return len(self.tokens) - self.num_prompt

    def mark_version(self, version: int) -> None:
        """From the next token on, the weights are those of `version`."""
        start = self.num_generated
        if self.versions and self.versions[-1][0] == start:
            self.versions.pop()
        self.versions.append((start, version))


@dataclass
class Scheduler:
    """Slots, queue and prefill order; it moves cache slots through `copy_slot` and computes nothing itself."""

    max_running: int
    max_prefill_tokens: int
    copy_slot: CopySlot
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    num_shared: int = 0
    _pending: list[Sequence] = field(default_factory=list)  # running, but not wholly in the cache
    _leaders: dict[tuple[int, ...], Sequence] = field(default_factory=dict)  # whose cache a same prompt may copy

    def admit(self, version: int) -> None:
        """Give free slots to those who wait, first come first served."""
        while self.waiting and len(self.running) < self.max_running:
            seq = self.waiting.popleft()
            seq.slot = len(self.running)
            seq.prefix = tuple(seq.tokens[: seq.num_prompt])
            seq.mark_version(version)
            self.running.append(seq)
            self._pending.append(seq)

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

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out, running or waiting; the last slot moves into a hole."""
        if seq.slot < 0:
            self.waiting.remove(seq)
            return
        if self._leaders.get(seq.prefix) is seq:
            del self._leaders[seq.prefix]
        if seq in self._pending:
            self._pending.remove(seq)
        last = self.running.pop()
        if last is not seq:
            self.copy_slot(last.slot, seq.slot, last.num_cached)
            last.slot = seq.slot
            self.running[last.slot] = last
        seq.slot = -1

    def change_version(self, version: int, keep_cache: bool) -> None:
        """New weights: a span begins, no prompt is shared across versions, the cache is computed anew unless kept."""
        self._leaders.clear()
        for seq in self.running:
            seq.mark_version(version)
            if not keep_cache:
                seq.num_cached = 0
        if not keep_cache:
            self._pending = list(self.running)

    def _share_prefix(self, seq: Sequence) -> bool:
        """Copy the prompt's cache from a sequence with the same prompt; False when that one must be computed first.

        The last prompt token is always computed, for its logits.
        """
        shared = seq.num_prompt - 1
        if seq.num_cached or not shared:
            return True
        leader = self._leaders.setdefault(seq.prefix, seq)
        if leader is seq:
            return True
        if leader.num_cached < shared:
            return False
        self.copy_slot(leader.slot, seq.slot, shared)
        seq.num_cached = shared
        self.num_shared += shared
        return True
