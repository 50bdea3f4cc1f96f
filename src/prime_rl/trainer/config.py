"""Configuration of both trainers: model, optimizer, schedule, loss, data, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from prime_rl.utils.config import DebugModelConfig, LogConfig, WandbConfig
from prime_rl.utils.pydantic_config import BaseConfig


class ModelConfig(BaseConfig):
    """The model that is trained and how it is computed."""

    name: str = "Qwen/Qwen3-0.6B"
    """A Hugging Face directory, a shipped model (tiny-qwen3) or a hub id."""

    attn: Literal["auto", "exact", "sdpa"] = "auto"
    """exact: a token's bits do not depend on its neighbours in a pack; sdpa: faster; auto: exact for fp32 on a CPU."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of forward and backward; the optimizer works in float32. auto: bfloat16 on a GPU, else float32."""

    device: str = "auto"
    """Where to compute, such as cpu or cuda:0; auto: a GPU when there is one."""

    debug: DebugModelConfig = DebugModelConfig()


class RLModelConfig(ModelConfig):
    """The policy."""

    seq_len: int = Field(default=2048, ge=2)
    """Most tokens of one sample, prompt included."""


class TokenizerConfig(BaseConfig):
    """How conversations become tokens."""

    name: str | None = None
    """Model or directory the tokenizer comes from; unset: model.name."""

    chat_template: str | None = None
    """Replaces the tokenizer's chat template: its text, or the path of a file."""


class AdamConfig(BaseConfig):
    """AdamW (1711.05101)."""

    type: Literal["adamw"] = "adamw"
    """AdamW."""

    lr: float = Field(default=1e-6, ge=0)
    """Learning rate at its highest."""

    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay."""

    max_norm: float | None = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm; None: never."""

    betas1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the mean gradient."""

    betas2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the mean squared gradient."""


class SGDConfig(BaseConfig):
    """Stochastic gradient descent with momentum."""

    type: Literal["sgd"] = "sgd"
    """SGD."""

    lr: float = Field(default=1e-6, ge=0)
    """Learning rate at its highest."""

    weight_decay: float = Field(default=0.01, ge=0)
    """L2 penalty."""

    max_norm: float | None = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm; None: never."""

    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the velocity."""

    nesterov: bool = True
    """Look ahead along the velocity; needs momentum above 0."""

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> SGDConfig:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0: set nesterov = false")
        return self


OptimConfig = Annotated[AdamConfig | SGDConfig, Field(discriminator="type")]


class ConstantSchedulerConfig(BaseConfig):
    """The learning rate stays as it is."""

    type: Literal["constant"] = "constant"
    """No schedule."""


class LinearSchedulerConfig(BaseConfig):
    """Warm up, stay, decay linearly at the end of the run."""

    type: Literal["linear"] = "linear"
    """Linear."""

    warmup_steps: int = Field(default=10, ge=0)
    """Steps until the full learning rate."""

    decay_steps: int = Field(default=10, ge=0)
    """Last steps of the run, over which it falls to min_lr."""

    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate of the last step."""


class CosineSchedulerConfig(BaseConfig):
    """Warm up, then half a cosine down to the end of the run."""

    type: Literal["cosine"] = "cosine"
    """Cosine."""

    warmup_steps: int = Field(default=10, ge=0)
    """Steps until the full learning rate."""

    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate of the last step."""


SchedulerConfig = Annotated[
    ConstantSchedulerConfig | LinearSchedulerConfig | CosineSchedulerConfig, Field(discriminator="type")
]


class CkptConfig(BaseConfig):
    """Checkpoints to continue from; the section switches them on."""

    interval: int | None = Field(default=None, ge=1)
    """Steps between checkpoints; unset: only after the last step."""

    keep: int | None = Field(default=None, ge=1)
    """Newest checkpoints that are kept; unset: all."""

    resume_step: int | None = Field(default=None, ge=-1)
    """Continue from this checkpoint; -1: from the latest complete one."""


class ParallelDims(BaseConfig):
    """How many ranks share the work, by dimension."""

    dp: int = Field(default=1, ge=1)
    """Data parallel."""

    tp: int = Field(default=1, ge=1)
    """Tensor parallel."""

    pp: int = Field(default=1, ge=1)
    """Pipeline parallel."""

    cp: int = Field(default=1, ge=1)
    """Context parallel."""

    @model_validator(mode="after")
    def _one_rank(self) -> ParallelDims:
        for name in ("dp", "tp", "pp", "cp"):
            if getattr(self, name) != 1:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, but this version trains on one rank: set {name} = 1"
                )
        return self


class LossConfig(BaseConfig):
    """The policy objective. Ratios are exp(trainer log-prob - inference log-prob); None switches a bound off."""

    type: Literal["aipo"] = "aipo"
    """Objective: aipo weighs each token by its importance ratio, capped at delta."""

    delta: float | None = Field(default=8.0, gt=0)
    """Cap on the importance ratio."""

    token_mask_low: float | None = Field(default=None, ge=0)
    """Drop tokens whose ratio is below."""

    token_mask_high: float | None = Field(default=None, gt=0)
    """Drop tokens whose ratio is above."""

    geo_mask_low: float | None = Field(default=None, ge=0)
    """Drop sequences whose geometric mean ratio is below."""

    geo_mask_high: float | None = Field(default=None, gt=0)
    """Drop sequences whose geometric mean ratio is above."""

    sequence_mask_low: float | None = Field(default=None, ge=0)
    """Drop sequences that contain a ratio below."""

    sequence_mask_high: float | None = Field(default=None, gt=0)
    """Drop sequences that contain a ratio above."""

    adv_tau: float = 1.0
    """Weight of the advantage."""

    teacher_tau: float = Field(default=0.0, ge=0)
    """Weight of the teacher's log-prob."""

    student_tau: float | None = None
    """Weight of the student's own log-prob, subtracted; unset: as teacher_tau."""


class FakeDataConfig(BaseConfig):
    """Random samples instead of an orchestrator."""

    batch_size: int = Field(default=16, ge=1)
    """Samples per step."""

    group_size: int = Field(default=4, ge=1)
    """Samples that share a prompt."""


class DataConfig(BaseConfig):
    """Where batches come from."""

    fake: FakeDataConfig | None = None

    timeout_s: float = Field(default=3600, gt=0)
    """How long to wait for one batch of the orchestrator."""


class TrainerConfig(BaseConfig):
    """What both trainers share."""

    optim: OptimConfig = AdamConfig()
    scheduler: SchedulerConfig = ConstantSchedulerConfig()
    parallel: ParallelDims = ParallelDims()
    ckpt: CkptConfig | None = None
    log: LogConfig = LogConfig()
    wandb: WandbConfig | None = None

    micro_bs: int = Field(default=1, ge=1)
    """Rows of seq_len tokens that go through the model at once."""

    max_steps: int | None = Field(default=None, ge=1)
    """Steps of the run; unset: until stopped."""

    seed: int = Field(default=42, ge=0)
    """Seed of everything random."""

    output_dir: Path = Path("outputs")
    """Where weights, checkpoints, metrics and logs go."""

    @model_validator(mode="after")
    def _schedules_need_an_end(self) -> TrainerConfig:
        scheduler = self.scheduler
        warmup = 0 if isinstance(scheduler, ConstantSchedulerConfig) else scheduler.warmup_steps
        decay = scheduler.decay_steps if isinstance(scheduler, LinearSchedulerConfig) else 0
        if self.max_steps is None:
            if decay or isinstance(scheduler, CosineSchedulerConfig):
                raise ValueError(f"scheduler.type {scheduler.type} falls towards the end of the run: set max_steps")
        elif warmup + decay > self.max_steps:
            raise ValueError(
                f"scheduler.warmup_steps {warmup} and decay_steps {decay} do not fit into max_steps {self.max_steps}"
            )
        if not isinstance(scheduler, ConstantSchedulerConfig) and scheduler.min_lr > self.optim.lr:
            raise ValueError(f"scheduler.min_lr {scheduler.min_lr} is above optim.lr {self.optim.lr}")
        return self


class TrainConfig(TrainerConfig):
    """The RL trainer."""

    model: RLModelConfig = RLModelConfig()
    loss: LossConfig = LossConfig()
    data: DataConfig = DataConfig()

    max_async_level: int = Field(default=2, ge=0)
    """How many versions behind the policy that generates may be; decides which published weights are kept."""


class SFTDataConfig(BaseConfig):
    """Conversations to learn from."""

    type: Literal["sft"] = "sft"
    """A data set."""

    name: str = "PrimeIntellect/Reverse-Text-SFT"
    """A JSONL or parquet file, a directory of them, or a data set on the hub."""

    split: str = "train"
    """Split of a data set on the hub."""

    seq_len: int = Field(default=128, ge=2)
    """Tokens of one row; longer conversations are left out."""

    batch_size: int = Field(default=128, ge=1)
    """Rows per step over all ranks, each filled with whole conversations."""

    shuffle: bool = True
    """Another order in each epoch, derived from seed."""


class FakeSFTDataConfig(BaseConfig):
    """Random tokens."""

    type: Literal["fake"] = "fake"
    """Random tokens."""

    length: Literal["fixed", "variable"] = "fixed"
    """Whether sequences fill the row or vary in length."""

    seq_len: int = Field(default=128, ge=2)
    """Tokens of one row."""

    batch_size: int = Field(default=128, ge=1)
    """Rows per step over all ranks."""


class SFTConfig(TrainerConfig):
    """The trainer for supervised fine-tuning."""

    model: ModelConfig = ModelConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: Annotated[SFTDataConfig | FakeSFTDataConfig, Field(discriminator="type")] = SFTDataConfig()
