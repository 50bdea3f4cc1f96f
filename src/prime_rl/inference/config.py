"""Configuration of the inference server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from prime_rl.utils.config import DebugModelConfig, LogConfig, SamplingConfig, WeightBroadcastConfig
from prime_rl.utils.pydantic_config import BaseConfig

__all__ = [
    "CacheConfig",
    "InferenceConfig",
    "ModelConfig",
    "ParallelConfig",
    "SGLangConfig",
    "SamplingConfig",
    "ServerConfig",
]


class ServerConfig(BaseConfig):
    """Where the server listens and who may talk to it."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 lets other machines in (set api_key_var then)."""

    port: int = Field(default=8000, ge=1, le=65535)
    """Port to listen on."""

    api_key_var: str | None = None
    """Environment variable that holds a key; every request must then carry it as a bearer token.

    Without one, routes that change the server answer this machine only."""

    max_waiting: int = Field(default=16384, ge=0)
    """Requests that may wait for a place; one more is answered 429 with Retry-After."""

    max_request_mb: float = Field(default=64.0, gt=0)
    """Largest body of a request in megabytes; a larger one is answered 413 before it is read."""

    await_weights: bool = False
    """Answer no request until weights are loaded by a control route: a server that was started again must not speak
    for weights that the others have left behind."""

    drain_timeout: float = Field(default=3.0, ge=0)
    """Seconds that running requests get to finish when the server is told to stop."""


class ModelConfig(BaseConfig):
    """The model that is served."""

    name: str = "Qwen/Qwen3-0.6B"
    """A Hugging Face directory, a shipped model (tiny-qwen3) or a hub id."""

    trust_remote_code: bool = False
    """Allow the tokenizer's repository to bring its own code."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of weights and cache; auto: bfloat16 on a GPU, else float32."""

    device: str = "auto"
    """Where to compute, such as cpu or cuda:0; auto: a GPU when there is one."""

    max_model_len: int | None = Field(default=None, ge=2)
    """Most tokens of prompt and completion together; unset: what the model was made for."""

    tool_call_parser: Literal["hermes", "llama"] = "hermes"
    """How the model writes tool calls: hermes in <tool_call> tags (Qwen, Hermes), llama as bare JSON."""

    reasoning_parser: Literal["think"] | None = None
    """think: text between <think> tags is told as reasoning_content; unset: it stays part of the content."""

    debug: DebugModelConfig = DebugModelConfig()


class ParallelConfig(BaseConfig):
    """Devices that share the work; more than one needs the vllm backend."""

    tp: int = Field(default=1, ge=1)
    """Devices that share one copy of the model."""

    dp: int = Field(default=1, ge=1)
    """Copies of the model."""


class CacheConfig(BaseConfig):
    """Keys and values that the embedded engine keeps."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of running requests, at least one of max_model_len; beyond it the youngest request waits and is
    computed anew. Unset: a share of the memory that is free."""

    max_kept_tokens: int | None = Field(default=None, ge=0)
    """Most tokens of ended requests that are kept for those that begin alike; unset: a quarter of max_tokens."""

    share_prefixes: bool = True
    """Compute what requests have in common at their beginning once."""


class SGLangConfig(BaseConfig):
    """An SGLang server that runs already, for backend = "sglang"; it must see the directories of weights."""

    base_url: str | None = None
    """Its address, such as http://127.0.0.1:30000."""

    api_key_var: str | None = None
    """Environment variable that holds the key it was started with (its --api-key)."""

    timeout: float = Field(default=600.0, gt=0)
    """Seconds to wait for it at the start, and for it to load weights."""


class InferenceConfig(BaseConfig):
    """One inference server."""

    spellings: ClassVar[Mapping[str, str]] = {
        "tensor_parallel_size": "parallel.tp",
        "data_parallel_size": "parallel.dp",
    }

    name: str = "inference"
    """What the server is called in logs and metrics."""

    server: ServerConfig = ServerConfig()

    model: ModelConfig = ModelConfig()

    backend: Literal["auto", "embedded", "vllm", "sglang"] = "auto"
    """The engine; embedded runs the model code of the trainer on any machine, vllm starts vLLM's own server, sglang
    stands before an SGLang server that runs already.

    auto: vllm where it is installed and there is a GPU, else embedded."""

    exact: bool | None = None
    """Log-probs equal the trainer's bit for bit, and running requests are computed anew when the weights change.

    Unset: on where a CPU computes in float32; one without a unit for bfloat16 does so for bfloat16 too. Off keeps the
    cache of running requests over a change of the weights, and multiplies in bfloat16 where a CPU can: faster."""

    enforce_eager: bool = False
    """On a GPU, launch every operation by itself instead of replaying recorded steps (CUDA graphs): less memory, slower
    for small models and few requests."""

    parallel: ParallelConfig = ParallelConfig()

    sampling: SamplingConfig = SamplingConfig()
    """What holds for requests that do not say it themselves."""

    vllm: dict[str, Any] = {}
    """Further options of vLLM's server by their names there, passed on unread: --vllm.enforce-eager true."""

    sglang: SGLangConfig = SGLangConfig()

    max_batch_size: int = Field(default=256, ge=1)
    """Most requests that are generated at the same time; the others wait."""

    max_prefill_tokens: int = Field(default=2048, ge=16)
    """Most prompt tokens of one forward pass; longer prompts are computed in chunks."""

    max_lora_rank: int | None = Field(default=None, ge=1)
    """Largest rank of LoRA adapters that are taken. Unset: any, but none by vLLM, which keeps room for them.

    `rl` sets it to that of trainer.model.lora."""

    cache: CacheConfig = CacheConfig()

    seed: int = Field(default=0, ge=0)
    """Seed of requests that bring none."""

    weight_dirs: list[Path] = []
    """Directories below which /update_weights may load, beside output_dir."""

    weight_broadcast: WeightBroadcastConfig = WeightBroadcastConfig()

    output_dir: Path | None = None
    """Directory of the run: its weights may be loaded, its metrics.jsonl and logs are written; unset: nothing is."""

    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _check_backend(self) -> InferenceConfig:
        if self.backend == "embedded":
            refuse_beyond_embedded(self)
        if self.backend == "vllm":
            refuse_beyond_vllm(self)
        if self.backend == "sglang":
            refuse_beyond_sglang(self)
        elif self.sglang.base_url is not None:
            raise ValueError(f'sglang.base_url = {self.sglang.base_url!r}: set backend = "sglang", or leave it out')
        return self


def refuse_beyond_embedded(config: InferenceConfig) -> None:
    """`ValueError` for what only vLLM can do."""
    for name in ("tp", "dp"):
        if getattr(config.parallel, name) != 1:
            raise ValueError(
                f"parallel.{name} = {getattr(config.parallel, name)}: the embedded engine uses one device; leave it "
                'at 1, start several servers, or set backend = "vllm"'
            )
    if config.vllm:
        raise ValueError(f'vllm.{min(config.vllm)} is an option of vLLM: set backend = "vllm", or leave it out')


def refuse_beyond_vllm(config: InferenceConfig) -> None:
    """`ValueError` for what only the embedded engine can do."""
    if config.weight_broadcast.type == "nccl":
        raise ValueError(
            'weight_broadcast.type = "nccl" with vLLM: its server takes weights over "gloo", or from files'
        )
    if config.exact:
        raise ValueError('exact = true is what the embedded engine can do: set backend = "embedded", or leave it out')
    if config.model.device != "auto":
        raise ValueError(
            f"model.device = {config.model.device!r}: vLLM takes the devices of CUDA_VISIBLE_DEVICES; leave it out"
        )
    for name, value in config.cache.model_dump(exclude_defaults=True).items():
        raise ValueError(
            f"cache.{name} = {value!r} is for the embedded engine: leave it out; vLLM's own options are "
            "--vllm.kv-cache-memory-bytes, --vllm.gpu-memory-utilization and --vllm.enable-prefix-caching"
        )


def refuse_beyond_sglang(config: InferenceConfig) -> None:
    """`ValueError` for what a gateway to SGLang cannot do, or what is chosen when that server is started."""
    if config.sglang.base_url is None:
        raise ValueError(
            'backend = "sglang" needs sglang.base_url, the address of an SGLang server that runs already, such as '
            "http://127.0.0.1:30000"
        )
    if not config.sglang.base_url.startswith(("http://", "https://")):
        raise ValueError(f"sglang.base_url = {config.sglang.base_url!r} must begin with http:// or https://")
    if config.weight_broadcast.type != "filesystem":
        raise ValueError(
            f'weight_broadcast.type = "{config.weight_broadcast.type}" with SGLang: it loads weights from directories, '
            'set "filesystem"'
        )
    if config.exact:
        raise ValueError('exact = true is what the embedded engine can do: set backend = "embedded", or leave it out')
    theirs = {
        "model.device": config.model.device != "auto",
        "model.dtype": config.model.dtype != "auto",
        "parallel.tp": config.parallel.tp != 1,
        "parallel.dp": config.parallel.dp != 1,
        "enforce_eager": config.enforce_eager,
        "max_prefill_tokens": config.max_prefill_tokens != InferenceConfig.model_fields["max_prefill_tokens"].default,
        **{f"cache.{name}": True for name in config.cache.model_dump(exclude_defaults=True)},
        **{f"vllm.{name}": True for name in config.vllm},
    }
    for name, given in theirs.items():
        if given:
            raise ValueError(f"{name} with SGLang: it is decided where that server is started, leave it out here")
