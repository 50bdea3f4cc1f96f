"""Configuration of the `serve` command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from prime_rl.configuration.sections import DebugModelConfig, LogConfig
from prime_rl.utils.pydantic_config import BaseConfig


class ServedModelConfig(BaseConfig):
    """The base model; it is frozen, clients train LoRA adapters."""

    name: str = "Qwen/Qwen3-0.6B"
    """A Hugging Face model directory, a bundled model (tiny-qwen3), a known name (smollm2) or a hub id."""

    served_names: list[str] = []
    """Further names that clients may give as base_model, such as the name that a recipe expects."""

    max_model_len: int | None = Field(default=None, ge=2)
    """Maximum context length in tokens; unset: the model's maximum."""

    debug: DebugModelConfig = DebugModelConfig()


class LimitsConfig(BaseConfig):
    """Limits of clients."""

    max_request_mb: float = Field(default=64.0, gt=0)
    """Maximum request body in megabytes; larger ones get HTTP 413 before they are read."""

    read_timeout: float = Field(default=20.0, gt=0)
    """Timeout in seconds for reading a request (extended while it arrives at 64 KB/s)."""

    max_models: int = Field(default=1024, ge=1)
    """Maximum number of models in training; more are refused until one is unloaded or its session ends."""

    max_sessions: int = Field(default=4096, ge=1)
    """Maximum number of open sessions."""

    max_pending: int = Field(default=16384, ge=1)
    """Maximum number of unfinished requests; further ones get HTTP 429, and clients repeat them."""

    max_pending_mb: float = Field(default=1024.0, gt=0)
    """Maximum total size of unfinished requests in megabytes; further ones get HTTP 429."""

    max_results_mb: float = Field(default=1024.0, gt=0)
    """Maximum total size of kept results in megabytes, on disk; then fetched ones are deleted, then the oldest."""

    max_rank: int = Field(default=256, ge=1)
    """Maximum LoRA rank."""

    session_timeout: float = Field(default=900.0, gt=0)
    """Seconds without a request or heartbeat after which a session ends; its models are unloaded."""


class SamplingServerConfig(BaseConfig):
    """An inference server that samples instead of this process."""

    url: str | None = None
    """Address, such as http://127.0.0.1:8000, of `inference` with vLLM or the embedded engine; unset: sample in this
    process. It needs the same model, `max_lora_rank`, and this `output_dir` in its `weight_dirs`."""

    api_key_var: str | None = None
    """Environment variable with its API key."""

    timeout: float = Field(default=1200.0, gt=0)
    """Timeout in seconds of a sample."""

    reconnect_timeout: float = Field(default=300.0, ge=0)
    """Seconds to repeat a sample while the server is unreachable, full or not ready (it may be restarting)."""


class ServeConfig(BaseConfig):
    """A server that trains and samples, for the `tinker` client."""

    main_keys: ClassVar[Sequence[str]] = """
        model.name model.served_names model.max_model_len host port output_dir micro_batch_tokens max_loaded_adapters
        log.level
    """.split()

    name: str = "serve"
    """Server name in logs."""

    model: ServedModelConfig = ServedModelConfig()

    host: str = "127.0.0.1"
    """Listen address; other machines can connect only if it is changed: every key is accepted, a key separates
    tenants but does not keep anyone out."""

    port: int = Field(default=8010, ge=1, le=65535)
    """Listen port: clients set TINKER_BASE_URL=http://127.0.0.1:PORT."""

    output_dir: Path = Path("outputs/serve")
    """Directory of checkpoints, logs and the request log; a restarted server continues from it."""

    micro_batch_tokens: int = Field(default=4096, ge=1)
    """Maximum tokens of a forward and backward pass; a longer datum has a pass of its own."""

    max_batch_size: int = Field(default=256, ge=1)
    """Maximum number of concurrently sampled sequences; further ones are queued."""

    max_loaded_adapters: int = Field(default=32, ge=1)
    """Maximum number of adapters kept in memory for sampling; others are read again from disk when they are used."""

    max_trained_adapters: int = Field(default=32, ge=1)
    """Maximum number of models in training kept in memory; the state of idle ones is read again when they are used."""

    snapshot_interval: float = Field(default=30.0, ge=0)
    """Seconds of a model's computation after which its state is saved; a restart computes again what came later."""

    metrics_interval: float = Field(default=10.0, gt=0)
    """Seconds between two rows of metrics.jsonl, which `monitor` shows; an idle server writes none."""

    limits: LimitsConfig = LimitsConfig()

    sampling: SamplingServerConfig = SamplingServerConfig()

    seed: int = Field(default=0, ge=0)
    """Base seed for samples without a seed and adapters without a seed."""

    log: LogConfig = LogConfig()
