"""The embedded engine: continuous batching with the model code of the trainer.

In exact mode the log-probs it reports are, bit for bit, those the trainer computes for the same tokens and weights
(fp32, CPU, one thread), whatever was batched: every matrix product has enough rows, keys are padded to
`KEY_MULTIPLE`, and after a weight update running sequences are computed anew.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from prime_rl.inference.embedded.cache import Chunk, DecodeAttention, KVCache, PrefillAttention, min_tokens
from prime_rl.inference.embedded.sampler import Sampled, build_sampling_batch, sample
from prime_rl.inference.embedded.scheduler import Scheduler, Sequence
from prime_rl.inference.engine import (
    EngineStats,
    Event,
    FinishReason,
    GenerationRequest,
    Output,
    Progress,
    TopLogprobs,
)
from prime_rl.inference.text import Decode, Detokenizer, StopWatch
from prime_rl.trainer.models.attention import padded
from prime_rl.trainer.models.causal_lm import CausalLM, tensor_names
from prime_rl.trainer.models.registry import fill_weights
from prime_rl.transport.weights import digest_tensor


class DecodeBatch:
    """The running sequences as vectors, kept from step to step while nobody comes or goes."""

    def __init__(self, running: list[Sequence], min_tokens: int, device: torch.device) -> None:
        rows = max(len(running), min_tokens)  # the rows beyond are unused slots
        self.tokens: Int[Tensor, " rows"] = torch.zeros(rows, dtype=torch.long, device=device)
        self.positions: NDArray[np.int64] = np.zeros(rows, dtype=np.int64)
        self.tokens[: len(running)] = torch.tensor([seq.tokens[-1] for seq in running], device=device)
        self.positions[: len(running)] = [len(seq.tokens) - 1 for seq in running]
        self.sampling = build_sampling_batch(running, device)


class EmbeddedEngine:
    """Implements `prime_rl.inference.engine.Engine` over a slot cache; not thread-safe."""

    def __init__(
        self,
        model: CausalLM,
        *,
        eos_ids: Iterable[int] = (),
        decode: Decode | None = None,
        max_model_len: int | None = None,
        max_running: int = 256,
        max_prefill_tokens: int = 2048,
        exact: bool = True,
        layers_kept: int | None = None,
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.version = 0
        self.exact = exact
        self.max_model_len = max_model_len or model.config.max_position_embeddings
        self._eos_ids = frozenset(eos_ids)
        self._decode_text = decode
        self._layers_kept = layers_kept
        weight = model.model.embed_tokens.weight
        self._device = weight.device
        self._min_tokens = min_tokens()
        self._cache = KVCache(model.config, weight.dtype, weight.device, max_running, self.max_model_len)
        self._scheduler = Scheduler(max_running, max_prefill_tokens, self._cache.copy_slot)
        self._sequences: dict[GenerationRequest, Sequence] = {}
        self._batch: DecodeBatch | None = None
        self._counts = {"prompt_tokens": 0, "generated_tokens": 0, "finished": 0, "steps": 0}

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.model.config.vocab_size

    def add(self, request: GenerationRequest) -> None:
        """Queue a request; `ValueError` when its prompt leaves no room for a token."""
        num_prompt = len(request.prompt)
        if not 0 < num_prompt < self.max_model_len:
            raise ValueError(f"a prompt of {num_prompt} tokens does not fit in {self.max_model_len}")
        params = request.params
        eos = frozenset() if params.ignore_eos else self._eos_ids
        watch = None
        if params.stop and self._decode_text is not None:
            detokenizer = Detokenizer(self._decode_text, params.skip_special_tokens)
            watch = StopWatch(detokenizer, params.stop, params.include_stop)
        seq = Sequence(
            request=request,
            stop_ids=eos | frozenset(params.stop_token_ids),
            tokens=list(request.prompt),
            num_prompt=num_prompt,
            max_tokens=min(num_prompt + params.max_tokens, self.max_model_len),
            watch=watch,
        )
        self._sequences[request] = seq
        self._scheduler.waiting.append(seq)
        self._counts["prompt_tokens"] += num_prompt

    @torch.inference_mode()
    def cancel(self, request: GenerationRequest) -> None:
        """Forget a request; nothing happens when it has finished."""
        seq = self._sequences.pop(request, None)
        if seq is not None:
            self._scheduler.remove(seq)
            self._batch = None

    def has_work(self) -> bool:
        """True while a request is queued or running."""
        return bool(self._sequences)

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """One forward pass: prompts that are not cached yet, else one token for every running sequence."""
        self._scheduler.admit(self.version)
        self._reserve(0)
        self._counts["steps"] += 1
        if chunks := self._scheduler.next_chunks():
            return self._prefill(chunks)
        return self._decode()

    @torch.no_grad()
    def load_weights(self, tensors: dict[str, Tensor], version: int) -> dict[str, str]:
        """Copy `tensors` into the parameters, in place; returns the digest of every tensor now held.

        A tensor published in another dtype is digested in that dtype, so equal digests mean that nothing was lost.
        `ValueError`, and nothing is changed, when names or shapes do not fit.
        """
        fill_weights(self.model, tensors, ignore_layers_from=self._layers_kept, source="the new weights")
        self.version = version
        self._batch = None
        self._scheduler.change_version(version, keep_cache=not self.exact)
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
            **self._counts,
        )

    def _prefill(self, chunks: list[tuple[Sequence, Chunk]]) -> list[Event]:
        self._reserve(max(chunk.start + chunk.length for _, chunk in chunks))
        config = self.model.config
        attend = PrefillAttention(
            self._cache,
            [chunk for _, chunk in chunks],
            config.num_attention_heads // config.num_key_value_heads,
            self._min_tokens,
            self._device,
        )
        flat = [token for seq, c in chunks for token in seq.tokens[c.start : c.start + c.length]]
        flat += flat[-1:] * (self._min_tokens - len(flat))
        hidden = self.model(torch.tensor(flat, device=self._device), attend.positions, attend)
        ends = np.cumsum([chunk.length for _, chunk in chunks]) - 1
        done = self._scheduler.mark_cached(chunks)
        if not done:
            return []
        self._batch = None
        rows = [chunks[i][0] for i in done]
        picked = [int(ends[i]) for i in done]
        picked += picked[-1:] * (self._min_tokens - len(picked))
        logits = self.model.logits(hidden[picked])[: len(rows)]
        positions = np.array([len(seq.tokens) for seq in rows])
        return self._advance(rows, sample(logits, build_sampling_batch(rows, self._device), positions))

    def _decode(self) -> list[Event]:
        running = self._scheduler.running
        if self._batch is None:
            self._batch = DecodeBatch(running, self._min_tokens, self._device)
        batch, num = self._batch, len(running)
        width = int(batch.positions.max()) + 1
        self._reserve(width)
        positions = torch.from_numpy(batch.positions).to(self._device)
        attend = DecodeAttention(self._cache, positions, padded(width))
        logits = self.model.logits(self.model(batch.tokens, positions, attend))[:num]
        for seq in running:
            seq.num_cached += 1
        sampled = sample(logits, batch.sampling, batch.positions[:num] + 1)
        # A copy, because the tensor above may share the memory of the array.
        batch.positions = batch.positions + 1
        batch.tokens[:num] = sampled.tokens
        return self._advance(running, sampled)

    def _advance(self, rows: list[Sequence], sampled: Sampled) -> list[Event]:
        """Append one token to every row and take out those that have finished."""
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
                events.append(Progress(seq.request, start, [token], [logprobs[i]], [top]))
        self._counts["generated_tokens"] += len(rows) - len(bad)
        if finished:
            self._retire(finished)
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

    def _retire(self, finished: list[tuple[Sequence, Output]]) -> None:
        # From the last slot down, so that no slot is moved that is about to be freed itself.
        for seq, output in sorted(finished, key=lambda pair: -pair[0].slot):
            if output.finish_reason == "error":
                self._cache.clear_slot(seq.slot)
            self._scheduler.remove(seq)
            del self._sequences[seq.request]
        self._counts["finished"] += len(finished)
        self._batch = None

    def _reserve(self, width: int) -> None:
        self._cache.reserve(len(self._scheduler.running), padded(width))


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
    )


def _failed(seq: Sequence) -> Output:
    """What is left of a sequence whose log-prob is not finite: weights that overflowed, most likely."""
    return _output(seq, "error", "the model's log-probs are not finite", None)


def _top_lists(sampled: Sampled) -> list[TopLogprobs]:
    if sampled.top_ids is None or sampled.top_values is None:
        return []
    pairs = zip(sampled.top_ids.tolist(), sampled.top_values.tolist(), strict=True)
    # Tokens outside the distribution that was sampled from are left out: -inf has no place in JSON.
    return [[(i, v) for i, v in zip(ids, values, strict=True) if v > float("-inf")] for ids, values in pairs]
