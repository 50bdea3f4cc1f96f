"""Model runner: computes a scheduled batch, from sequences to sampled tokens."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from prime_rl.inference.embedded.adapters import Adapters, LoraRouting
from prime_rl.inference.embedded.attention import (
    AttentionMetadata,
    Chunk,
    DecodeAttention,
    DecodeBackend,
    FlashPrefill,
    GatheredAttention,
)
from prime_rl.inference.embedded.block_manager import BlockManager
from prime_rl.inference.embedded.cuda_graphs import GraphDecoder
from prime_rl.inference.embedded.fused_decode import FusedDecode
from prime_rl.inference.embedded.kv_cache import KVCache
from prime_rl.inference.embedded.prepared_decoder import PreparedDecoder
from prime_rl.inference.embedded.prompt_logprobs import PromptScorer
from prime_rl.inference.embedded.recompute import RecomputeDecode, compute_hidden
from prime_rl.inference.embedded.sampler import SamplerOutput, build_sampling_batch, draw_noise, sample
from prime_rl.inference.embedded.scheduler import ScheduledBatch
from prime_rl.inference.embedded.sequence import Sequence
from rollouts.training.sampling_support import decode_supports

NOISE_STEPS = 16
"""Steps whose random numbers are drawn at once, and copied to a GPU at once."""


class DecodeBatch:
    """The running sequences and their drafts as vectors, reused across steps while the batch is unchanged.

    The rows of a sequence are in descending order of position: the first one reads, and transposes, all keys that the
    others read.
    """

    def __init__(self, batch: ScheduledBatch, min_rows: int, changes: LoraRouting | None, device: torch.device) -> None:
        self.changes, self.revision = changes, batch.revision
        slots: list[int] = []
        flat: list[int] = []
        positions: list[int] = []
        for slot, (seq, draft) in enumerate(zip(batch.sequences, batch.all_drafts, strict=True)):
            last, num = len(seq.tokens) - 1, len(draft) + 1
            slots += [slot] * num
            flat += [*reversed(draft), seq.tokens[-1]]
            positions += range(last + num - 1, last - 1, -1)
        self.num, rows = len(slots), max(len(slots), min_rows)  # further rows are unused slots
        self.tokens: Int[Tensor, " rows"] = torch.zeros(rows, dtype=torch.long, device=device)
        self.positions: NDArray[np.int64] = np.zeros(rows, dtype=np.int64)
        self.tokens[: self.num] = torch.tensor(flat, device=device)
        self.positions[: self.num] = positions
        self.sampling = build_sampling_batch([batch.sequences[slot] for slot in slots], device)
        self.slots = np.array([*slots, *range(slots[-1] + 1, slots[-1] + 1 + rows - self.num)], dtype=np.int64)
        self.backend: DecodeBackend | None = None
        self._noise: list[Tensor] = []
        self._steps = 1 if batch.drafts else NOISE_STEPS  # a batch with drafts is not reused

    def draw_noise(self) -> Float[Tensor, " num"] | None:
        """The random numbers of this step, drawn for several steps at once; None if all rows are greedy."""
        if not self._noise:
            positions = self.positions[: self.num] + np.arange(self._steps, 0, -1)[:, None]
            noise = draw_noise(self.sampling, positions, self.tokens.device)
            if noise is None:
                return None
            self._noise = list(noise)
        return self._noise.pop()

    def advance(self, tokens: Int[Tensor, " num"]) -> None:
        """Set the sampled tokens as inputs of the next step."""
        # A copy, because a tensor may share the memory of the array.
        self.positions = self.positions.copy()
        self.positions[: self.num] += 1
        self.tokens[: self.num] = tokens

    def can_continue(self, batch: ScheduledBatch) -> bool:
        """Whether the next step may begin before the tokens of this one are known on the host."""
        if self.backend is None or self.sampling.needs_host:
            return False
        goes_on = any(len(seq.tokens) + 1 < seq.max_tokens for seq in batch.sequences)
        return goes_on and self.revision == batch.revision and self.backend.fits(self.positions)


class HostCopy:
    """Copies of tensors on a GPU in memory of the host, which do not wait for work that follows."""

    def __init__(self, *tensors: Tensor) -> None:
        self._copies, self._copied = list(tensors), None
        if tensors[0].is_cuda:
            self._copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
            for copy, tensor in zip(self._copies, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(tensors[0].device))  # maybe not that of the current device

    def wait(self) -> list[Tensor]:
        """The copies, once they are complete."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._copies


class EagerDecode(DecodeBackend):
    """A batch decoded by torch operations from contiguous memory, with adapters or without."""

    def __init__(self, decoder: PreparedDecoder, attention: DecodeAttention, changes: LoraRouting | None) -> None:
        super().__init__(attention.cache, attention.metadata, attention.width, attention.reach)
        self._decoder, self._attention, self._changes = decoder, attention, changes

    def __call__(self, tokens: Int[Tensor, " rows"], positions: NDArray[np.int64]) -> Float[Tensor, "rows vocab"]:
        """As `DecodeBackend`."""
        at = torch.from_numpy(positions).to(tokens.device)
        self._attention.advance(positions, at)
        hidden = self._decoder(tokens, at, self._attention, int(positions.max()) + 1, self._changes)
        return self._decoder.logits(hidden, self._changes)


class GatheredDecode(DecodeBackend):
    """One step with adapters that the fused kernel cannot apply, by torch operations and the attention of chunks."""

    def __init__(
        self, decoder: PreparedDecoder, cache: KVCache, metadata: AttentionMetadata, changes: LoraRouting | None
    ) -> None:
        super().__init__(cache, metadata, int(metadata.starts.max()) + 1, reach=None)
        self._decoder, self._changes = decoder, changes

    def __call__(self, tokens: Int[Tensor, " rows"], positions: NDArray[np.int64]) -> Float[Tensor, "rows vocab"]:
        """As `DecodeBackend`."""
        attend = build_gathered(self._decoder, self.cache, self.metadata)
        hidden = self._decoder(tokens, attend.positions, attend, self.metadata.num_keys, self._changes)
        return self._decoder.logits(hidden, self._changes)


def build_gathered(
    decoder: PreparedDecoder, cache: KVCache, metadata: AttentionMetadata
) -> GatheredAttention | FlashPrefill:
    """The attention of a forward pass, which rounds queries as the fused decode step does."""
    if (kernels := decoder.prefill_kernels) is not None:
        return FlashPrefill(cache, metadata, kernels)
    model = decoder.model
    return GatheredAttention(
        cache, metadata, model.config.num_attention_heads, decoder.min_rows, rounded=model.rounds_inputs
    )


class ModelRunner:
    """Computes scheduled batches with one model: prompts in chunks, then one token per sequence and step.

    Short chunks are computed in the step of the other sequences' tokens.
    """

    def __init__(
        self,
        decoder: PreparedDecoder,
        blocks: BlockManager,
        adapters: Adapters,
        exact: bool,
        graphs: GraphDecoder | None = None,
    ) -> None:
        self.decoder, self.graphs = decoder, graphs
        self._blocks, self._adapters, self._exact, self._device = blocks, adapters, exact, decoder.device
        self._num_heads = decoder.model.config.num_attention_heads
        self.batch: DecodeBatch | None = None
        self.in_flight: list[Sequence] = []
        """The sequences of a decode step that has been started while the tokens of the step before were handled."""
        self._in_flight: SamplerOutput | None = None  # of this step

    def reset(self) -> None:
        """Forget the batch and the step that has been started, as after new weights."""
        self.in_flight, self.batch, self._in_flight = [], None, None

    def forget_adapter(self, name: str) -> None:
        """`reset`, after an adapter has changed or was removed."""
        self.reset()
        if self.graphs is not None:
            self.graphs.forget_adapter(name)

    def run(self, batch: ScheduledBatch) -> SamplerOutput | None:
        """Compute a batch; one sampled token for every sequence whose tokens are then cached and that wants more."""
        if batch.in_flight:
            assert self.batch is not None and self._in_flight is not None
            return self._hand_over(self.batch, batch, self._in_flight)
        if self._in_flight is not None:
            self.reset()
        return self._prefill(batch) if batch.chunks else self._decode(batch)

    def _prefill(self, batch: ScheduledBatch) -> SamplerOutput | None:
        metadata, sampled = self._blocks.prefill_metadata(batch.sequences, batch.chunks), batch.sampled
        wanted = sorted({i for i, _ in sampled})
        compute = self._compute_rows if batch.as_rows else self._compute_chunks
        logits = compute(batch, metadata, wanted)
        if not sampled:
            return None
        rows = [seq for _, seq in sampled]
        if len(rows) > len(wanted):
            logits = logits[[wanted.index(i) for i, _ in sampled]]
        return sample(logits, build_sampling_batch(rows, self._device), np.array([len(seq.tokens) for seq in rows]))

    def _compute_rows(
        self, batch: ScheduledBatch, metadata: AttentionMetadata, wanted: list[int]
    ) -> Float[Tensor, "wanted vocab"]:
        """Next-token logits of the `wanted` chunks by the fused decode step.

        Every token is a row, those of a chunk in descending order of position, as in `DecodeBatch`.
        """
        fused, counts = self.decoder.fused, metadata.lengths
        changes = self._route(batch.sequences, counts.tolist())
        assert fused is not None and (changes is None or changes.batch is not None), "see `Scheduler._fit_rows`"
        firsts = np.cumsum(counts) - counts
        positions = np.repeat(metadata.starts + counts + firsts, counts) - np.arange(counts.sum()) - 1
        tokens: list[int] = []
        for seq, chunk in zip(batch.sequences, batch.chunks, strict=True):
            tokens += reversed(seq.tokens[chunk.start : chunk.start + chunk.length])
        tables = np.ascontiguousarray(metadata.block_tables.repeat(counts, axis=1))
        rows = AttentionMetadata(metadata.slots.repeat(counts), positions, np.ones_like(positions), tables)
        deltas = None if changes is None else changes.batch
        return FusedDecode(fused, self._blocks.cache, rows, deltas, firsts[wanted])(torch.tensor(tokens), positions)

    def _compute_chunks(
        self, batch: ScheduledBatch, metadata: AttentionMetadata, wanted: list[int]
    ) -> Float[Tensor, "wanted vocab"]:
        """Next-token logits of the `wanted` chunks, by a pass over whole chunks, which also scores prompts."""
        seqs, chunks = batch.sequences, batch.chunks
        attend = build_gathered(self.decoder, self._blocks.cache, metadata)
        pairs = list(zip(seqs, chunks, strict=True))
        flat = [token for seq, c in pairs for token in seq.tokens[c.start : c.start + c.length]]
        padding = max(self.decoder.min_rows - len(flat), 0)
        flat += flat[-1:] * padding
        counts = metadata.lengths.tolist()
        counts[-1] += padding  # repeats of the last token, which write the same keys
        tokens, changes = torch.tensor(flat, device=self._device), self._route(seqs, counts)
        if self.decoder.model.recomputes:
            whole = compute_hidden(self.decoder, [seq.tokens[: c.start + c.length] for seq, c in pairs])
            hidden = torch.cat([x[c.start :] for x, (_, c) in zip(whole, pairs, strict=True)])
        else:
            hidden = self.decoder(tokens, attend.positions, attend, metadata.num_keys, changes)
        ends = np.cumsum(metadata.lengths)
        for (seq, chunk), end in zip(pairs, ends.tolist(), strict=True):
            if seq.wants_scores:
                self._score(seq, chunk, hidden[end - chunk.length : end])
        if not wanted:
            return hidden.new_empty(0, self.decoder.model.config.vocab_size)
        return self.decoder.logits(hidden[ends[wanted] - 1], self._route([seqs[i] for i in wanted], [1] * len(wanted)))

    def _score(self, seq: Sequence, chunk: Chunk, hidden: Float[Tensor, "rows hidden"]) -> None:
        """Score the prompt tokens predicted by a chunk."""
        params = seq.params
        if seq.scores is None:
            num_scored = seq.num_prompt - params.prompt_start
            support = decode_supports(params.prompt_support, num_scored) if params.prompt_support else None
            seq.scores = PromptScorer(params.prompt_logprobs or 0, params.prompt_temperature, support)
        skipped = max(params.prompt_start - 1 - chunk.start, 0)
        targets = seq.tokens[chunk.start + skipped + 1 : chunk.start + chunk.length + 1]

        def head(rows: Tensor) -> Tensor:
            return self.decoder.logits(rows, self._route([seq], [len(rows)]))

        seq.scores.add(hidden[skipped:][: len(targets)], head, targets)

    def _decode(self, batch: ScheduledBatch) -> SamplerOutput:
        current = self.batch
        if current is None or current.revision != batch.revision or batch.drafts:
            changes = self._route(batch.sequences, [1 + len(draft) for draft in batch.all_drafts])
            current = DecodeBatch(batch, self.decoder.min_rows, changes, self._device)
            self.batch = current
        if current.backend is None or not current.backend.fits(current.positions):
            current.backend = self._select_backend(current, batch.sequences)
        sampled = self._compute(current, current.backend)
        return self._hand_over(current, batch, sampled) if current.backend.is_on_device else sampled

    def _compute(self, current: DecodeBatch, backend: DecodeBackend) -> SamplerOutput:
        """Start a step; on a GPU it may not be complete."""
        noise = current.draw_noise()
        logits = backend(current.tokens, current.positions)[: current.num]
        sampled = sample(logits, current.sampling, current.positions[: current.num] + 1, noise)
        current.advance(sampled.tokens)
        return sampled

    def _hand_over(self, current: DecodeBatch, batch: ScheduledBatch, sampled: SamplerOutput) -> SamplerOutput:
        """The tokens of the batch's sequences from a started step; a GPU computes the next one while they are handled.

        Otherwise it would wait for .2 to .5 ms in each step, 15 % of the time of a small model. Sequences that end are
        computed once more.
        """
        self.in_flight, self._in_flight = [], None
        continues = current.can_continue(batch)
        if not batch.in_flight and not continues:
            return sampled
        copy = HostCopy(sampled.tokens, sampled.logprobs)
        if continues and current.backend is not None:
            self.in_flight, self._in_flight = current.sampling.rows, self._compute(current, current.backend)
        tokens, logprobs = copy.wait()
        if len(batch.sequences) < current.num:
            row_of = {id(seq): row for row, seq in enumerate(current.sampling.rows)}
            rows = [row_of[id(seq)] for seq in batch.sequences]
            tokens, logprobs = tokens[rows], logprobs[rows]
        return SamplerOutput(tokens, logprobs, None, None)

    def _select_backend(self, batch: DecodeBatch, running: list[Sequence]) -> DecodeBackend:
        """CUDA graph (if all rows have the same adapter, or none), else the fused kernel, else torch operations; a
        backend without a cache for models that recompute."""
        cache, decoder = self._blocks.cache, self.decoder
        metadata = self._blocks.decode_metadata(running, batch.positions, batch.slots)
        if decoder.model.recomputes:
            return RecomputeDecode(decoder, cache, metadata, running)
        changes = batch.changes
        delta = self._adapters.find_whole({seq.request.adapter for seq in running})
        if self.graphs is not None and (changes is None or delta is not None):
            graph = self.graphs.build(metadata, batch.num, delta)
            if graph is not None:
                return graph
        if decoder.fused is not None and (changes is None or changes.batch is not None):
            return FusedDecode(decoder.fused, cache, metadata, None if changes is None else changes.batch)
        if not self._blocks.is_contiguous or decoder.model.rounds_inputs:
            return GatheredDecode(decoder, cache, metadata, changes)
        return EagerDecode(decoder, DecodeAttention(cache, metadata, self._num_heads, self._exact), changes)

    def _route(self, seqs: list[Sequence], counts: list[int]) -> LoraRouting | None:
        """The adapters of `counts[i]` rows of each sequence."""
        return self._adapters.route([seq.request.adapter for seq in seqs], counts, self._device)
