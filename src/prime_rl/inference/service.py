"""Server state shared by all routes (engine, tokenizer, weights) and its construction."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Protocol, TypeVar

import orjson
from loguru import logger

from prime_rl.configuration.sections import BASE_MODEL
from prime_rl.inference.access import build_hosts, read_server_key
from prime_rl.inference.adapters import NEXT_POLICY, POLICY, build_spec
from prime_rl.inference.async_engine import AsyncEngine
from prime_rl.inference.config import InferenceConfig
from prime_rl.inference.detokenizer import Decode, TokenNames, build_decode
from prime_rl.inference.encoding import Encoder, PromptCache
from prime_rl.inference.engine import AdapterSpec, ComputeDigests, EngineUnavailable, GenerationEngine, derive_seed
from prime_rl.inference.intake import Workers
from prime_rl.inference.request_parsing import ApiError, Json, check_token_ids, parse_chat, with_defaults
from prime_rl.inference.responses import Writer
from prime_rl.inference.tool_parser import MessageParser
from prime_rl.inference.weight_receiver import NO_TRAINER
from prime_rl.runtime.hang_watchdog import WaitStatus
from prime_rl.runtime.tokenizer import load_tokenizer, resolve_model_dir
from prime_rl.transport.broadcast import Broadcast, BroadcastFailed, ReceivedWeights
from prime_rl.utils.monitor import Monitor, build_monitor
from rollouts.training.datasets.chat import NO_TEMPLATE, render_pieces

T = TypeVar("T")


class WeightSource(Protocol):
    """Reads weights in the engine's format; called outside the engine thread."""

    def read_base(self) -> tuple[Any, int]:
        """Read the initial weights."""

    def read_step(self, directory: Path) -> tuple[Any, int]:
        """Read a published directory; `ValueError` if verification fails."""

    def read_adapter(self, directory: Path, version: int | None = None) -> tuple[Any, AdapterSpec]:
        """Read an adapter directory; see `read_adapter`."""

    def find_other_base(self, directory: Path, held: Path | None) -> Path | None:
        """The base model of an adapter if it is not the model in the engine; else None.

        They differ only if the served model is itself an adapter, merged into its base model. `held`: the base model
        that replaced it.
        """

    def read_model(self, directory: Path) -> Any:
        """Read the weights of a model directory."""

    def receive_step(self, broadcast: Broadcast, step: int) -> ReceivedWeights:
        """Receive weights from the trainer; see `receive_weights`."""


@dataclass
class ServerState:
    """State shared by all routes."""

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
    """Address of the sending trainer, set by /init_broadcaster."""
    workers: Workers = field(default_factory=Workers)
    _has_policy: bool = False
    _base: Path | None = None
    """The base model that replaced the served model, for an adapter of it; see `WeightSource.find_other_base`."""
    _updating: asyncio.Lock = field(default_factory=asyncio.Lock)
    _seeds: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.hosts = build_hosts(self.config.server)
        self.encoder = Encoder(self.tokenizer, self.max_model_len)
        self.added_tokens: dict[str, int] = self.tokenizer.get_added_vocab()
        self._rendered = PromptCache()

    @property
    def max_model_len(self) -> int:
        """Maximum length of prompt and completion, in tokens."""
        return self.engine.engine.max_model_len

    @property
    def version(self) -> int:
        """Policy version of the weights in service."""
        spec = self.engine.engine.adapters().get(POLICY) if self._has_policy else None
        return self.engine.engine.version if spec is None else spec.version

    def named_adapters(self) -> dict[str, AdapterSpec]:
        """Adapters that requests can select as their model."""
        reserved = (POLICY, NEXT_POLICY)
        return {name: spec for name, spec in self.engine.engine.adapters().items() if name not in reserved}

    def describe_wait(self) -> WaitStatus:
        """Summarize the current activity for hang diagnostics."""
        stats = self.engine.engine.stats()
        queues = {"running": stats.running, "waiting": stats.waiting, "open requests": self.engine.num_requests}
        if self.engine.error is not None:
            return WaitStatus(f"has failed: {self.engine.error}", None, None, queues)
        if self.engine.engine.problem is not None:
            return WaitStatus(f"is stalled: {self.engine.engine.problem}", None, None, queues)
        if self._updating.locked():
            return WaitStatus("loads weights", None, None, queues)
        if self.awaits_weights:
            return WaitStatus("waits for its first weight update", "orchestrator", None, queues)
        if self.engine.paused:
            return WaitStatus("is paused until POST /resume", None, None, queues)
        if self.engine.num_requests:
            return WaitStatus(f"has {stats.running} running and {stats.waiting} queued requests", None, None, queues)
        return WaitStatus("is idle", "orchestrator", None, queues)

    def next_seed(self) -> int:
        """Seed for a request without one."""
        return derive_seed(self.config.seed, 1 + next(self._seeds))

    def find_adapter(self, body: Json) -> str | None:
        """Adapter of a request, None for the base model; 404 for a model that is not served."""
        name = body.get("model")
        if name == BASE_MODEL:
            return None
        if name is None or name in self.names:
            return POLICY if self._has_policy else None
        adapters = self.named_adapters()
        if isinstance(name, str) and name in adapters:
            return name
        served = ", ".join(map(repr, [self.names[0], *adapters]))
        raise ApiError(f"model {name!r} is not served; available: {served}", status=404, param="model")

    def opens_reasoning(self, prompt: list[int]) -> bool:
        """`MessageParser.opens` with the tokenizer of this server."""
        return self.writer.parser.opens(prompt, lambda tail: self.writer.decode(tail, False))

    def check_prompt(self, ids: Any, name: str) -> list[int]:
        """Validate the token ids of field `name`."""
        return check_token_ids(ids, self.vocab, name, self.max_model_len)

    def render(self, body: Json, max_len: int | None = None) -> list[int]:
        """Render a chat to token ids; cached for the day, since templates may write the date, so that the requests of
        a group share one rendering. Thread-safe.

        `ApiError` for one that certainly exceeds `max_len` (default `max_model_len`) tokens.
        """
        max_len = max_len or self.max_model_len
        options = parse_chat(with_defaults(body, self.defaults, chat=True), max_len)
        try:
            key = hashlib.blake2b(orjson.dumps((date.today(), options)), digest_size=16).digest()
            tokens = self._rendered.get(key)
            if tokens is None:
                tokens = self._render_new(max_len, *options)
                self._rendered.put(key, tokens)
            return list(tokens)
        except (ValueError, TypeError) as error:
            raise ApiError(str(error), param="messages") from error

    def _render_new(
        self,
        max_len: int,
        messages: list[Json],
        tools: list[Json] | None,
        add_generation_prompt: bool,
        template_options: Json,
    ) -> list[int]:
        chat = render_pieces(self.tokenizer, messages, tools, add_generation_prompt, **template_options)
        return self.encoder.encode_chat(chat, max_len)

    async def load(self, read: Callable[[], tuple[Json, int]]) -> Json:
        """Read weights while the engine runs, then swap them in between two steps."""

        return await self._update(read, lambda engine, found: self._swap_model(engine, *found))

    async def load_policy_adapter(self, directory: Path) -> Json:
        """Serve the base model with this adapter as the policy."""

        def read() -> tuple[Any, AdapterSpec, Path | None, Any]:
            weights, spec = self.weights.read_adapter(directory)
            base = self.weights.find_other_base(directory, self._base)
            return weights, spec, base, None if base is None else self.weights.read_model(base)

        return await self._update(read, lambda engine, found: self._swap_adapter(engine, *found))

    async def load_broadcast(self, step: int) -> Json:
        """Receive version `step` (a model or an adapter) from the trainer and swap it in."""
        broadcast = self.broadcast
        if broadcast is None:
            raise ApiError(NO_TRAINER, 409, "weight_dir")

        def swap(engine: GenerationEngine, found: ReceivedWeights) -> tuple[int, ComputeDigests]:
            if found.adapter_config is None:
                return self._swap_model(engine, found.tensors, step)
            return self._swap_adapter(engine, found.tensors, build_spec(found.adapter_config, step, "the trainer"))

        return await self._update(lambda: self.weights.receive_step(broadcast, step), swap)

    def _swap_model(self, engine: GenerationEngine, weights: Any, version: int) -> tuple[int, ComputeDigests]:
        compute_digests = engine.load_weights(weights, version)
        self._base = None
        if self._has_policy:
            self.engine.deliver(engine.remove_adapter(POLICY))
            self._has_policy = False
        return version, compute_digests

    def _swap_adapter(
        self,
        engine: GenerationEngine,
        weights: Any,
        spec: AdapterSpec,
        base: Path | None = None,
        base_weights: Any = None,
    ) -> tuple[int, ComputeDigests]:
        self._check_rank(spec)
        if base is not None:  # nothing changes unless both fit
            engine.load_adapter(NEXT_POLICY, weights, spec)
            try:
                engine.load_weights(base_weights, spec.version)
            finally:
                engine.remove_adapter(NEXT_POLICY)
            self._base = base
        digests = engine.load_adapter(POLICY, weights, spec)
        self._has_policy = True
        return spec.version, lambda: digests

    async def load_adapter(self, name: str, directory: Path) -> Json:
        """Serve an adapter alongside the model; replaces one of the same name."""
        if name in (POLICY, NEXT_POLICY, BASE_MODEL):
            raise ApiError(f"lora_name {name!r} is reserved: choose another", param="lora_name")

        def read() -> tuple[Any, AdapterSpec]:
            weights, spec = self.weights.read_adapter(directory, self.version)
            if (base := self.weights.find_other_base(directory, self._base)) is not None:
                raise ValueError(
                    f"{directory} is an adapter of {base}, but the model of this server is another adapter, merged "
                    f"into its base model: start the server with --model.name {base}"
                )
            return weights, spec

        async with self._updating:
            try:
                weights, spec = await asyncio.to_thread(read)
                self._check_rank(spec)
                digests = await self.engine.call(lambda engine: engine.load_adapter(name, weights, spec))
            except (ValueError, OSError) as error:
                raise ApiError(str(error), param="lora_path") from error
        logger.info(f"Loaded adapter {name} from {directory}")
        return {"status": "ok", "lora_name": name, "version": spec.version, "digests": digests}

    def _check_rank(self, spec: AdapterSpec) -> None:
        max_rank = self.config.max_lora_rank
        if max_rank is not None and spec.rank > max_rank:
            raise ValueError(f"adapter rank {spec.rank} exceeds max_lora_rank = {max_rank}")

    async def remove_adapter(self, name: str) -> Json:
        """Unload an adapter; its requests are aborted."""
        if name not in self.named_adapters():
            raise ApiError(f"no adapter {name!r} is loaded", status=404, param="lora_name")
        await self.engine.remove_adapter(name)
        return {"status": "ok", "lora_name": name}

    async def _update(
        self, read: Callable[[], T], swap: Callable[[GenerationEngine, T], tuple[int, ComputeDigests]]
    ) -> Json:
        async with self._updating:
            start = time.time()
            try:
                found = await asyncio.to_thread(read)
                paused, (version, compute_digests), resumed = await self.engine.call(
                    lambda engine: (time.time(), swap(engine, found), time.time())
                )
            except (ValueError, OSError) as error:
                logger.warning(f"Weight update failed, version {self.version} stays in service: {error}")
                status = 503 if isinstance(error, BroadcastFailed | EngineUnavailable) else 400
                raise ApiError(str(error), status, "weight_dir") from error
            self.num_updates += 1
            self.awaits_weights = False
            digests = await asyncio.to_thread(compute_digests)
            total_s, paused_s = time.time() - start, resumed - paused
            logger.info(f"Loaded weights version={version} in {total_s:.2f} s, paused {paused_s:.3f} s")
            if self.monitor is not None:
                self.monitor.log_timeline("update_weights", paused, resumed, version)
                self.monitor.log(self._metrics(total_s, paused_s), version)
            return {"status": "ok", "version": version, "digests": digests} | self.numerics

    @property
    def numerics(self) -> Json:
        """How log-probs are computed, on which their comparison with the trainer's depends."""
        engine = self.engine.engine
        dtype = getattr(engine, "quantization", None) or str(getattr(engine, "dtype", "")).removeprefix("torch.")
        arithmetic = getattr(engine, "arithmetic", "")
        return {"exact": bool(getattr(engine, "exact", False)), "dtype": dtype} | (
            {"arithmetic": arithmetic} if arithmetic else {}
        )

    def _metrics(self, total_s: float, paused_s: float) -> dict[str, float]:
        stats = self.engine.engine.stats()
        return {
            "time/update_weights": total_s,
            "time/update_weights_pause": paused_s,
            "inference/prompt_tokens": stats.prompt_tokens,
            "inference/generated_tokens": stats.generated_tokens,
            "inference/requests_finished": stats.finished,
        }


def build_service(config: InferenceConfig) -> ServerState:
    """Load tokenizer and model; `ValueError` for an invalid config."""

    api_key = read_server_key(config.server)
    model_dir = resolve_model_dir(config.model.name, config.model.trust_remote_code)
    tokenizer = load_tokenizer(config.model.name, trust_remote_code=config.model.trust_remote_code)
    if not tokenizer.chat_template:
        logger.warning(f"Only /completions can be used: {NO_TEMPLATE}")
    parser = MessageParser(config.model.tool_call_parser, config.model.reasoning_parser is not None)
    decode = build_decode(tokenizer, parser.tags)
    engine, weights = build_engine(config, model_dir, tokenizer, decode)
    monitor = None if config.output_dir is None else build_monitor(config.output_dir, config.name, must_write=False)
    return ServerState(
        config=config,
        engine=AsyncEngine(engine, monitor, config.max_batch_size + config.server.max_queued_requests),
        tokenizer=tokenizer,
        weights=weights,
        writer=Writer(config.served_name, decode, TokenNames(tokenizer), parser),
        vocab=engine.vocab_size,
        names=tuple(dict.fromkeys((config.served_name, config.model.name, str(model_dir)))),
        monitor=monitor,
        api_key=api_key,
        defaults=sampling_defaults(config),
        awaits_weights=config.server.wait_for_weights,
    )


def build_engine(
    config: InferenceConfig, model_dir: Path, tokenizer: Any, decode: Decode
) -> tuple[GenerationEngine, WeightSource]:
    """Build the engine and its weight source. Only the embedded one imports torch and the model."""
    if config.backend == "sglang":
        from prime_rl.inference.sglang.loading import build_gateway

        return build_gateway(config, model_dir, decode)
    from prime_rl.inference.embedded import loading

    engine = loading.build_engine(config, model_dir, decode, tokenizer)
    return engine, loading.WeightReader(config, model_dir, engine)


def sampling_defaults(config: InferenceConfig) -> Json:
    """`inference.sampling` as default request fields."""
    given = config.sampling.model_dump(exclude_defaults=True)
    extra = given.pop("extra_body", {})
    return {name: value for name, value in {**given, **extra}.items() if value is not None}
