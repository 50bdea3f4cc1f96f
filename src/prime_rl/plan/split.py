"""Splits of a cluster into trainer and engines, their estimated times, and the best split."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prime_rl.plan.config import PlanConfig
from prime_rl.plan.memory import MemoryBreakdown, trainer_memory
from prime_rl.plan.shapes import ModelShape
from prime_rl.plan.speed import Generation, Training, generate, train, weight_update_s
from prime_rl.trainer.parallel_config import ParallelDims


@dataclass(frozen=True)
class Split:
    """A split of the cluster with its estimates."""

    trainer_gpus: int
    engines: int
    teacher_gpus: int
    parallel: ParallelDims
    memory: MemoryBreakdown
    training: Training
    generation: Generation | None
    weight_update: float
    level: int

    @property
    def generation_s(self) -> float:
        """Seconds per batch; only synchronous engines wait for the longest rollout."""
        if self.generation is None:
            return 0.0
        return self.generation.steady if self.level else self.generation.alone

    @property
    def seconds(self) -> float:
        """Seconds per step: the slower side if asynchronous, else the sum of training, generation and update."""
        if self.level:
            return max(self.training.seconds, self.generation_s)
        return self.training.seconds + self.generation_s + self.weight_update

    @property
    def idle(self) -> dict[str, float]:
        """Idle fraction of each side."""
        return {
            "trainer": 1 - self.training.seconds / self.seconds,
            "engines": 1 - self.generation_s / self.seconds,
        }


def choose_split(config: PlanConfig, shape: ModelShape) -> Split:
    """The configured split, else the one with the shortest step that fits."""
    given = config.cluster.trainer_gpus or (len(config.trainer_gpu_ids) if config.trainer_gpu_ids else None)
    splits = list(possible_splits(config, shape, [given] if given else None))
    if not splits:
        raise ValueError(
            f"trainer.parallel needs {config.trainer.parallel.model_ranks} ranks to train a micro-batch, and no "
            f"number of trainers up to {config.cluster.num_gpus} GPUs is a multiple that leaves an engine: change "
            "trainer.parallel, cluster.nodes or cluster.trainer_gpus"
        )
    return min(splits, key=lambda split: (not split.memory.fits, split.seconds, split.trainer_gpus))


def possible_splits(config: PlanConfig, shape: ModelShape, counts: list[int] | None) -> Iterator[Split]:
    """All splits that the mesh allows and that leave an engine; a single GPU is shared, and by a teacher several."""
    total, serving = config.cluster.num_gpus, config.serving_gpus
    tp = config.inference.parallel.tp if config.inference is not None else 0
    for trainers in counts or range(1, max(total - serving - config.teacher_gpus, 1) + 1):
        try:
            parallel = config.trainer.parallel.model_copy(update={"dp": None, "dp_shard": None}).resolve(trainers)
        except ValueError:
            continue
        teacher = config.teacher_gpus if trainers + serving + config.teacher_gpus <= total else 0
        left = serving if config.inference_gpu_ids else total - trainers - teacher
        engines = max(left // tp, 1) if tp else 0
        yield Split(
            trainers,
            engines,
            teacher,
            parallel,
            trainer_memory(config, shape, parallel),
            train(config, shape, parallel, trainers),
            generate(config, shape, engines) if engines else None,
            weight_update_s(config, shape, engines),
            config.max_async_level,
        )
