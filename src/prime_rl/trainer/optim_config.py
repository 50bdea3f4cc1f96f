"""Configuration of the optimizer and its learning-rate schedule."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from prime_rl.utils.pydantic_config import BaseConfig

RL_LR, SFT_LR = 1e-5, 2e-5
"""Default learning rates of full fine-tuning.

RL: a model of 135M parameters learns at 1e-5. Published recipes for 7B and more (TRL, verl, prime-rl) use 1e-6, with
which small models hardly change. SFT: the default of TRL.
"""

LORA_LR_FACTOR = 10
"""LoRA needs about ten times the rate of full fine-tuning, in SFT and RL (Schulman et al. 2025, LoRA
Without Regret)."""

MIN_LORA_LR = 5e-5
"""Smaller rates hardly change an adapter: at 1e-5 a model of 135M parameters did not learn, at 1e-3 it did."""


class OptimizerConfig(BaseConfig):
    """Settings of every optimizer."""

    type: str
    """Optimizer."""

    lr: float = Field(default_factory=lambda _: RL_LR, ge=0)
    """Peak learning rate; unset: RL 1e-5, SFT 2e-5, with LoRA ten times that. The defaults are for adamw and muon."""

    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay."""

    max_norm: float | None = Field(default=1.0, gt=0)
    """Global gradient norm for clipping; None: no clipping."""


class AdamConfig(OptimizerConfig):
    """AdamW (1711.05101)."""

    type: Literal["adamw"] = "adamw"
    """AdamW."""

    betas1: float = Field(default=0.9, ge=0, lt=1)
    """Decay rate of the first moment."""

    betas2: float = Field(default=0.999, ge=0, lt=1)
    """Decay rate of the second moment."""


class SGDConfig(OptimizerConfig):
    """Stochastic gradient descent with momentum."""

    type: Literal["sgd"] = "sgd"
    """SGD."""

    weight_decay: float = Field(default=0.01, ge=0)
    """L2 penalty."""

    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum."""

    nesterov: bool = True
    """Nesterov momentum; needs momentum > 0."""

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> SGDConfig:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0: set nesterov = false")
        return self


class MuonConfig(OptimizerConfig):
    """Muon (2502.16982) for matrices, AdamW for embeddings, head, norms and biases."""

    type: Literal["muon"] = "muon"
    """Muon."""

    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Momentum of the Muon updates."""

    nesterov: bool = True
    """Nesterov momentum."""

    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Scale of matrix updates: match the RMS of AdamW updates, or sqrt(max(1, rows / columns))."""

    betas1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW: decay rate of the first moment."""

    betas2: float = Field(default=0.999, ge=0, lt=1)
    """AdamW: decay rate of the second moment."""


OptimConfig = Annotated[AdamConfig | SGDConfig | MuonConfig, Field(discriminator="type")]


class ConstantSchedulerConfig(BaseConfig):
    """Constant learning rate."""

    type: Literal["constant"] = "constant"
    """Constant."""


class LinearSchedulerConfig(BaseConfig):
    """Linear warmup, constant, linear decay at the end of the run."""

    type: Literal["linear"] = "linear"
    """Linear."""

    warmup_steps: int = Field(default=10, ge=0)
    """Linear warmup steps."""

    decay_steps: int = Field(default=10, ge=0)
    """Decay steps at the end of the run."""

    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate from which the warmup rises, and at the last step."""

    def fit(self, num_steps: int) -> LinearSchedulerConfig:
        """This schedule, or one with proportionally shorter warmup and decay that fits into `num_steps` steps."""
        total = self.warmup_steps + self.decay_steps
        if total <= num_steps:
            return self
        warmup = num_steps * self.warmup_steps // total
        return self.model_copy(update={"warmup_steps": warmup, "decay_steps": num_steps - warmup})


class CosineSchedulerConfig(BaseConfig):
    """Linear warmup, then cosine decay to the end of the run."""

    type: Literal["cosine"] = "cosine"
    """Cosine."""

    warmup_steps: int = Field(default=10, ge=0)
    """Linear warmup steps."""

    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate from which the warmup rises, and at the last step."""

    def fit(self, num_steps: int) -> CosineSchedulerConfig:
        """This schedule, or one that warms up for half of `num_steps` steps if its warmup leaves none to decay."""
        return self if self.warmup_steps < num_steps else self.model_copy(update={"warmup_steps": num_steps // 2})


SchedulerConfig = Annotated[
    ConstantSchedulerConfig | LinearSchedulerConfig | CosineSchedulerConfig, Field(discriminator="type")
]


def decays(scheduler: SchedulerConfig) -> bool:
    """Whether the learning rate depends on the number of steps."""
    return isinstance(scheduler, CosineSchedulerConfig) or (
        isinstance(scheduler, LinearSchedulerConfig) and scheduler.decay_steps > 0
    )


def check_schedule(scheduler: SchedulerConfig, num_steps: int, described: str) -> None:
    """Raise `ValueError` when warmup and decay do not fit into `num_steps`, which the message calls `described`."""
    if isinstance(scheduler, ConstantSchedulerConfig) or scheduler.fit(max(num_steps, 0)) == scheduler:
        return
    names = [name for name in ("warmup_steps", "decay_steps") if name in type(scheduler).model_fields]
    steps = " and ".join(f"{name} {getattr(scheduler, name)}" for name in names)
    raise ValueError(f"scheduler.{steps} do not fit into {described}")
