"""What `plan` is asked: the configuration of a run, a cluster, and how long its rollouts are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field, model_validator

from prime_rl.config import RLConfig
from prime_rl.utils.pydantic_config import BaseConfig

GiB = 2**30


@dataclass(frozen=True)
class Gpu:
    """By data sheet: memory in GiB, dense bf16 TFLOP/s, GB/s of its memory, GB/s to its neighbours (one direction)."""

    memory: float
    tflops: float
    bandwidth: float
    link: float


GPUS = {
    "a6000": Gpu(48, 155, 768, 28),
    "rtx3090": Gpu(24, 71, 936, 14),
    "rtx4090": Gpu(24, 165, 1008, 28),
    "l40s": Gpu(48, 362, 864, 28),
    "a100-40": Gpu(40, 312, 1555, 300),
    "a100": Gpu(80, 312, 2039, 300),
    "h100": Gpu(80, 989, 3350, 450),
    "h200": Gpu(141, 989, 4800, 450),
    "b200": Gpu(180, 2250, 8000, 900),
}


class ClusterConfig(BaseConfig):
    """The machines."""

    gpu: Literal["a6000", "rtx3090", "rtx4090", "l40s", "a100-40", "a100", "h100", "h200", "b200"] = "h100"
    """Kind of GPU; its figures are those of the data sheet."""

    nodes: int = Field(default=1, ge=1)
    """Machines."""

    gpus_per_node: int = Field(default=8, ge=1)
    """GPUs of each."""

    trainer_gpus: int | None = Field(default=None, ge=1)
    """GPUs that train; unset: as trainer_gpu_ids says, else the number that makes a step shortest."""

    network_gbs: float = Field(default=40.0, gt=0)
    """GB/s from one GPU to those of other machines."""

    disk_gbs: float = Field(default=2.0, gt=0)
    """GB/s at which weights are published to the file system that all machines see, and read from it."""

    @property
    def num_gpus(self) -> int:
        """All of them."""
        return self.nodes * self.gpus_per_node


class WorkloadConfig(BaseConfig):
    """How long rollouts are."""

    prompt_tokens: int = Field(default=256, ge=1)
    """Mean length of a prompt."""

    completion_tokens: int | None = Field(default=None, ge=1)
    """Mean length of what is generated, all turns together; unset: half of sampling.max_tokens, or of seq_len."""

    spread: float = Field(default=0.6, ge=0)
    """Standard deviation of the logarithm of that length: 0: all alike, 1: a long tail."""

    turns: int = Field(default=1, ge=1)
    """Answers of a rollout, each of which may wait for the environment."""

    latency_s: float = Field(default=0.0, ge=0)
    """Seconds that the environment takes after each answer."""


class EfficiencyConfig(BaseConfig):
    """Which part of the data sheet is reached; the defaults are fitted to published runs (docs/planning.md)."""

    matmul: float = Field(default=0.42, gt=0, le=1)
    """Of the peak, in the matrix products of training and prefill."""

    attention: float = Field(default=0.42, gt=0, le=1)
    """Of the peak, in attention."""

    experts: float = Field(default=0.12, gt=0, le=1)
    """Of the peak, in the products of a mixture of experts."""

    memory: float = Field(default=0.6, gt=0, le=1)
    """Of the memory's bandwidth, in decoding and in the optimizer."""

    link: float = Field(default=0.6, gt=0, le=1)
    """Of the bandwidth between GPUs."""


class PlanConfig(RLConfig):
    """The configuration of `rl`, and where it is to run."""

    cluster: ClusterConfig = ClusterConfig()

    workload: WorkloadConfig = WorkloadConfig()

    efficiency: EfficiencyConfig = EfficiencyConfig()

    @model_validator(mode="after")
    def _check_room_for_both(self) -> PlanConfig:
        serving = 0 if self.inference is None else self.inference.parallel.tp
        training = self.cluster.trainer_gpus or len(self.trainer_gpu_ids or []) or self.trainer.parallel.model_ranks
        if self.cluster.num_gpus > 1 and training + serving > self.cluster.num_gpus:
            raise ValueError(
                f"cluster.nodes * cluster.gpus_per_node = {self.cluster.num_gpus} GPUs: {training} train, which leaves "
                f"no engine of inference.parallel.tp = {serving}"
            )
        return self

    @property
    def completion_tokens(self) -> int:
        """Mean length of what a rollout generates."""
        longest = self.orchestrator.sampling.max_tokens or self.seq_len - self.workload.prompt_tokens
        return self.workload.completion_tokens or max(longest // 2, 1)

    @property
    def longest_completion(self) -> int:
        """Tokens at which generation is cut."""
        room = max(self.seq_len - self.workload.prompt_tokens, 1)
        return min(self.orchestrator.sampling.max_tokens or room, room)
