"""What the routes of the server share: engine, tokenizer, weights, and how they are built."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

import orjson
from loguru import logger

from prime_rl.inference.adapters import POLICY, build_spec
from prime_rl.inference.async_engine import AsyncEngine
from prime_rl.inference.broadcasting import NO_TRAINER
from prime_rl.inference.config import InferenceConfig
from prime_rl.inference.engine import AdapterSpec, Engine, EngineAway, derive_seed
from prime_rl.inference.messages import THINK_OPEN, MessageParser
from prime_rl.inference.requests import ApiError, Json, parse_tools
from prime_rl.inference.responses import Writer
from prime_rl.inference.text import Decode, TokenNames, build_decode
from prime_rl.transport.broadcast import Broadcast, BroadcastFailed, Received
from prime_rl.utils.config import BASE_MODEL
from prime_rl.utils.hang import Wait
from prime_rl.utils.monitor import Monitor, build_monitor
from prime_rl.utils.tokenizer import load_tokenizer, render_chat, resolve_model_dir

T = TypeVar("T")
CACHED_PROMPTS = 4096
THINK_TAIL = 8  # tokens at the end of a prompt that hold an opening tag, if there is one


class WeightSource(Protocol):
    """Where weights come from, in the form that the engine takes; called outside the engine's thread."""

    def read_base(self) -> tuple[Any, int]:
        """The weights of the start."""

    def read_step(self, directory: Path) -> tuple[Any, int]:
        """Those of a published directory; `ValueError` when they cannot be trusted."""

    def read_adapter(self, directory: Path, version: int | None = None) -> tuple[Any, AdapterSpec]:
        """An adapter of a directory; see `read_adapter`."""

    def receive_step(self, broadcast: Broadcast, step: int) -> Received:
        """Those that a trainer sends; see `receive_weights`."""


@dataclass
class Service:
    """What the routes share."""

    config: InferenceConfig
    engine: AsyncEngine
    tokenizer: Any
    weights: WeightSource
    writer: Writer
    vocab: int
    names: tuple[str, ...]
    monitor: Monitor | None = None
    api_key: str | None = None
    defaults: Json = field(default_factory=dict)
    started: int = field(default_factory=lambda: int(time.time()))
    num_updates: int = 0
    awaits_weights: bool = False
    broadcast: Broadcast | None = None
    """Where a trainer sends weights from, once /init_broadcaster has told it."""
    _has_policy: bool = False
    _updating: asyncio.Lock = field(default_factory=asyncio.Lock)
    _seeds: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self._render = lru_cache(maxsize=CACHED_PROMPTS)(self._render_new)

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and completion."""
        return self.engine.engine.max_model_len

    @property
    def version(self) -> int:
        """The policy version that is served."""
        spec = self.engine.engine.adapters().get(POLICY) if self._has_policy else None
        return self.engine.engine.version if spec is None else spec.version

    def named_adapters(self) -> dict[str, AdapterSpec]:
        """Adapters that requests may name as their model."""
        return {name: spec for name, spec in self.engine.engine.adapters().items() if name != POLICY}

    def describe_wait(self) -> Wait:
        """What the server does, for whoever asks why nothing moves."""
        stats = self.engine.engine.stats()
        queues = {"running": stats.running, "waiting": stats.waiting, "open requests": self.engine.num_requests}
        if self.engine.error is not None:
            return Wait(f"has failed: {self.engine.error}", None, None, queues)
        if self.engine.engine.problem is not None:
            return Wait(f"draws nothing: {self.engine.engine.problem}", None, None, queues)
        if self.awaits_weights:
            return Wait("waits to be told its weights", "orchestrator", None, queues)
        if self.engine.paused:
            return Wait("is paused: POST /resume lets it go on", None, None, queues)
        if self.engine.num_requests:
            return Wait(f"works on {stats.running} requests, {stats.waiting} wait for a place", None, None, queues)
        return Wait("has no request to work on", "orchestrator", None, queues)

    def next_seed(self) -> int:
        """The seed of a request that brings none."""
        return derive_seed(self.config.seed, 1 + next(self._seeds))

    def find_adapter(self, body: Json) -> str | None:
        """The adapter that answers a request, None for the plain model; 404 for a model that is not served here."""
        name = body.get("model")
        if name == BASE_MODEL:
            return None
        if name is None or name in self.names:
            return POLICY if self._has_policy else None
        adapters = self.named_adapters()
        if isinstance(name, str) and name in adapters:
            return name
        served = ", ".join(map(repr, [self.names[0], *adapters]))
        raise ApiError(f"model {name!r} is not served here, only {served}", status=404, param="model")

    def opens_reasoning(self, prompt: list[int]) -> bool:
        """Whether the prompt ends with an opening tag, as some chat templates make it."""
        if not self.writer.parser.reasoning:
            return False
        return self.writer.decode(prompt[-THINK_TAIL:], False).rstrip().endswith(THINK_OPEN)

    def render(self, body: Json) -> list[int]:
        """The token ids of a chat; the requests of a group share one rendering."""
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
            raise ApiError("messages must be a non-empty list of messages", param="messages")
        asked, more = body.get("add_generation_prompt"), body.get("chat_template_kwargs") or {}
        if not isinstance(more, dict):
            raise ApiError("chat_template_kwargs must be an object", param="chat_template_kwargs")
        options = [messages, parse_tools(body), asked is None or asked, more]
        try:
            return list(self._render(orjson.dumps(options)))
        except (ValueError, TypeError) as error:
            raise ApiError(str(error), param="messages") from error

    def _render_new(self, options: bytes) -> tuple[int, ...]:
        messages, tools, add_generation_prompt, template_options = orjson.loads(options)
        return tuple(render_chat(self.tokenizer, messages, tools, add_generation_prompt, **template_options))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of plain text."""
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    async def load(self, read: Callable[[], tuple[Json, int]]) -> Json:
        """Read weights beside the running engine, then swap them in between two of its steps."""

        return await self._update(read, lambda engine, found: self._swap_model(engine, *found))

    async def load_policy_adapter(self, directory: Path) -> Json:
        """The model with this adapter becomes the policy."""
        return await self._update(
            lambda: self.weights.read_adapter(directory), lambda engine, found: self._swap_adapter(engine, *found)
        )

    async def load_broadcast(self, step: int) -> Json:
        """Receive version `step` from the trainer, a model or an adapter, and swap it in as one from a directory."""
        broadcast = self.broadcast
        if broadcast is None:
            raise ApiError(NO_TRAINER, 409, "weight_dir")

        def swap(engine: Engine, found: Received) -> tuple[int, Json]:
            if found.adapter_config is None:
                return self._swap_model(engine, found.tensors, step)
            return self._swap_adapter(engine, found.tensors, build_spec(found.adapter_config, step, "the trainer"))

        return await self._update(lambda: self.weights.receive_step(broadcast, step), swap)

    def _swap_model(self, engine: Engine, weights: Any, version: int) -> tuple[int, Json]:
        digests = engine.load_weights(weights, version)
        if self._has_policy:
            engine.remove_adapter(POLICY)
            self._has_policy = False
        return version, digests

    def _swap_adapter(self, engine: Engine, weights: Any, spec: AdapterSpec) -> tuple[int, Json]:
        self._check_rank(spec)
        digests = engine.load_adapter(POLICY, weights, spec)
        self._has_policy = True
        return spec.version, digests

    async def load_adapter(self, name: str, directory: Path) -> Json:
        """Serve an adapter beside the model; one of the same name is replaced."""
        if name in (POLICY, BASE_MODEL):
            raise ApiError(f"lora_name {name!r} is taken: choose another", param="lora_name")
        async with self._updating:
            try:
                weights, spec = await asyncio.to_thread(self.weights.read_adapter, directory, self.version)
                self._check_rank(spec)
                digests = await self.engine.call(lambda engine: engine.load_adapter(name, weights, spec))
            except (ValueError, OSError) as error:
                raise ApiError(str(error), param="lora_path") from error
        logger.info(f"adapter {name} of {directory} in service")
        return {"status": "ok", "lora_name": name, "version": spec.version, "digests": digests}

    def _check_rank(self, spec: AdapterSpec) -> None:
        most = self.config.max_lora_rank
        if most is not None and spec.rank > most:
            raise ValueError(f"the adapter has rank {spec.rank}, max_lora_rank = {most}")

    async def remove_adapter(self, name: str) -> Json:
        """Stop serving an adapter; its requests end as aborted."""
        if name not in self.named_adapters():
            raise ApiError(f"no adapter {name!r} is loaded", status=404, param="lora_name")
        await self.engine.call(lambda engine: engine.remove_adapter(name))
        return {"status": "ok", "lora_name": name}

    async def _update(self, read: Callable[[], T], swap: Callable[[Engine, T], tuple[int, Json]]) -> Json:
        async with self._updating:
            start = time.time()
            try:
                found = await asyncio.to_thread(read)
                paused = time.time()
                version, digests = await self.engine.call(lambda engine: swap(engine, found))
            except (ValueError, OSError) as error:
                logger.warning(f"weights not loaded, version {self.version} stays in service: {error}")
                status = 503 if isinstance(error, BroadcastFailed | EngineAway) else 400
                raise ApiError(str(error), status, "weight_dir") from error
            end = time.time()
            self.num_updates += 1
            self.awaits_weights = False
            logger.info(f"version {version} in service after {end - start:.2f} s, paused for {end - paused:.3f} s")
            if self.monitor is not None:
                self.monitor.log_timeline("update_weights", paused, end, version)
                self.monitor.log(self._metrics(end - start, end - paused), version)
            exact = bool(getattr(self.engine.engine, "exact", False))
            dtype = str(getattr(self.engine.engine, "dtype", "")).removeprefix("torch.")
            return {"status": "ok", "version": version, "digests": digests, "exact": exact, "dtype": dtype}

    def _metrics(self, total_s: float, paused_s: float) -> dict[str, float]:
        stats = self.engine.engine.stats()
        return {
            "time/update_weights": total_s,
            "time/update_weights_pause": paused_s,
            "inference/prompt_tokens": stats.prompt_tokens,
            "inference/generated_tokens": stats.generated_tokens,
            "inference/finished": stats.finished,
        }


def build_service(config: InferenceConfig) -> Service:
    """Load tokenizer and model; `ValueError` names what is wrong with the config."""

    api_key = _read_key(config)
    model_dir = resolve_model_dir(config.model.name)
    tokenizer = load_tokenizer(config.model.name, trust_remote_code=config.model.trust_remote_code)
    decode = build_decode(tokenizer)
    engine, weights = build_engine(config, model_dir, decode)
    parser = MessageParser(config.model.tool_call_parser, config.model.reasoning_parser is not None)
    monitor = None if config.output_dir is None else build_monitor(config.output_dir, config.name)
    return Service(
        config=config,
        engine=AsyncEngine(engine, monitor, config.max_batch_size + config.server.max_waiting),
        tokenizer=tokenizer,
        weights=weights,
        writer=Writer(config.model.name, decode, TokenNames(tokenizer), parser),
        vocab=engine.vocab_size,
        names=(config.model.name, str(model_dir)),
        monitor=monitor,
        api_key=api_key,
        defaults=sampling_defaults(config),
        awaits_weights=config.server.await_weights,
    )


def build_engine(config: InferenceConfig, model_dir: Path, decode: Decode) -> tuple[Engine, WeightSource]:
    """What draws tokens, and where its weights come from. Only the embedded one imports torch and the model."""
    if config.backend == "sglang":
        from prime_rl.inference.sglang.loading import build_gateway

        return build_gateway(config, model_dir, decode)
    from prime_rl.inference.embedded import loading

    return loading.build_engine(config, model_dir, decode), loading.WeightReader(config, model_dir)


def sampling_defaults(config: InferenceConfig) -> Json:
    """What `inference.sampling` says about requests, as their fields."""
    given = config.sampling.model_dump(exclude_defaults=True)
    extra = given.pop("extra_body", {})
    return {name: value for name, value in {**given, **extra}.items() if value is not None}


def _read_key(config: InferenceConfig) -> str | None:
    variable = config.server.api_key_var
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ValueError(f"server.api_key_var names {variable}, which is not set: export it or leave the key out")
    return key
