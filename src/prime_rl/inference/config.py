"""Configuration of the inference server."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from prime_rl.utils.config import DebugModelConfig, LogConfig, SamplingConfig
from prime_rl.utils.pydantic_config import BaseConfig

__all__ = ["InferenceConfig", "ModelConfig", "ParallelConfig", "SamplingConfig", "ServerConfig"]


class ServerConfig(BaseConfig):
    """Where the server listens and who may talk to it."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 lets other machines in (set api_key_var then)."""

    port: int = Field(default=8000, ge=1, le=65535)
    """Port to listen on."""

    api_key_var: str | None = None
    """Environment variable that holds a key; every request must then carry it as a bearer token."""


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

    debug: DebugModelConfig = DebugModelConfig()


class ParallelConfig(BaseConfig):
    """Devices that share the work."""

    tp: int = 1
    """Devices that share one copy of the model."""

    dp: int = 1
    """Copies of the model."""

    @field_validator("tp", "dp")
    @classmethod
    def _check_one(cls, value: int) -> int:
        if value != 1:
            raise ValueError("the embedded engine uses one device: leave it at 1, or start several servers")
        return value


class InferenceConfig(BaseConfig):
    """One inference server."""

    server: ServerConfig = ServerConfig()

    model: ModelConfig = ModelConfig()

    backend: Literal["auto", "embedded"] = "auto"
    """The engine; embedded runs the model code of the trainer on any machine."""

    exact: bool | None = None
    """Log-probs equal the trainer's bit for bit, and running requests are computed anew when the weights change.

    Unset: on for float32 on a CPU. Off keeps the cache of running requests over a change of the weights."""

    parallel: ParallelConfig = ParallelConfig()

    max_batch_size: int = Field(default=256, ge=1)
    """Most requests that are generated at the same time; the others wait."""

    max_prefill_tokens: int = Field(default=2048, ge=16)
    """Most prompt tokens of one forward pass; longer prompts are computed in chunks."""

    seed: int = Field(default=0, ge=0)
    """Seed of requests that bring none."""

    weight_dirs: list[Path] = []
    """Directories below which /update_weights may load, beside output_dir."""

    output_dir: Path | None = None
    """Directory of the run: its weights may be loaded, its metrics.jsonl and logs are written; unset: nothing is."""

    log: LogConfig = LogConfig()
