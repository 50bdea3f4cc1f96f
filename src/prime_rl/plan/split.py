"""A cluster cut into trainer and engines: what each cut takes, and the best of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prime_rl.plan.config import PlanConfig
from prime_rl.plan.memory import Parts, trainer_memory
from prime_rl.plan.shapes import Shape
from prime_rl.plan.speed import Generation, Training, generate, hand_over_s, train
from prime_rl.trainer.config import ParallelDims


@dataclass(frozen=True)
class Split:
    """A cluster cut in two, and what a step then takes."""

    trainer_gpus: int
    engines: int
    parallel: ParallelDims
    memory: Parts
    training: Training
    generation: Generation | None
    hand_over: float
    level: int

    @property
    def generation_s(self) -> float:
        """Until the batch is there: engines that run on have no slow end, those that start anew have."""
        if self.generation is None:
            return 0.0
        return self.generation.steady if self.level else self.generation.alone

    @property
    def seconds(self) -> float:
        """One step: the slower side when both work at once, both and the weights' way when they take turns."""
        if self.level:
            return max(self.training.seconds, self.generation_s)
        return self.training.seconds + self.generation_s + self.hand_over

    @property
    def idle(self) -> dict[str, float]:
        """Share of its time that each side waits."""
        return {
            "trainer": 1 - self.training.seconds / self.seconds,
            "engines": 1 - self.generation_s / self.seconds,
        }


def choose_split(config: PlanConfig, shape: Shape) -> Split:
    """The split that is given, else the one with the shortest step among those that fit."""
    given = config.cluster.trainer_gpus or (len(config.trainer_gpu_ids) if config.trainer_gpu_ids else None)
    splits = list(possible_splits(config, shape, [given] if given else None))
    if not splits:
        raise ValueError(
            f"trainer.parallel asks for {config.trainer.parallel.model_ranks} ranks to train a micro-batch, and no "
            f"number of trainers up to {config.cluster.num_gpus} GPUs is a multiple that leaves an engine: change "
            "trainer.parallel, cluster.nodes or cluster.trainer_gpus"
        )
    return min(splits, key=lambda split: (not split.memory.fits, split.seconds, split.trainer_gpus))


def possible_splits(config: PlanConfig, shape: Shape, counts: list[int] | None) -> Iterator[Split]:
    """Every number of trainers that the mesh allows and that leaves an engine; one GPU does both."""
    total = config.cluster.num_gpus
    tp = config.inference.parallel.tp if config.inference is not None else 0
    for trainers in counts or range(1, max(total - tp, 1) + 1):
        try:
            parallel = config.trainer.parallel.model_copy(update={"dp": None, "dp_shard": None}).resolve(trainers)
        except ValueError:
            continue
        engines = max((total - trainers) // tp, 1) if tp else 0
        yield Split(
            trainers,
            engines,
            parallel,
            trainer_memory(config, shape, parallel),
            train(config, shape, parallel, trainers),
            generate(config, shape, engines) if engines else None,
            hand_over_s(config, shape, engines),
            config.max_async_level,
        )
