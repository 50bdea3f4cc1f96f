"""The embedded engine: continuous batching with the trainer's model code.

In exact mode, log-probs are bitwise equal to the trainer's for the same tokens and weights (on a CPU), regardless of
batching, prefix sharing, preemption and chunked prefill: every matrix product has a minimum number of rows, keys are
padded to `KEY_MULTIPLE`, and running sequences are recomputed after a weight update. Fast mode skips these measures
and keeps the cache of running sequences across updates.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from prime_rl.inference.detokenizer import Decode, Detokenizer, StopStringMatcher
from prime_rl.inference.embedded.adapters import Adapters
from prime_rl.inference.embedded.attention import Chunk, DecodeAttention, DecodeMetadata, PrefillAttention
from prime_rl.inference.embedded.cuda_graphs import GraphCapturer, GraphDecodeMetadata, GraphDecoder
from prime_rl.inference.embedded.fused_decode import FusedDecodeMetadata
from prime_rl.inference.embedded.kv_cache import BLOCK, KVCache, num_columns
from prime_rl.inference.embedded.model_runner import LoraDeltas, ModelRunner
from prime_rl.inference.embedded.prefix_cache import PrefixIndex
from prime_rl.inference.embedded.prompt_logprobs import PromptScorer
from prime_rl.inference.embedded.sampler import SamplerOutput, build_sampling_batch, sample
from prime_rl.inference.embedded.scheduler import Scheduler, Sequence
from prime_rl.inference.engine import (
    FULL,
    AdapterSpec,
    EngineStats,
    Event,
    FinishReason,
    GenerationRequest,
    InProcessEngineMixin,
    Output,
    StreamUpdate,
    TopLogprobs,
)
from prime_rl.trainer.models.causal_lm import CausalLM, tensor_names
from prime_rl.trainer.models.registry import fill_weights
from prime_rl.transport.weights import digest_tensor
from rollouts.kernels.cpu import arithmetic_dtype

MEMORY_SHARE = 4
"""By default, the KV cache takes at most 1 / MEMORY_SHARE of the memory."""


class DecodeBatch:
    """The running sequences as vectors, reused across steps while the batch is unchanged."""

    def __init__(
        self, running: list[Sequence], min_rows: int, device: torch.device, changes: LoraDeltas | None
    ) -> None:
        self.changes = changes
        self.num, rows = len(running), max(len(running), min_rows)  # further rows are unused slots
        self.tokens: Int[Tensor, " rows"] = torch.zeros(rows, dtype=torch.long, device=device)
        self.positions: NDArray[np.int64] = np.zeros(rows, dtype=np.int64)
        self.tokens[: self.num] = torch.tensor([seq.tokens[-1] for seq in running], device=device)
        self.positions[: self.num] = [len(seq.tokens) - 1 for seq in running]
        self.sampling = build_sampling_batch(running, device)
        self.plan: DecodeMetadata | FusedDecodeMetadata | GraphDecodeMetadata | None = None

    def advance(self, tokens: Int[Tensor, " num"]) -> None:
        """Set the sampled tokens as inputs of the next step."""
        # A copy, because a tensor may share the memory of the array.
        self.positions = self.positions.copy()
        self.positions[: self.num] += 1
        self.tokens[: self.num] = tokens


class EmbeddedEngine(InProcessEngineMixin):
    """Implements `prime_rl.inference.engine.GenerationEngine` over a slot-based KV cache; not thread-safe."""

    def __init__(
        self,
        model: CausalLM,
        *,
        eos_ids: Iterable[int] = (),
        decode: Decode | None = None,
        max_model_len: int | None = None,
        max_running: int = 256,
        max_num_batched_tokens: int = 2048,
        max_cache_tokens: int | None = None,
        max_prefix_cache_tokens: int | None = None,
        enable_prefix_caching: bool = True,
        exact: bool = True,
        layers_kept: int | None = None,
        recorder: GraphCapturer | None = None,
    ) -> None:
        self.dtype = model.embedding().dtype
        """Precision to which weights, keys and values are rounded; storage and compute may use a wider dtype."""
        self.model = model.eval().requires_grad_(False).to(arithmetic_dtype(self.dtype, model.embedding().device))
        self.version = 0
        self.exact = exact
        self.max_model_len = max_model_len or model.config.max_position_embeddings
        self._eos_ids = frozenset(eos_ids)
        self._decode_text = decode
        self._layers_kept = layers_kept
        weight = model.embedding()
        self._device = weight.device
        self._runner = ModelRunner(model, exact, self.dtype)
        smallest = (num_columns(self.max_model_len + 1) + self._runner.min_rows) * BLOCK  # of one sequence
        self.max_cache_tokens = max(max_cache_tokens or self._default_cache_tokens(max_running), smallest)
        self._cache = KVCache(model.config, self.dtype, weight.device, max_running, self.max_cache_tokens)
        self._graphs: GraphDecoder | None = None
        if recorder is not None and self._runner.is_static:
            assert not exact, "CUDA graphs may differ in the last bits"
            self._graphs = GraphDecoder(self._runner, self._cache, recorder, self.max_model_len + 1)
        self._prefixes = PrefixIndex(
            self.max_cache_tokens // 4 if max_prefix_cache_tokens is None else max_prefix_cache_tokens
        )
        self._scheduler = Scheduler(
            max_running, max_num_batched_tokens, self._cache, self._prefixes, enable_prefix_caching
        )
        self._sequences: dict[GenerationRequest, Sequence] = {}
        self._adapters = Adapters(model)
        self._batch: DecodeBatch | None = None
        self._ended: list[Event] = []  # returned by the next step
        self._counts = {"prompt_tokens": 0, "generated_tokens": 0, "finished": 0, "steps": 0}

    @property
    def vocab_size(self) -> int:
        """Vocabulary size; token ids are below it."""
        return self.model.config.vocab_size

    @property
    def max_score_len(self) -> int:
        """Maximum length of a scored sequence: the model's context length, if the cache is large enough."""
        capacity = (self.max_cache_tokens // BLOCK - self._runner.min_rows) * BLOCK - 1
        return max(min(self.model.config.max_position_embeddings, capacity), self.max_model_len - 1)

    def check(self, request: GenerationRequest) -> None:
        """`ValueError` if the prompt is too long or the request is unsupported."""
        num_prompt, params = len(request.prompt), request.params
        longest = self.max_score_len if params.max_tokens == 0 else self.max_model_len - 1
        if not 0 < num_prompt <= longest:
            raise ValueError(f"a prompt of {num_prompt} tokens does not fit in {longest + (params.max_tokens > 0)}")
        if params.max_tokens < (params.prompt_logprobs is None):
            raise ValueError(f"max_tokens must be at least 1, got {params.max_tokens}")
        if params.prompt_logprobs is not None and (params.prompt_logprobs < FULL or params.prompt_temperature <= 0):
            raise ValueError("prompt_logprobs must be at least 0 and prompt_temperature above 0")
        if params.prompt_logprobs is not None and not 1 <= params.prompt_start <= max(num_prompt - 1, 1):
            raise ValueError(f"prompt_start {params.prompt_start} must be from 1 to the last of {num_prompt} tokens")
        if request.adapter is not None and request.adapter not in self._adapters.served:
            raise ValueError(f"no adapter {request.adapter!r} is loaded")

    def add(self, request: GenerationRequest) -> None:
        """Queue a request; raises as `check`."""
        self.check(request)
        num_prompt, params = len(request.prompt), request.params
        eos = frozenset() if params.ignore_eos else self._eos_ids
        watch = None
        if params.stop and self._decode_text is not None:
            detokenizer = Detokenizer(self._decode_text, params.skip_special_tokens)
            watch = StopStringMatcher(detokenizer, params.stop, params.include_stop)
        seq = Sequence(
            request=request,
            stop_ids=eos | frozenset(params.stop_token_ids),
            tokens=list(request.prompt),
            num_prompt=num_prompt,
            max_tokens=max(min(num_prompt + params.max_tokens, self.max_model_len), num_prompt),
            watch=watch,
        )
        seq.family = self._family(seq)
        self._sequences[request] = seq
        self._scheduler.waiting.append(seq)
        self._counts["prompt_tokens"] += num_prompt

    @torch.inference_mode()
    def cancel(self, request: GenerationRequest) -> None:
        """Cancel a request; no effect if it has finished."""
        seq = self._sequences.pop(request, None)
        if seq is not None:
            self._scheduler.remove(seq)
            self._batch = None

    @torch.no_grad()
    def load_adapter(self, name: str, tensors: dict[str, Tensor], spec: AdapterSpec) -> dict[str, str]:
        """Add or replace a LoRA adapter (PEFT tensor names); returns the digest of every loaded tensor.

        Running requests continue with the new one, as after `load_weights`. `ValueError` without changes if it does
        not fit.
        """
        digests = self._adapters.load(name, tensors, spec)
        self._batch = None
        mine = [seq for seq in self._scheduler.running if seq.request.adapter == name]
        for seq in mine:
            seq.mark_version(spec.version)
        if self.exact:
            self._scheduler.restart(mine)
            for seq in mine:
                seq.family = self._family(seq)
        for seq in self._scheduler.waiting:
            seq.family = self._family(seq)
        return digests

    @torch.inference_mode()
    def remove_adapter(self, name: str) -> None:
        """Unload an adapter; its requests are aborted in the next step. `ValueError` if it is not loaded."""
        self._adapters.remove(name)
        self._ended += self._abort_all([seq for seq in self._sequences.values() if seq.request.adapter == name])

    def adapters(self) -> dict[str, AdapterSpec]:
        """Loaded adapters by name."""
        return {name: served.spec for name, served in self._adapters.served.items()}

    @torch.inference_mode()
    def abort(self) -> list[Event]:
        """Abort every request; partial completions are returned with finish_reason "abort"."""
        return self._abort_all(list(self._sequences.values()))

    def has_work(self) -> bool:
        """Whether a request is queued or running, or has an undelivered output."""
        return bool(self._sequences or self._ended)

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Run one forward pass: prefill if prompts are pending, else one token for every running sequence."""
        if self._ended:
            ended, self._ended = self._ended, []
            return ended
        for seq in self._scheduler.admit():
            seq.mark_version(self._version_of(seq))
            self._batch = None
        self._ensure_capacity()
        self._counts["steps"] += 1
        if chunks := self._scheduler.next_chunks():
            return self._prefill(chunks)
        return self._decode()

    @torch.no_grad()
    def load_weights(self, tensors: dict[str, Tensor], version: int) -> dict[str, str]:
        """Copy `tensors` into the parameters in place; returns the digest of every loaded tensor.

        A tensor published in another dtype is digested in that dtype, so equal digests imply lossless loading.
        `ValueError` without changes if names or shapes do not match.
        """
        rounded = {name: tensor.to(self.dtype) for name, tensor in tensors.items()}
        fill_weights(self.model, rounded, ignore_layers_from=self._layers_kept, source="the new weights")
        self._runner.refresh()
        self._change_version(version)
        return {
            name: digest_tensor(held.to(tensors[name].dtype) if name in tensors else held)
            for name, held in tensor_names(self.model).items()
        }

    def stats(self) -> EngineStats:
        """Counters for `/metrics`."""
        scheduler = self._scheduler
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            shared_prompt_tokens=scheduler.num_shared,
            preempted=scheduler.num_preempted,
            cached_tokens=sum(seq.num_cached for seq in scheduler.running) + self._prefixes.num_kept_tokens,
            kept_tokens=self._prefixes.num_kept_tokens,
            cache_size=self.max_cache_tokens + self._prefixes.max_prefix_cache_tokens,
            **self._counts,
        )

    def _change_version(self, version: int) -> None:
        """Invalidate the prefix cache; in exact mode also recompute running sequences."""
        self.version, self._batch = version, None
        running = self._scheduler.running
        for seq in running:
            seq.mark_version(self._version_of(seq))
        if self.exact:
            self._scheduler.restart(running)
        self._scheduler.clear_prefix_cache()

    def _version_of(self, seq: Sequence) -> int:
        """Version reported for this sequence: the adapter's, or that of the weights."""
        name = seq.request.adapter
        return self.version if name is None else self._adapters.served[name].spec.version

    def _family(self, seq: Sequence) -> Hashable:
        """Prefix cache namespace; keys are shared only within it."""
        name = seq.request.adapter
        return None if name is None else self._adapters.served[name].family

    def _abort_all(self, seqs: list[Sequence]) -> list[Event]:
        outputs = [_output(seq, "abort", None, None) for seq in seqs]
        for output in outputs:
            self.cancel(output.request)
        return list(outputs)

    def _default_cache_tokens(self, max_running: int) -> int:
        """Default cache size in tokens: a fraction of the memory, at most what `max_running` sequences need."""
        config = self.model.config
        size = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * self.dtype.itemsize
        if self._device.type == "cuda":
            memory = torch.cuda.mem_get_info(self._device)[0] * 3
        else:
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return min(memory // MEMORY_SHARE // size, max_running * (config.max_position_embeddings + BLOCK))

    def _prefill(self, chunks: list[tuple[Sequence, Chunk]]) -> list[Event]:
        config, device = self.model.config, self._device
        heads_per_kv = config.num_attention_heads // config.num_key_value_heads
        attend = PrefillAttention(self._cache, [c for _, c in chunks], heads_per_kv, self._runner.min_rows, device)
        flat = [token for seq, c in chunks for token in seq.tokens[c.start : c.start + c.length]]
        padding = max(self._runner.min_rows - len(flat), 0)
        flat += flat[-1:] * padding
        length = max(chunk.start + chunk.length for _, chunk in chunks)
        names, counts = [seq.request.adapter for seq, _ in chunks], [c.length for _, c in chunks]
        counts[-1] += padding  # repeats of the last token, which write the same keys
        changes = self._adapters.route(names, counts, device)
        hidden = self._runner(torch.tensor(flat, device=device), attend.positions, attend, length, changes)
        ends = np.cumsum([chunk.length for _, chunk in chunks])
        for (seq, chunk), end in zip(chunks, ends.tolist(), strict=True):
            if seq.wants_scores:
                self._score(seq, chunk, hidden[end - chunk.length : end])
        done = self._scheduler.mark_cached(chunks)
        if not done:
            return []
        self._batch = None
        events = self._end_scored([chunks[i][0] for i in done])
        drawing = [i for i in done if chunks[i][0].params.max_tokens]
        if not drawing:
            return events
        rows = [chunks[i][0] for i in drawing]
        changes = self._adapters.route([seq.request.adapter for seq in rows], [1] * len(rows), device)
        logits = self._runner.logits(hidden[ends[drawing] - 1], changes)
        positions = np.array([len(seq.tokens) for seq in rows])
        return events + self._advance(rows, sample(logits, build_sampling_batch(rows, device), positions))

    def _score(self, seq: Sequence, chunk: Chunk, hidden: Tensor) -> None:
        """Score the prompt tokens predicted by a chunk."""
        params = seq.params
        if seq.scores is None:
            seq.scores = PromptScorer(params.prompt_logprobs or 0, params.prompt_temperature)
        skipped = max(params.prompt_start - 1 - chunk.start, 0)
        hidden = hidden[skipped:]
        targets = seq.tokens[chunk.start + skipped + 1 : chunk.start + chunk.length + 1]
        if targets:

            def head(rows: Tensor) -> Tensor:
                changes = self._adapters.route([seq.request.adapter], [len(rows)], self._device)
                return self._runner.logits(rows, changes)

            seq.scores.add(hidden[: len(targets)], head, targets)

    def _end_scored(self, rows: list[Sequence]) -> list[Event]:
        """Finish the sequences that are only scored."""
        finished = [(seq, _output(seq, "length", None, None)) for seq in rows if not seq.params.max_tokens]
        if finished:
            self._finish_sequences(finished)
        return [output for _, output in finished]

    def _decode(self) -> list[Event]:
        batch = self._prepare_decode()
        plan, running = batch.plan, self._scheduler.running
        assert plan is not None
        if isinstance(plan, GraphDecodeMetadata):
            logits = plan(batch.tokens[: batch.num], batch.positions[: batch.num])
        elif isinstance(plan, FusedDecodeMetadata):
            logits = self._runner.decode(plan, batch.tokens, batch.positions)[: batch.num]
        else:
            at = torch.from_numpy(batch.positions).to(self._device)
            attend = DecodeAttention(plan, batch.positions, at)
            hidden = self._runner(batch.tokens, at, attend, int(batch.positions.max()) + 1, batch.changes)
            logits = self._runner.logits(hidden, batch.changes)[: batch.num]
        for seq in running:
            seq.num_cached += 1
        sampled = sample(logits, batch.sampling, batch.positions[: batch.num] + 1)
        batch.advance(sampled.tokens)
        return self._advance(running, sampled)

    def _ensure_capacity(self) -> None:
        """Reserve cache for one more token of every running sequence; may preempt sequences."""
        batch, scheduler = self._batch, self._scheduler
        if not scheduler.running or (batch is not None and batch.plan is not None and batch.plan.fits(batch.positions)):
            return
        before = scheduler.num_preempted
        scheduler.ensure_capacity(self._runner.min_rows)
        if scheduler.num_preempted != before:
            self._batch = None

    def _prepare_decode(self) -> DecodeBatch:
        """Return the decode batch and its metadata, rebuilt if the batch changed or outgrew them."""
        running = self._scheduler.running
        if self._batch is None:
            names = [seq.request.adapter for seq in running]
            changes = self._adapters.route(names, [1] * len(names), self._device)
            self._batch = DecodeBatch(running, self._runner.min_rows, self._device, changes)
        batch = self._batch
        if batch.plan is None or not batch.plan.fits(batch.positions):
            batch.plan = self._plan(batch)
        return batch

    def _plan(self, batch: DecodeBatch) -> DecodeMetadata | FusedDecodeMetadata | GraphDecodeMetadata:
        """Select the decode path: CUDA graph, else the fused kernel, else eager operations."""
        shared, plain = self._scheduler.count_shared(len(batch.positions)), batch.changes is None
        if self._graphs is not None and (plan := self._graphs.plan(batch.positions, shared, plain)) is not None:
            return plan
        if self._runner.fused is not None and plain:
            return FusedDecodeMetadata(self._cache, batch.positions, shared)
        return DecodeMetadata(self._cache, batch.positions, self.model.config.num_attention_heads, self.exact, shared)

    def _advance(self, rows: list[Sequence], sampled: SamplerOutput) -> list[Event]:
        """Append one token to every row and finish completed sequences."""
        events: list[Event] = []
        finished: list[tuple[Sequence, Output]] = []
        tops = _top_lists(sampled)
        tokens, logprobs = sampled.tokens.tolist(), sampled.logprobs.tolist()
        if not np.isfinite(logprobs).all():
            finished += [(rows[i], _failed(rows[i])) for i in np.flatnonzero(~np.isfinite(logprobs))]
        bad = {id(seq) for seq, _ in finished}
        for i, seq in enumerate(rows):
            if bad and id(seq) in bad:
                continue
            token = tokens[i]
            seq.tokens.append(token)
            seq.logprobs.append(logprobs[i])
            top = tops[i][: seq.params.top_logprobs] if tops else []
            if tops:
                seq.top_logprobs.append(top)
            output = self._finish(seq, token)
            if output is not None:
                finished.append((seq, output))
            elif seq.request.stream:
                start = seq.num_generated - 1
                events.append(StreamUpdate(seq.request, start, [token], [logprobs[i]], [top]))
        self._counts["generated_tokens"] += len(rows) - len(bad)
        if finished:
            self._finish_sequences(finished)
            events += [output for _, output in finished]
        return events

    def _finish(self, seq: Sequence, token: int) -> Output | None:
        reason: FinishReason | None = None
        stop: str | int | None = None
        text = None
        if seq.watch is not None:
            stop = seq.watch.add(token, active=seq.num_generated >= seq.params.min_tokens)
        if stop is not None and seq.watch is not None:
            reason, text = "stop", seq.watch.text
        elif token in seq.stop_ids:
            reason, stop = "stop", None if token in self._eos_ids else token
        elif len(seq.tokens) >= seq.max_tokens:
            reason = "length"
        return None if reason is None else _output(seq, reason, stop, text)

    def _finish_sequences(self, finished: list[tuple[Sequence, Output]]) -> None:
        # From the last slot down, so that no slot that is about to be freed is moved.
        for seq, output in sorted(finished, key=lambda pair: -pair[0].slot):
            if output.finish_reason == "error":
                self._cache.clear_slot(seq.slot)
            self._scheduler.remove(seq, keep=output.finish_reason != "error")
            del self._sequences[seq.request]
        self._counts["finished"] += len(finished)
        self._batch = None


def _output(seq: Sequence, reason: FinishReason, stop: str | int | None, text: str | None) -> Output:
    return Output(
        request=seq.request,
        token_ids=seq.tokens[seq.num_prompt :],
        logprobs=seq.logprobs,
        top_logprobs=seq.top_logprobs,
        versions=seq.versions,
        finish_reason=reason,
        stop_reason=stop,
        text=text,
        prompt_logprobs=None if seq.scores is None else seq.scores.result(),
        num_cached=seq.num_shared,
    )


def _failed(seq: Sequence) -> Output:
    """Error output for a non-finite log-prob, usually caused by overflowed weights."""
    return _output(seq, "error", "the model's log-probs are not finite", None)


def _top_lists(sampled: SamplerOutput) -> list[TopLogprobs]:
    if sampled.top_ids is None or sampled.top_values is None:
        return []
    pairs = zip(sampled.top_ids.tolist(), sampled.top_values.tolist(), strict=True)
    # Tokens excluded from sampling are omitted: JSON has no -inf.
    return [[(i, v) for i, v in zip(ids, values, strict=True) if v > float("-inf")] for ids, values in pairs]
