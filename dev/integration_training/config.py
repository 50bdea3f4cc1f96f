"""The integration run: a tiny model learns to repeat a letter, first from demonstrations with errors, then by RL."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollouts.training.types import RLTrainingConfig, SFTTrainingConfig

MODES = ("sft", "rl", "sft+rl")


@dataclass(frozen=True)
class Config:
    """Settings of `train.py`; several devices in `gpu_ranks` mean FSDP under torchrun."""

    mode: str = "sft+rl"
    output_dir: str = "outputs/integration_training"
    model: str = "tiny-qwen3"
    device_type: str = "cpu"
    gpu_ranks: tuple[int, ...] = (0,)
    seed: int = 0
    # the task
    answer_length: int = 4
    wrong_share: float = 0.5
    num_demonstrations: int = 512
    max_tokens: int = 6
    # supervised fine-tuning
    sft: SFTTrainingConfig = field(
        default_factory=lambda: SFTTrainingConfig(num_steps=60, batch_size=32, log_every=1, checkpoint_every=30)
    )
    sft_learning_rate: float = 3e-3
    # reinforcement learning
    groups_per_batch: int = 8
    samples_per_prompt: int = 8
    rl: RLTrainingConfig = field(
        default_factory=lambda: RLTrainingConfig(
            num_steps=30, sync_every=1, log_every=1, checkpoint_every=10, estimator="mean", advantage_std=True
        )
    )
    rl_learning_rate: float = 1e-3
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode {self.mode!r} is not one of {', '.join(MODES)}")
        if not self.gpu_ranks:
            raise ValueError("gpu_ranks is empty: name at least one device, such as (0,)")


config = Config()
