"""Samples of the training API: requests to a sampling backend, and adapters loaded into it from checkpoints."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from prime_rl.inference.async_engine import AsyncEngine
from prime_rl.inference.engine import AdapterSpec, GenerationRequest, Output, SamplingParams, derive_seed
from prime_rl.training_api.adapters import ALPHA
from prime_rl.training_api.checkpoints import AdapterCheckpoint, AdapterStore
from prime_rl.training_api.wire import CLASSES, LENGTH, STOP, fill_topk

MAX_SAMPLES, MAX_TOPK = 4096, 100
STABILITY = "record_stability_info"
UNSUPPORTED = ("target_prompt_logprobs", "prompt_alt_tokens_k", STABILITY)
"""Fields of a sample request that are refused when they are set."""


@dataclass(frozen=True)
class SampleRequest:
    """A validated `asample` request."""

    prompt: list[int]
    params: SamplingParams
    num_samples: int
    topk_prompt: int
    topk_sample: int
    wants_prompt: bool


def _number(values: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = values.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{name} must be a number from {low:g} to {high:g}, got {value!r}")
    return value


def parse_prompt(prompt: Any) -> list[int]:
    """Token ids of a `ModelInput`; `ValueError` for images and audio."""
    chunks = prompt.get("chunks") if isinstance(prompt, dict) else None
    if not isinstance(chunks, list):
        raise ValueError("prompt must be an object with a list of chunks")
    tokens: list[int] = []
    for chunk in chunks:
        if not isinstance(chunk, dict) or chunk.get("type", "encoded_text") != "encoded_text":
            raise ValueError("prompt: this server takes only text chunks (encoded_text)")
        ids = chunk.get("tokens")
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise ValueError("prompt: a text chunk needs tokens, a list of token ids")
        tokens += ids
    return tokens


def _parse_stop(stop: Any) -> tuple[tuple[str, ...], tuple[int, ...], bool]:
    """Stop strings, stop tokens, and whether the end token is ignored: `[]` disables every stop."""
    stop = [stop] if isinstance(stop, str) else stop
    if stop is None:
        return (), (), False
    if isinstance(stop, list) and all(isinstance(s, str) and s for s in stop):
        return tuple(stop), (), not stop
    if isinstance(stop, list) and all(type(s) is int for s in stop):
        return (), tuple(stop), True
    raise ValueError(f"stop must be a string, strings or token ids, got {stop!r}")


def parse_sample(body: Mapping[str, Any], max_len: int, vocab: int, seed: int) -> SampleRequest:
    """Validate a request; `ValueError` names the field. `seed` is used if the request has none."""
    if refused := [name for name in UNSUPPORTED if body.get(name)]:
        cure = "choose another loss_fn than stable_reinforce" if refused[0] == STABILITY else "leave it out"
        raise ValueError(f"{refused[0]} is not supported by this server: {cure}")
    prompt = parse_prompt(body.get("prompt"))
    if not prompt or not 0 <= min(prompt) <= max(prompt) < vocab:
        raise ValueError(f"prompt needs token ids from 0 to {vocab - 1}")
    given = body.get("sampling_params")
    if not isinstance(given, dict):
        raise ValueError("sampling_params must be an object")
    stop, stop_tokens, ignore_eos = _parse_stop(given.get("stop"))
    wants_prompt = bool(body.get("prompt_logprobs"))
    topk_prompt = int(_number(body, "topk_prompt_logprobs", 0, 0, MAX_TOPK))
    num = int(_number(body, "num_samples", 1, 1, MAX_SAMPLES))
    room = max_len - len(prompt)
    is_score = num == 1 and (wants_prompt or topk_prompt > 0)  # of a sequence of any length that can be trained
    if room < (0 if is_score else 1):
        raise ValueError(f"a prompt of {len(prompt)} tokens does not fit in the context of {max_len}")
    last_n = body.get("prompt_logprobs_last_n")
    if last_n is not None and (type(last_n) is not int or not wants_prompt or not 1 <= last_n <= len(prompt) - 1):
        raise ValueError(f"prompt_logprobs_last_n must be from 1 to {len(prompt) - 1}, with prompt_logprobs")
    topk_sample = int(_number(body, "topk_sample_logprobs", 0, 0, MAX_TOPK))
    params = SamplingParams(
        max_tokens=min(int(_number(given, "max_tokens", max_len, 1, 2**31)), room),
        temperature=_number(given, "temperature", 1.0, 0, 100),
        top_p=_number(given, "top_p", 1.0, 0, 1),
        top_k=int(_number(given, "top_k", -1, -1, 2**31)),
        seed=int(_number(given, "seed", seed, -(2**63), 2**64)),
        stop=stop,
        include_stop=True,
        skip_special_tokens=False,  # a stop string may be one
        stop_token_ids=stop_tokens,
        ignore_eos=ignore_eos,
        top_logprobs=topk_sample,
        prompt_logprobs=topk_prompt if wants_prompt or topk_prompt else None,
        prompt_start=1 if last_n is None else len(prompt) - last_n,
    )
    return SampleRequest(prompt, params, num, topk_prompt, topk_sample, wants_prompt)


def encode_samples(request: SampleRequest, outputs: Sequence[Output]) -> bytes:
    """Encode a `SampleResponse`; `ValueError` if the engine rejected the request."""
    message = CLASSES["SampleResponse"](prompt_cache_hit_tokens=min(output.num_cached for output in outputs))
    for output in outputs:
        if output.finish_reason in ("error", "abort"):
            raise ValueError(str(output.stop_reason or "the sample was aborted: its adapter was removed"))
        sequence = message.sequences.add(
            stop_reason=LENGTH if output.finish_reason == "length" else STOP,
            tokens=np.array(output.token_ids, dtype=np.int32).tobytes(),
            logprobs=np.array(output.logprobs, dtype=np.float32).tobytes(),
        )
        if request.topk_sample:
            fill_topk(sequence.topk_sampled_logprobs, output.top_logprobs, request.topk_sample)
    scores = outputs[0].prompt_logprobs
    if scores is not None:
        unscored = len(request.prompt) - len(scores.logprobs)
        if request.wants_prompt:
            values = [np.nan] * unscored + list(scores.logprobs)
            message.prompt_logprobs = np.array(values, dtype=np.float32).tobytes()
        if request.topk_prompt:
            fill_topk(message.topk_prompt_logprobs, [None] * unscored + list(scores.top_logprobs), request.topk_prompt)
    return bytes(message.SerializeToString())


class SamplingBackend(Protocol):
    """What samples: the engine of this process, or an inference server. Adapters are named by their client's path."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Output]:
        """Sample all requests, in order; they have the same prompt and adapter."""

    async def load_adapter(self, checkpoint: AdapterCheckpoint) -> None:
        """Load an adapter."""

    async def remove_adapter(self, path: str) -> None:
        """Unload an adapter."""


class EngineSampling:
    """Samples from the engine of this process."""

    def __init__(self, engine: AsyncEngine, store: AdapterStore) -> None:
        self.engine, self.store = engine, store
        self._versions = itertools.count(1)

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Output]:
        """See `SamplingBackend`."""
        return await self.engine.generate(list(requests))

    async def load_adapter(self, checkpoint: AdapterCheckpoint) -> None:
        """See `SamplingBackend`."""
        _, tensors, _ = await asyncio.to_thread(self.store.read, checkpoint)
        spec = AdapterSpec(checkpoint.config["rank"], ALPHA, next(self._versions))
        await self.engine.call(lambda engine: engine.load_adapter(checkpoint.path, tensors, spec))

    async def remove_adapter(self, path: str) -> None:
        """See `SamplingBackend`."""
        await self.engine.remove_adapter(path)


class Sampler:
    """Samples from a backend; adapters are loaded on demand, and the least recently used ones are unloaded."""

    def __init__(self, backend: SamplingBackend, max_adapters: int) -> None:
        self.backend, self.max_adapters = backend, max_adapters
        self._loaded: OrderedDict[str, None] = OrderedDict()
        self.in_use: dict[str, int] = {}
        """Checkpoint path -> running requests."""
        self._loading = asyncio.Lock()

    @property
    def num_loaded(self) -> int:
        """Number of loaded adapters."""
        return len(self._loaded)

    async def sample(self, request: SampleRequest, checkpoint: AdapterCheckpoint | None) -> bytes:
        """Sample and encode; None: the base model."""
        with self._hold(checkpoint):
            if checkpoint is not None:
                await self._load(checkpoint)
            adapter = None if checkpoint is None else checkpoint.path
            requests = [self._build(request, i, adapter) for i in range(request.num_samples)]
            outputs = await self.backend.generate(requests)
        return encode_samples(request, outputs)

    def _build(self, request: SampleRequest, index: int, adapter: str | None) -> GenerationRequest:
        params = request.params
        changes: dict[str, Any] = {"seed": derive_seed(params.seed, index)}
        if index:  # the prompt is scored once
            changes |= {"prompt_logprobs": None, "prompt_start": 1}
        return GenerationRequest(request.prompt, SamplingParams(**{**params.__dict__, **changes}), adapter=adapter)

    @contextmanager
    def _hold(self, checkpoint: AdapterCheckpoint | None) -> Iterator[None]:
        """Keep an adapter loaded while it is used."""
        if checkpoint is None:
            yield
            return
        self.in_use[checkpoint.path] = self.in_use.get(checkpoint.path, 0) + 1
        try:
            yield
        finally:
            self.in_use[checkpoint.path] -= 1
            if not self.in_use[checkpoint.path]:
                del self.in_use[checkpoint.path]

    async def _load(self, checkpoint: AdapterCheckpoint) -> None:
        async with self._loading:
            path = checkpoint.path
            if path in self._loaded:
                self._loaded.move_to_end(path)
                return
            loading = asyncio.create_task(self._start_loading(checkpoint))
            try:
                await asyncio.shield(loading)
            except asyncio.CancelledError:
                await asyncio.wait([loading])
                raise
            idle = [name for name in self._loaded if name not in self.in_use]
            for name in idle[: max(len(self._loaded) - self.max_adapters, 0)]:
                await self.unload(name)

    async def _start_loading(self, checkpoint: AdapterCheckpoint) -> None:
        """Load an adapter and count it, even if the sample that needs it is canceled: a backend completes a load."""
        await self.backend.load_adapter(checkpoint)
        self._loaded[checkpoint.path] = None

    async def unload(self, path: str) -> None:
        """Unload an adapter, if it is loaded."""
        if path in self._loaded:
            del self._loaded[path]
            await self.backend.remove_adapter(path)
