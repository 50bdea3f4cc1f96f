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
from typing import Any, Protocol

import orjson
from loguru import logger

from prime_rl.inference.async_engine import AsyncEngine
from prime_rl.inference.config import InferenceConfig
from prime_rl.inference.embedded.loading import WeightReader, build_engine
from prime_rl.inference.engine import derive_seed
from prime_rl.inference.requests import ApiError, Json
from prime_rl.inference.responses import Writer
from prime_rl.inference.text import TokenNames, build_decode
from prime_rl.utils.monitor import Monitor, build_monitor
from prime_rl.utils.tokenizer import load_tokenizer, render_chat, resolve_model_dir

CACHED_PROMPTS = 4096


class WeightSource(Protocol):
    """Where weights come from; both are called outside the engine's thread."""

    def read_base(self) -> tuple[dict[str, Any], int]:
        """The weights of the start."""

    def read_step(self, directory: Path) -> tuple[dict[str, Any], int]:
        """Those of a published directory; `ValueError` when they cannot be trusted."""


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
        return self.engine.engine.version

    def next_seed(self) -> int:
        """The seed of a request that brings none."""
        return derive_seed(self.config.seed, 1 + next(self._seeds))

    def check_model(self, body: Json) -> None:
        """404 for a model that is not served here."""
        name = body.get("model")
        if name is not None and name not in self.names:
            raise ApiError(f"model {name!r} is not served here, only {self.names[0]!r}", status=404, param="model")

    def render(self, body: Json) -> list[int]:
        """The token ids of a chat; the requests of a group share one rendering."""
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
            raise ApiError("messages must be a non-empty list of messages", param="messages")
        asked = body.get("add_generation_prompt")
        tools = None if body.get("tool_choice") == "none" else body.get("tools")
        options = [messages, tools, asked is None or asked, body.get("chat_template_kwargs") or {}]
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
        async with self._updating:
            start = time.time()
            try:
                tensors, version = await asyncio.to_thread(read)
                paused = time.time()
                digests = await self.engine.call(lambda engine: engine.load_weights(tensors, version))
            except (ValueError, OSError) as error:
                logger.warning(f"weights not loaded, version {self.version} stays in service: {error}")
                raise ApiError(str(error), param="weight_dir") from error
            end = time.time()
            logger.info(f"version {version} in service after {end - start:.2f} s, paused for {end - paused:.3f} s")
            if self.monitor is not None:
                self.monitor.log_timeline("update_weights", paused, end, version)
                self.monitor.log(self._metrics(end - start, end - paused), version)
            return {"status": "ok", "version": version, "digests": digests}

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
    engine = build_engine(config, model_dir, decode)
    monitor = None if config.output_dir is None else build_monitor(config.output_dir, "inference")
    return Service(
        config=config,
        engine=AsyncEngine(engine, monitor),
        tokenizer=tokenizer,
        weights=WeightReader(config, model_dir),
        writer=Writer(config.model.name, decode, TokenNames(tokenizer)),
        vocab=engine.vocab_size,
        names=(config.model.name, str(model_dir)),
        monitor=monitor,
        api_key=api_key,
    )


def _read_key(config: InferenceConfig) -> str | None:
    variable = config.server.api_key_var
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ValueError(f"server.api_key_var names {variable}, which is not set: export it or leave the key out")
    return key
