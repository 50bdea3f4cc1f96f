"""Configuration of the orchestrator."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from prime_rl.utils.config import ClientConfig, EnvConfig, LogConfig, SamplingConfig, WandbConfig
from prime_rl.utils.pydantic_config import BaseConfig


class ModelConfig(BaseConfig):
    """The model that the inference server serves."""

    name: str = "Qwen/Qwen3-0.6B"
    """Name sent with every request."""


class BufferConfig(BaseConfig):
    """Which prompts come, and which groups are worth training on."""

    seed: int | None = None
    """Seed of the order of prompts from the second epoch on; unset: the run's seed."""

    online_difficulty_filtering: bool = False
    """Drop groups whose mean reward is exactly 0 or 1, and draw others in their place."""


class AdvantageConfig(BaseConfig):
    """How the rewards of a group become advantages."""

    baseline: Literal["mean", "leave_one_out", "length_weighted", "none"] = "mean"
    """What is subtracted from each reward of a group."""

    length_weighted_mean: bool = False
    """Short for baseline = "length_weighted"."""

    std_norm: bool = False
    """Divide by the standard deviation of the group's rewards."""

    @model_validator(mode="after")
    def _check_one_baseline(self) -> AdvantageConfig:
        if self.length_weighted_mean and self.baseline not in ("mean", "length_weighted"):
            raise ValueError(
                f'length_weighted_mean and baseline = "{self.baseline}" name two baselines: remove one of them'
            )
        return self


class CkptConfig(BaseConfig):
    """Checkpoints of the orchestrator's half: prompt cursor, groups under way, counters."""

    interval: int | None = Field(default=None, ge=1)
    """Steps between checkpoints; unset: only after the last step."""

    resume_step: int | None = Field(default=None, ge=-1)
    """Continue from this step; -1: from the latest one that trainer and orchestrator both completed."""

    keep: int | None = Field(default=None, ge=1)
    """Number of latest checkpoints that stay on disk; unset: all."""


class OrchestratorConfig(BaseConfig):
    """Everything the orchestrator reads."""

    client: ClientConfig = ClientConfig()

    model: ModelConfig = ModelConfig()

    sampling: SamplingConfig = SamplingConfig()

    env: list[EnvConfig] = Field(default=[EnvConfig()], min_length=1)
    """Environments; their prompts are mixed evenly, each in proportion to its size."""

    buffer: BufferConfig = BufferConfig()

    advantage: AdvantageConfig | None = AdvantageConfig()
    """Off: the plain reward is the advantage."""

    batch_size: int = Field(default=128, ge=1)
    """Rollouts of one training step."""

    rollouts_per_example: int = Field(default=1, ge=1)
    """Rollouts of one prompt, compared with each other: a group."""

    seq_len: int = Field(default=2048, ge=1)
    """Most tokens of a sample, prompt included; longer ones are counted and not trained on."""

    zero_truncated_completions: bool = False
    """A rollout that was cut off at max_tokens earns 0: an answer that does not end is no answer."""

    max_steps: int | None = Field(default=None, ge=1)
    """Batches to send; unset: until stopped."""

    max_async_level: int = Field(default=2, ge=0)
    """Versions that a sample's policy may be behind the one it trains; 0: strictly in turn, deterministic."""

    max_concurrent: int | None = Field(default=None, ge=1)
    """Rollouts that may run at the same time; unset: as many as max_async_level allows."""

    max_retries: int = Field(default=2, ge=0)
    """Further tries of a rollout that failed; a prompt none of whose rollouts succeed is not drawn again."""

    inference_timeout: float = Field(default=600, gt=0)
    """Seconds to wait for the inference server to be ready."""

    weights_timeout: float = Field(default=3600, gt=0)
    """Seconds to wait for the trainer's next version."""

    seed: int = Field(default=42, ge=0)
    """Seed of the order of prompts and of every sampled token."""

    output_dir: Path = Path("outputs")
    """Directory of the run, shared with trainer and inference server."""

    ckpt: CkptConfig | None = None

    wandb: WandbConfig | None = None

    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _check_whole_groups(self) -> OrchestratorConfig:
        if self.batch_size % self.rollouts_per_example:
            raise ValueError(
                f"batch_size = {self.batch_size} is not a multiple of rollouts_per_example = "
                f"{self.rollouts_per_example}: a step takes whole groups"
            )
        return self

    @model_validator(mode="after")
    def _check_env_names(self) -> OrchestratorConfig:
        names = [env.name or env.id for env in self.env]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"env has two environments called {sorted(twice)[0]!r}: give one of them another name")
        return self

    @property
    def num_groups(self) -> int:
        """Groups of one training step."""
        return self.batch_size // self.rollouts_per_example
