"""Configuration of `plan`: the configuration of a run, a cluster and the length of rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from prime_rl.config import RLConfig
from prime_rl.runtime.machine import find_gpus
from prime_rl.trainer.config import MAX_AUTO_TOKENS
from prime_rl.utils.pydantic_config import BaseConfig

GiB = 2**30


@dataclass(frozen=True)
class Gpu:
    """Data sheet: memory in GiB, dense bf16 TFLOP/s, memory GB/s, GPU-to-GPU GB/s in one direction."""

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
    """Nodes and GPUs."""

    gpu: Literal["auto", "cpu", "a6000", "rtx3090", "rtx4090", "l40s", "a100-40", "a100", "h100", "h200", "b200"] = (
        "auto"
    )
    """GPU model, with figures from its data sheet, or cpu: this machine without GPU, measured. auto: cpu on a machine
    without GPU if no other key of cluster is given, else h100."""

    nodes: int = Field(default=1, ge=1)
    """Number of nodes."""

    gpus_per_node: int = Field(default=8, ge=1)
    """GPUs per node."""

    trainer_gpus: int | None = Field(default=None, ge=1)
    """GPUs of the trainer; unset: those of trainer_gpu_ids, else the number with the shortest step."""

    network_gbs: float = Field(default=40.0, gt=0)
    """GB/s from one GPU to those of other nodes."""

    disk_gbs: float = Field(default=2.0, gt=0)
    """GB/s of writing weights to the shared file system, and of reading them."""

    @property
    def is_cpu(self) -> bool:
        """Whether the run is planned for the processor of this machine."""
        return self.gpu == "cpu" or (self.gpu == "auto" and not self.model_fields_set and not find_gpus())

    @property
    def spec(self) -> Gpu:
        """Data sheet of the GPU."""
        return GPUS["h100" if self.gpu == "auto" else self.gpu]

    @property
    def num_gpus(self) -> int:
        """Total number of GPUs."""
        return self.nodes * self.gpus_per_node


class WorkloadConfig(BaseConfig):
    """Length of rollouts."""

    prompt_tokens: int | None = Field(default=None, ge=1)
    """Mean prompt length, in tokens; unset: 256, or half of a shorter seq_len."""

    completion_tokens: int | None = Field(default=None, ge=1)
    """Mean number of generated tokens over all turns; unset: half of sampling.max_tokens, or of seq_len."""

    spread: float = Field(default=0.6, ge=0)
    """Standard deviation of the logarithm of that length; 0: constant, 1: long tail."""

    turns: int = Field(default=1, ge=1)
    """Model turns per rollout, each followed by the environment's latency."""

    latency_s: float = Field(default=0.0, ge=0)
    """Seconds of the environment per turn."""


class EfficiencyConfig(BaseConfig):
    """Achieved fraction of the data-sheet figures; defaults are fitted to published runs (docs/planning.md)."""

    matmul: float = Field(default=0.42, gt=0, le=1)
    """Fraction of peak FLOP/s in the matrix products of training and prefill."""

    attention: float = Field(default=0.42, gt=0, le=1)
    """Fraction of peak FLOP/s in attention."""

    experts: float = Field(default=0.12, gt=0, le=1)
    """Fraction of peak FLOP/s in the matrix products of a mixture of experts."""

    memory: float = Field(default=0.6, gt=0, le=1)
    """Fraction of memory bandwidth in decoding and in the optimizer."""

    link: float = Field(default=0.6, gt=0, le=1)
    """Fraction of the bandwidth between GPUs."""


class PlanConfig(RLConfig):
    """The configuration of `rl`, plus cluster, workload and efficiency."""

    main_keys: ClassVar[Sequence[str]] = """
        cluster.gpu cluster.nodes cluster.gpus_per_node cluster.trainer_gpus cluster.network_gbs cluster.disk_gbs
        workload.prompt_tokens workload.completion_tokens workload.spread workload.turns workload.latency_s
        efficiency.matmul efficiency.memory efficiency.link model.name seq_len max_async_level orchestrator.batch_size
        orchestrator.rollouts_per_example orchestrator.sampling.max_tokens trainer.micro_bs trainer.model.lora.rank
        trainer.model.dtype trainer.parallel.tp trainer.parallel.pp trainer.parallel.cp inference.parallel.tp
        trainer_gpu_ids inference_gpu_ids
    """.split()

    cluster: ClusterConfig = ClusterConfig()

    workload: WorkloadConfig = WorkloadConfig()

    efficiency: EfficiencyConfig = EfficiencyConfig()

    @model_validator(mode="after")
    def _check_gpu_count(self) -> PlanConfig:
        total, serving = self.cluster.num_gpus, self.serving_gpus
        engines = "inference_gpu_ids" if self.inference_gpu_ids else "inference.parallel.tp"
        sizes = {
            "cluster.trainer_gpus": self.cluster.trainer_gpus,
            "trainer_gpu_ids": len(self.trainer_gpu_ids or []),
            "trainer.parallel": self.trainer.parallel.model_ranks,
        }
        key, training = next((key, size) for key, size in sizes.items() if size)
        for name, size in ((key, training), (engines, serving)):
            if size > total:
                raise ValueError(
                    f"cluster.nodes * cluster.gpus_per_node = {total} GPUs are fewer than the {size} of {name}: raise "
                    "them, or lower it"
                )
        if total > 1 and training + serving > total:  # a single GPU is shared
            raise ValueError(
                f"cluster.nodes * cluster.gpus_per_node = {total} GPUs: {training} for training leave no engine of "
                f"{engines} = {self.inference_gpu_ids or serving}"
            )
        return self

    @property
    def serving_gpus(self) -> int:
        """GPUs that are not the trainer's: those of inference_gpu_ids, else at least those of one engine."""
        return 0 if self.inference is None else len(self.inference_gpu_ids or ()) or self.inference.parallel.tp

    @property
    def teacher_gpus(self) -> int:
        """GPUs of the teacher's server, if there are as many beside trainer and engines; else it shares some."""
        server = self.teacher_inference
        if server is None or server.backend == "sglang":  # that one has its own
            return 0
        return len(self.teacher_gpu_ids or ()) or server.parallel.tp * server.parallel.dp

    @property
    def prompt_tokens(self) -> int:
        """Mean prompt length."""
        return self.workload.prompt_tokens or max(min(256, self.seq_len // 2), 1)

    @property
    def completion_tokens(self) -> int:
        """Mean number of generated tokens per rollout."""
        longest = self.orchestrator.sampling.max_tokens or self.seq_len - self.prompt_tokens
        return self.workload.completion_tokens or max(longest // 2, 1)

    @property
    def longest_completion(self) -> int:
        """Maximum number of generated tokens."""
        limit = max(self.seq_len - self.prompt_tokens, 1)
        return min(self.orchestrator.sampling.max_tokens or limit, limit)

    def count_micro_tokens(self, kind: Literal["cpu", "cuda"]) -> int:
        """Tokens of a full micro-batch on this kind of device; the maximum for `trainer.micro_bs = "auto"`."""
        if self.trainer.micro_bs == "auto":
            return max(MAX_AUTO_TOKENS[kind], self.seq_len)
        return self.trainer.micro_bs * self.seq_len
