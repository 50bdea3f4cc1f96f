"""Scheduler: selects the sequences of the next forward pass, prefill first, then one decode token each.

Short chunks of prompts are computed together with decode tokens. While long ones are computed, the other sequences
decode a token after each `MAX_WAIT_S` of passes. waiting -> running -> finished. The slot of a running sequence is its
index in `running`. When the cache is full, the newest sequence is preempted to the front of the queue and recomputed
later.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from prime_rl.inference.embedded.adapters import Adapters
from prime_rl.inference.embedded.attention import Chunk
from prime_rl.inference.embedded.block_manager import BlockManager
from prime_rl.inference.embedded.kv_cache import BLOCK
from prime_rl.inference.embedded.sampler import SamplerOutput
from prime_rl.inference.embedded.sequence import Sequence
from prime_rl.inference.embedded.speculation import Drafter, Drafts
from prime_rl.inference.engine import Event, Output, StreamUpdate
from rollouts.training.numerics import padded

MAX_SCORES = 2048 * 2048
"""Maximum query rows x keys of a prefill pass, which bounds the memory of its attention scores."""

TOKENS_BESIDE_DECODING = 1024
"""Maximum prompt tokens of a pass for which decoding sequences wait."""

MAX_WAIT_S = 0.5
"""Time of such passes after which they decode a token. A step takes 10 to 50 ms, and each one delays the prompts."""

MAX_CHUNK_ROWS = 256
"""Tokens of chunks up to which a decode step may compute them, a row for each, beside those of the other sequences."""


@dataclass(frozen=True)
class ScheduledBatch:
    """A forward pass: `chunks[i]` of `sequences[i]`, or one token of every running sequence if there are no chunks.

    `drafts[i]`, if there are any, are tokens that may follow in `sequences[i]` and are computed as well.
    """

    sequences: list[Sequence]
    chunks: list[Chunk]
    admitted: list[Sequence]
    revision: int
    """Equal for two batches if the same sequences ran in between, each one token further."""
    drafts: Drafts = field(default_factory=list)
    in_flight: bool = False
    """The step has been started already, of these sequences and maybe others, which have ended since."""
    as_rows: bool = False
    """A decode step computes the chunks, a row for each token; those of decoding sequences are their last token."""
    copies: dict[int, list[Sequence]] = field(default_factory=dict)
    """Sequences with the tokens of `sequences[i]`, which this pass completes: they get its keys and its logits."""

    @property
    def all_drafts(self) -> Drafts:
        """The draft of every sequence, possibly empty."""
        return self.drafts or [[]] * len(self.sequences)

    @property
    def completed(self) -> list[int]:
        """Indices of the chunks that complete a prompt."""
        pairs = enumerate(zip(self.sequences, self.chunks, strict=True))
        return [i for i, (seq, chunk) in pairs if chunk.start + chunk.length == len(seq.tokens)]

    @property
    def sampled(self) -> list[tuple[int, Sequence]]:
        """The sequences that get a token from a pass over chunks, each with the index of the chunk."""
        rows = ((i, seq) for i in self.completed for seq in (self.sequences[i], *self.copies.get(i, ())))
        return [(i, seq) for i, seq in rows if seq.params.max_tokens]


@dataclass
class Scheduler:
    """Queue, running sequences and prefill order; `min_rows` slots at least are reserved."""

    blocks: BlockManager
    adapters: Adapters
    max_running: int
    max_num_batched_tokens: int
    min_rows: int
    pads_chunks: bool = True
    """Whether the chunks of a pass are padded to the longest one, and memory is needed for all of their scores."""
    max_chunk_pairs: int = 0
    """Pairs of query and key of chunks that a decode step computes faster than a pass of their own; 0: it cannot."""
    drafter: Drafter | None = None
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    num_preempted: int = 0
    num_generated: int = 0
    num_finished: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    _num_finished_before: int = 0  # this batch, which has grown from an empty one
    _waited_s: float = 0.0  # time of the passes over chunks since the last decode step
    _is_fed: bool = False  # a sequence has been admitted after another one of the batch ended: more will come
    _pending: list[Sequence] = field(default_factory=list)  # running, but not fully cached
    _order: Iterator[int] = field(default_factory=itertools.count)
    _revision: int = 0
    _headroom: int = 0  # steps until a sequence needs another block, while the cache has this generation
    _generation: int = -1

    def schedule(self, in_flight: Seq[Sequence] = ()) -> ScheduledBatch:
        """Admit what fits and select the next forward pass: the step of the sequences `in_flight`, if any still run."""
        admitted = self._admit()
        self._ensure_capacity()
        if left := [seq for seq in in_flight if seq.slot >= 0]:
            return ScheduledBatch(left, [], admitted, self._revision, in_flight=True)
        if not self._pending or not (batch := self._next_pass(admitted)).sequences:
            is_closed = not self.waiting and not self._is_fed
            drafts = self.drafter.propose(self.running, is_closed) if self.drafter is not None else []
            return ScheduledBatch(self.running, [], admitted, self._revision, drafts)
        return batch

    def postprocess(self, batch: ScheduledBatch, sampled: SamplerOutput | None, seconds: float) -> list[Event]:
        """Append the sampled tokens and finish completed sequences; returns stream updates, then outputs.

        `seconds`: the time of the step.
        """
        self._waited_s = self._waited_s + seconds if batch.chunks and not batch.as_rows else 0.0
        if not batch.chunks:
            assert sampled is not None
            if self.drafter is not None:
                self.drafter.costs.learn(len(batch.sequences), len(sampled.tokens), seconds)
            if batch.drafts:
                self._change()
            return self._append(batch.sequences, sampled, batch.drafts)
        for seq, chunk in zip(batch.sequences, batch.chunks, strict=True):
            seq.num_cached = chunk.start + chunk.length
        completed = [batch.sequences[i] for i in batch.completed]
        if not completed:
            return []
        self._change()
        for i, copies in batch.copies.items():
            for seq in copies:
                self.blocks.copy(batch.sequences[i], seq)
        self._pending = [seq for seq in self._pending if seq.num_cached < len(seq.tokens)]
        events = self._finish([(seq, seq.output("length")) for seq in completed if not seq.params.max_tokens])
        if sampled is not None:
            events += self._append([seq for _, seq in batch.sampled], sampled)
        return events

    def remove(self, seq: Sequence) -> None:
        """Remove a running or waiting sequence."""
        if seq.slot < 0:
            self.waiting.remove(seq)
            return
        self._change()
        if seq in self._pending:
            self._pending.remove(seq)
        self.blocks.release(seq, self.running)

    def recompute(self, seqs: list[Sequence]) -> None:
        """Invalidate the keys of these running sequences and recompute them."""
        self._change()
        self.blocks.invalidate(seqs)
        self._pending = [seq for seq in self.running if seq.num_cached < len(seq.tokens) - 1 or seq in self._pending]

    def clear_prefix_cache(self) -> None:
        """Invalidate the prefix cache after a weight update."""
        self._change()
        self.blocks.start_epoch(self.running)

    def _change(self) -> None:
        self._revision += 1
        self._headroom = 0

    def _admit(self) -> list[Sequence]:
        """Admit waiting sequences in FIFO order while slots and memory suffice; returns the admitted ones."""
        if not self.waiting:
            return []
        reserve = self.blocks.reserve
        fits = reserve([*self.running, *itertools.islice(self.waiting, self.max_running - len(self.running))])
        new: list[Sequence] = []
        while self.waiting and len(self.running) < self.max_running:
            if not fits and not reserve([*self.running, self.waiting[0]]):  # mostly all fit at once
                break
            seq = self.waiting.popleft()
            self.blocks.attach(seq, len(self.running))
            seq.order = next(self._order)
            self.running.append(seq)
            self._pending.append(seq)
            new.append(seq)
        if new:
            self._change()
            if len(new) == len(self.running):
                self._num_finished_before = self.num_finished
            self._is_fed = self.num_finished > self._num_finished_before
        return new

    def _ensure_capacity(self) -> None:
        """Reserve memory for one more token per running sequence; preempts the newest ones if it is short."""
        cache = self.blocks.cache
        self._headroom -= 1
        if not self.running or (self._headroom >= 0 and cache.generation == self._generation):
            return
        while not self.blocks.reserve(self.running, self.min_rows):
            self._preempt(max(self.running, key=lambda seq: seq.order))
        self.blocks.extend(self.running)
        self._headroom = min(-(len(seq.tokens) + 1) % BLOCK for seq in self.running)
        self._generation = cache.generation

    def _preempt(self, seq: Sequence) -> None:
        """Move a running sequence to the front of the queue, to be recomputed."""
        assert len(self.running) > 1, "one sequence always fits"
        self.remove(seq)
        seq.discard_keys()
        seq.cache_namespace = self.adapters.cache_namespace(seq.request.adapter)  # new if it was loaded again since
        self.waiting.appendleft(seq)
        self.num_preempted += 1

    def _next_pass(self, admitted: list[Sequence]) -> ScheduledBatch:
        """Chunks of pending prompts; if a decode step computes them, with a token of the other sequences.

        It computes these tokens alone if the sequences have waited for `MAX_WAIT_S`.
        """
        decoding = self._decoding_beside_chunks()
        budget = self.max_num_batched_tokens
        chosen, blocked = self._next_chunks(min(budget, TOKENS_BESIDE_DECODING) if decoding else budget)
        as_rows = self._fit_rows(chosen)
        if not as_rows and decoding and self._waited_s > MAX_WAIT_S:
            chosen, blocked, as_rows = [], [], True
        copies = _find_copies(chosen, blocked)
        if as_rows:
            chosen += [(seq, Chunk(len(seq.tokens) - 1, 1)) for seq in decoding]
        seqs, chunks = [seq for seq, _ in chosen], [chunk for _, chunk in chosen]
        return ScheduledBatch(seqs, chunks, admitted, self._revision, as_rows=as_rows, copies=copies)

    def _decoding_beside_chunks(self) -> list[Sequence]:
        """The sequences without a pending prompt, if a decode step can compute them without the others."""
        if not self.max_chunk_pairs or not self.adapters.are_packed({seq.request.adapter for seq in self.running}):
            return []
        pending = set(map(id, self._pending))
        return [seq for seq in self.running if id(seq) not in pending]

    def _next_chunks(self, budget: int) -> tuple[list[tuple[Sequence, Chunk]], list[tuple[Sequence, Sequence]]]:
        """Select the next prefill pass within `budget` padded tokens; empty if all prompts are cached.

        Also returns the sequences that wait for another one to compute their prefix, each after that one.
        """
        chosen: list[tuple[Sequence, Chunk]] = []
        blocked: list[tuple[Sequence, Sequence]] = []
        rows = keys = 0
        for seq in self._pending:
            if (owner := self.blocks.prepare(seq)) is not None:
                blocked.append((owner, seq))
                continue
            left = len(seq.tokens) - seq.num_cached
            if not self.pads_chunks:
                if chosen and rows + left > budget:
                    break
                chosen.append((seq, Chunk(seq.num_cached, min(left, budget))))
                rows += chosen[-1][1].length
                continue
            length = min(left, budget, max(64, MAX_SCORES // padded(seq.num_cached + left)))
            new_rows, new_keys = max(rows, length), max(keys, padded(seq.num_cached + length))
            num_rows = (len(chosen) + 1) * new_rows
            if chosen and (num_rows > budget or num_rows * new_keys > MAX_SCORES):
                break
            rows, keys = new_rows, new_keys
            chosen.append((seq, Chunk(seq.num_cached, length)))
        return chosen, blocked

    def _fit_rows(self, chunks: list[tuple[Sequence, Chunk]]) -> bool:
        """Whether a decode step should compute these chunks.

        Long ones are faster in a pass of their own, which reads keys once for all tokens of a chunk. Only such a pass
        scores prompts, supports all adapters, and computes the last token of a prompt whose page others read already.
        """
        if sum(chunk.length for _, chunk in chunks) > MAX_CHUNK_ROWS:
            return False
        pairs = sum(chunk.length * (2 * chunk.start + chunk.length + 1) // 2 for _, chunk in chunks)
        if pairs > self.max_chunk_pairs:
            return False
        if not self.adapters.are_packed({seq.request.adapter for seq in self.running}):
            return False
        return all(not seq.wants_scores and chunk.start >= BLOCK * seq.num_shared_blocks for seq, chunk in chunks)

    def _append(self, seqs: list[Sequence], sampled: SamplerOutput, drafts: Drafts | None = None) -> list[Event]:
        """Append the sampled tokens; a sequence with a non-finite log-prob, usually of overflowed weights, fails."""
        events: list[Event] = []
        finished: list[tuple[Sequence, Output]] = []
        tokens, logprobs, tops = sampled.tokens.tolist(), sampled.logprobs.tolist(), sampled.top_logprobs()
        before = self.num_accepted
        for seq, accepted in zip(seqs, accepted_rows(drafts or [[]] * len(seqs), tokens), strict=True):
            for i in accepted:
                seq.num_cached = len(seq.tokens)
                if not math.isfinite(logprobs[i]):
                    finished.append((seq, seq.output("error", seq.describe_failure())))
                    break
                # None, not [], for a row that wants none beside one that does: it has none in other steps.
                top = tops[i][: seq.params.top_logprobs] or None if tops else None
                output = seq.append(tokens[i], logprobs[i], top, sampled.supports.get(i))
                self.num_generated += 1
                self.num_accepted += i != accepted[0]
                if output is not None:
                    finished.append((seq, output))
                    break
                if seq.request.stream:
                    start = seq.num_generated - 1
                    events.append(StreamUpdate(seq.request, start, [tokens[i]], [logprobs[i]], [top or []]))
        if drafts:
            assert self.drafter is not None
            self.num_drafted += len(tokens) - len(seqs)
            self.drafter.learn(self.num_accepted - before)
            if not np.isfinite(logprobs).all():  # of a rejected draft: later reads would multiply its values by 0
                for seq in seqs:
                    self.blocks.clear(seq, seq.num_cached)
        return events + self._finish(finished) if finished else events

    def _finish(self, finished: list[tuple[Sequence, Output]]) -> list[Event]:
        # From the last slot down, so that no slot that is about to be freed is moved.
        for seq, output in sorted(finished, key=lambda pair: -pair[0].slot):
            if output.finish_reason == "error" or (seq.scores is not None and seq.scores.has_nan):
                self.blocks.clear(seq)
            else:
                self.blocks.keep(seq)
            if self.drafter is not None and seq.num_generated:
                self.drafter.index(seq)
            self.remove(seq)
        self.num_finished += len(finished)
        return [output for _, output in finished]


def _find_copies(
    chosen: list[tuple[Sequence, Chunk]], blocked: list[tuple[Sequence, Sequence]]
) -> dict[int, list[Sequence]]:
    """The sequences that wait for an equal one, which the `chosen` chunks complete, see `ScheduledBatch.copies`."""
    index = {id(seq): i for i, (seq, chunk) in enumerate(chosen) if chunk.start + chunk.length == len(seq.tokens)}
    copies: dict[int, list[Sequence]] = {}
    for owner, seq in blocked:
        if id(owner) in index and seq.tokens == owner.tokens and not seq.wants_scores and seq.params.max_tokens:
            copies.setdefault(index[id(owner)], []).append(seq)
    return copies


def accepted_rows(drafts: Drafts, tokens: list[int]) -> list[list[int]]:
    """For each sequence, the rows of a decode step whose sampled `tokens` follow it, in order of position.

    Its last row is that of its last token; the rows before are those of its draft, in reverse.
    """
    end, found = 0, []
    for draft in drafts:
        end += len(draft) + 1
        rows = [end - 1]
        for token in draft:
            if tokens[rows[-1]] != token:
                break
            rows.append(rows[-1] - 1)
        found.append(rows)
    return found
