"""Configuration of the inference server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from prime_rl.client.constraints import find_constraint
from prime_rl.configuration.sections import (
    BASE_MODEL,
    DebugModelConfig,
    LogConfig,
    SamplingConfig,
    WeightBroadcastConfig,
)
from prime_rl.utils.pydantic_config import BaseConfig

Quantization = Literal["int8"]


class ServerConfig(BaseConfig):
    """Listen address, access control and request limits."""

    host: str = "127.0.0.1"
    """Listen address; 0.0.0.0 accepts other machines (set api_key_var then)."""

    port: int = Field(default=8000, ge=1, le=65535)
    """Listen port; unset: 8000 or, in rl, the next free one."""

    api_key_var: str | None = None
    """Environment variable with an API key; requests must then send it as a bearer token.

    If unset, routes that change the server are limited to this machine."""

    max_queued_requests: int = Field(default=16384, ge=0)
    """Maximum number of queued requests; further ones get HTTP 429 with Retry-After."""

    allowed_hosts: list[str] = []
    """Additional Host header values accepted without a key, e.g. the name of a reverse proxy."""

    max_request_mb: float | None = Field(default=None, gt=0)
    """Maximum request body in megabytes; larger ones get HTTP 413 before they are read. Unset: 64."""

    read_timeout: float = Field(default=20.0, gt=0)
    """Timeout in seconds for reading the request head, for its body (extended while the body arrives at 64 KB/s), and
    for the client to accept response data; then the connection is closed."""

    wait_for_weights: bool = False
    """Reject requests until weights are loaded by a control route: a restarted server must not serve outdated
    weights."""

    drain_timeout: float = Field(default=3.0, ge=0)
    """Seconds for running requests to finish on shutdown."""

    @property
    def max_request_bytes(self) -> int:
        """`max_request_mb` in bytes."""
        return round((64 if self.max_request_mb is None else self.max_request_mb) * 2**20)


class ModelConfig(BaseConfig):
    """The served model."""

    name: str = "Qwen/Qwen3-0.6B"
    """A Hugging Face model directory, a bundled model (tiny-qwen3) or a hub id."""

    trust_remote_code: bool = False
    """Allow the tokenizer repository to run its own code."""

    impl: Literal["auto", "custom", "hf"] = "auto"
    """Implementation in the embedded engine. custom: the native decoder; hf: transformers, slower; auto: custom if
    supported."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of weights and KV cache; auto: bfloat16 on a GPU, else float32."""

    quantization: Quantization | None = None
    """Quantize weights and inputs of matrix products in the embedded engine on a CPU, in fast mode. int8: about 1.6
    times as fast as bfloat16; log-probs differ more from the trainer's."""

    device: str = "auto"
    """Device, such as cpu or cuda:0; auto: a GPU if available."""

    max_model_len: int | None = Field(default=None, ge=2)
    """Maximum context length (prompt + completion) in tokens; unset: the model's maximum."""

    tool_call_parser: Literal["hermes", "llama"] = "hermes"
    """Tool call format: hermes for <tool_call> tags (Qwen, Hermes), llama for bare JSON."""

    reasoning_parser: Literal["think"] | None = None
    """think: return text between <think> tags as reasoning_content; unset: keep it in the content."""

    debug: DebugModelConfig = DebugModelConfig()


class ParallelConfig(BaseConfig):
    """Parallelism; more than one device requires the vllm backend."""

    tp: int = Field(default=1, ge=1)
    """Tensor-parallel size: devices per model replica."""

    dp: int = Field(default=1, ge=1)
    """Data-parallel size: model replicas."""


class CacheConfig(BaseConfig):
    """KV cache of the embedded engine."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Cache size for running requests in tokens, at least max_model_len; if exceeded, the newest request is preempted
    and recomputed. Unset: a fraction of the free memory."""

    max_prefix_cache_tokens: int | None = Field(default=None, ge=0)
    """Prefix cache size for finished requests in tokens; unset: a quarter of max_tokens, on a CPU at most 1/64 of the
    memory."""

    enable_prefix_caching: bool = True
    """Enable prefix caching: compute common prompt prefixes once."""


class SGLangConfig(BaseConfig):
    """An existing SGLang server, for backend = "sglang" (experimental); it must read the weight directories."""

    base_url: str | None = None
    """Server address, such as http://127.0.0.1:30000."""

    api_key_var: str | None = None
    """Environment variable with the server's API key (its --api-key)."""

    timeout: float = Field(default=600.0, gt=0)
    """Timeout in seconds for startup and for weight updates."""


class InferenceConfig(BaseConfig):
    """One inference server."""

    main_keys: ClassVar[Sequence[str]] = """
        model.name model.max_model_len model.dtype model.device server.host server.port backend exact parallel.tp
        parallel.dp sampling.max_tokens sampling.temperature max_batch_size max_num_batched_tokens max_lora_rank
        seed output_dir log.level
    """.split()

    spellings: ClassVar[Mapping[str, str]] = {
        "tensor_parallel_size": "parallel.tp",
        "data_parallel_size": "parallel.dp",
    }

    name: str = "inference"
    """Server name in logs and metrics."""

    server: ServerConfig = ServerConfig()

    model: ModelConfig = ModelConfig()

    served_model_name: str | None = Field(default=None, min_length=1, max_length=256)
    """Name of the model in requests and responses; unset: model.name, which is always accepted as well."""

    backend: Literal["auto", "embedded", "vllm", "sglang"] = "auto"
    """Inference engine: embedded runs the trainer's model code on any machine, vllm starts a vLLM server, sglang is a
    gateway to an existing SGLang server (experimental: tested against a fake server only).

    auto: vllm if it is installed and there is a GPU, else embedded."""

    exact: bool | None = None
    """Log-probs are bitwise equal to the trainer's, and running requests are recomputed after a weight update.

    Unset: on for a model on a CPU that is not quantized. Off: running requests keep their KV cache across weight
    updates, and bfloat16 instructions of a CPU also compute experts and other models than dense ones."""

    enforce_eager: bool = False
    """Disable CUDA graphs: uses less GPU memory, but is slower for small models and small batches."""

    parallel: ParallelConfig = ParallelConfig()

    sampling: SamplingConfig = SamplingConfig()
    """Default sampling parameters."""

    vllm: dict[str, Any] = {}
    """Additional vLLM server options by their vLLM names, passed through unchecked: --vllm.enforce-eager true."""

    sglang: SGLangConfig = SGLangConfig()

    max_batch_size: int = Field(default=256, ge=1)
    """Maximum number of concurrently running requests; further ones are queued."""

    max_num_batched_tokens: int | None = Field(default=None, ge=16)
    """Maximum prompt tokens per forward pass; longer prompts are prefilled in chunks. None: 2048, with FlashAttention
    on a GPU 8192."""

    max_lora_rank: int | None = Field(default=None, ge=1)
    """Maximum LoRA rank. Unset: unlimited; with vLLM, which preallocates memory for adapters, LoRA is disabled.

    `rl` sets it to the rank of trainer.model.lora."""

    cache: CacheConfig = CacheConfig()

    speculation: bool = True
    """Speculative decoding on a CPU with kernels (embedded engine): drafts copied from the prompt and other completions
    of it, where that is faster; the tokens and log-probs are the same."""

    seed: int = Field(default=0, ge=0)
    """Base seed for requests without a seed."""

    weight_dirs: list[Path] = []
    """Directories from which /update_weights may load, in addition to output_dir."""

    weight_broadcast: WeightBroadcastConfig = WeightBroadcastConfig()

    output_dir: Path | None = None
    """Run directory: weights may be loaded from it, metrics.jsonl and logs are written to it; unset: no files."""

    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _check_sampling(self) -> InferenceConfig:
        if (name := find_constraint(self.sampling.extra_body)) is not None:
            raise ValueError(f"sampling.extra_body.{name} cannot be a default: set it in each request")
        return self

    @property
    def served_name(self) -> str:
        """Name of the model in responses."""
        return self.served_model_name or self.model.name

    @model_validator(mode="after")
    def _check_name(self) -> InferenceConfig:
        if self.served_model_name == BASE_MODEL:
            raise ValueError(f"served_model_name = {BASE_MODEL!r} is reserved: choose another name")
        if self.model.name == BASE_MODEL:
            raise ValueError(f"model.name = {BASE_MODEL!r} is reserved for the initial weights: write ./{BASE_MODEL}")
        return self

    @model_validator(mode="after")
    def _check_backend(self) -> InferenceConfig:
        if self.backend == "embedded":
            check_embedded_options(self)
        if self.backend == "vllm":
            check_vllm_options(self)
        if self.backend == "sglang":
            check_sglang_options(self)
        elif self.sglang.base_url is not None:
            raise ValueError(f'sglang.base_url = {self.sglang.base_url!r}: set backend = "sglang", or leave it out')
        return self


def check_embedded_options(config: InferenceConfig) -> None:
    """`ValueError` for options that only vLLM supports."""
    for name in ("tp", "dp"):
        if getattr(config.parallel, name) != 1:
            raise ValueError(
                f"parallel.{name} = {getattr(config.parallel, name)}: the embedded engine uses one device; leave it "
                'at 1, start several servers, or set backend = "vllm"'
            )
    if config.model.quantization is not None and config.exact:
        raise ValueError(
            f'model.quantization = "{config.model.quantization}" with exact = true: quantized log-probs differ from '
            "the trainer's; leave one of them out"
        )
    if config.vllm:
        raise ValueError(f'vllm.{min(config.vllm)} is an option of vLLM: set backend = "vllm", or leave it out')


def check_no_delta(config: InferenceConfig) -> None:
    """`ValueError` for delta weight sync, because other engines load whole model directories."""
    if config.weight_broadcast.delta:
        raise ValueError(
            f'weight_broadcast.delta = true with backend = "{config.backend}": only the embedded engine applies '
            "deltas; leave it out"
        )


def prefers_vllm(config: InferenceConfig) -> bool:
    """Whether `backend = "auto"` is vLLM here.

    It is if vLLM is installed, there is a GPU, and neither an option nor the model (a LoRA adapter) needs the embedded
    engine.
    """
    from prime_rl.runtime.machine import find_gpus, is_installed
    from prime_rl.runtime.tokenizer import find_local_model
    from prime_rl.transport.weights import is_adapter

    broadcast, model = config.weight_broadcast, config.model
    needs_embedded = config.exact or model.device != "auto" or config.cache != CacheConfig()
    needs_embedded |= broadcast.type == "nccl" or broadcast.delta or model.impl != "auto"
    needs_embedded |= model.quantization is not None
    if needs_embedded or not is_installed("vllm") or not find_gpus():
        return False
    directory = find_local_model(model.name)
    return directory is None or not is_adapter(directory)


def check_vllm_options(config: InferenceConfig) -> None:
    """`ValueError` for options that only the embedded engine supports."""
    if config.weight_broadcast.type == "nccl":
        raise ValueError('weight_broadcast.type = "nccl" is not supported with vLLM: use "gloo" or "filesystem"')
    check_no_delta(config)
    if config.exact:
        raise ValueError('exact = true requires the embedded engine: set backend = "embedded", or leave it out')
    if config.model.device != "auto":
        raise ValueError(
            f"model.device = {config.model.device!r}: vLLM uses the devices of CUDA_VISIBLE_DEVICES; leave it out"
        )
    if config.model.impl != "auto":
        raise ValueError(f"model.impl = {config.model.impl!r} is for the embedded engine; vLLM's is --vllm.model-impl")
    if config.model.quantization is not None:
        raise ValueError("model.quantization is for the embedded engine; vLLM's is --vllm.quantization")
    if not config.speculation:
        raise ValueError("speculation = false is for the embedded engine: leave it out, vLLM has it off by default")
    if config.server.drain_timeout != type(config.server)().drain_timeout:
        raise ValueError(
            "server.drain_timeout is for the embedded engine: leave it out; vLLM's is --vllm.shutdown-timeout"
        )
    for name, value in config.cache.model_dump(exclude_defaults=True).items():
        raise ValueError(
            f"cache.{name} = {value!r} is for the embedded engine: leave it out; vLLM's own options are "
            "--vllm.kv-cache-memory-bytes, --vllm.gpu-memory-utilization and --vllm.enable-prefix-caching"
        )


def check_sglang_options(config: InferenceConfig) -> None:
    """`ValueError` for options that the SGLang gateway does not support or that are set at the SGLang server."""
    if config.sglang.base_url is None:
        raise ValueError(
            'backend = "sglang" needs sglang.base_url, the address of a running SGLang server, such as '
            "http://127.0.0.1:30000"
        )
    if not config.sglang.base_url.startswith(("http://", "https://")):
        raise ValueError(f"sglang.base_url = {config.sglang.base_url!r} must begin with http:// or https://")
    check_no_delta(config)
    if config.weight_broadcast.type != "filesystem":
        raise ValueError(
            f'weight_broadcast.type = "{config.weight_broadcast.type}" with SGLang: it loads weights from directories, '
            'set "filesystem"'
        )
    if config.exact:
        raise ValueError('exact = true requires the embedded engine: set backend = "embedded", or leave it out')
    theirs = {
        "model.device": config.model.device != "auto",
        "model.dtype": config.model.dtype != "auto",
        "model.impl": config.model.impl != "auto",
        "model.quantization": config.model.quantization is not None,
        "speculation": not config.speculation,
        "parallel.tp": config.parallel.tp != 1,
        "parallel.dp": config.parallel.dp != 1,
        "enforce_eager": config.enforce_eager,
        "max_num_batched_tokens": config.max_num_batched_tokens is not None,
        **{f"cache.{name}": True for name in config.cache.model_dump(exclude_defaults=True)},
        **{f"vllm.{name}": True for name in config.vllm},
    }
    for name, given in theirs.items():
        if given:
            raise ValueError(f"{name} with SGLang: set it on the SGLang server, leave it out here")
