"""`plan`: the configuration of a run and a cluster --> memory, seconds of a step, who waits, and what to change."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from prime_rl.plan.config import PlanConfig
from prime_rl.plan.memory import Parts, cache_tokens, engine_memory, trainer_memory
from prime_rl.plan.shapes import Shape, read_shape
from prime_rl.plan.speed import Generation, Training, generate, hand_over_s, train
from prime_rl.trainer.config import ParallelDims
from prime_rl.utils.pydantic_config import run_command


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


def plan(config: PlanConfig) -> int:
    """Show the plan; 0 when everything fits, 1 when something does not."""
    shape = read_shape(config.model.name)
    split = choose_split(config, shape)
    lines = list(describe(config, shape, split))
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if split.memory.fits and math.isfinite(split.seconds) else 1


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


def describe(config: PlanConfig, shape: Shape, split: Split) -> Iterator[str]:
    """The plan in lines."""
    cluster, tokens = config.cluster, split.training.tokens
    dims = ", ".join(f"{name} {size}" for name, size in mesh_sizes(split.parallel).items() if size > 1) or "one rank"
    tp = config.inference.parallel.tp if config.inference is not None else 0
    yield f"{config.model.name}: {shape.parameters / 1e9:.2f}B parameters" + (
        f", {shape.active_parameters / 1e9:.2f}B per token" if shape.experts else ""
    )
    yield f"{cluster.num_gpus} x {cluster.gpu}: {split.trainer_gpus} train ({dims}), {split.engines} engines of {tp}"
    yield ""
    yield f"trainer, each GPU   {fits(split.memory)}"
    if config.inference is not None and split.generation is not None:
        memory = engine_memory(config, shape)
        yield f"engine, each GPU    {fits(memory)}"
        yield (
            f"keys and values     {cache_tokens(config, shape):,.0f} tokens an engine: "
            f"{split.generation.concurrent:,.0f} of {split.generation.wanted:,.0f} rollouts at once"
        )
    yield ""
    rate = tokens / split.training.seconds
    yield f"train a batch       {split.training.seconds:8.2f} s   {rate:,.0f} tokens/s on {split.trainer_gpus} GPUs"
    if split.generation is not None:
        rate = config.orchestrator.batch_size * config.completion_tokens / split.generation_s
        yield f"generate a batch    {split.generation_s:8.2f} s   {rate:,.0f} tokens/s on {split.engines} engines"
    how = "while both go on" if split.level else "both wait"
    yield f"hand weights over   {split.hand_over:8.2f} s   {how}"
    idle = "trainer waits {trainer:.0%}, engines wait {engines:.0%}".format(**split.idle)
    yield f"a step              {split.seconds:8.2f} s   {idle}"
    advice = list(advise(config, shape, split))
    yield ""
    yield from (f"- {line}" for line in advice or ["everything fits, and no other split of these GPUs is faster"])


def fits(memory: Parts) -> str:
    """`fits` or `too much` before the sum."""
    return f"{'fits' if memory.fits else 'TOO MUCH'}: {memory}"


def mesh_sizes(parallel: ParallelDims) -> dict[str, int]:
    """The mesh by dimension."""
    return {name: getattr(parallel, name) or 1 for name in ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")}


def advise(config: PlanConfig, shape: Shape, split: Split) -> Iterator[str]:
    """What to change, by what it would bring."""
    if not split.memory.fits:
        yield from save_memory(config, shape, split)
    if split.generation is not None:
        yield from advise_engines(config, shape, split)
    if not math.isfinite(split.seconds):
        return
    if not config.max_async_level and split.generation is not None:
        both = max(split.training.seconds, split.generation.steady)
        yield f"max_async_level = 1: {both:.2f} s a step instead of {split.seconds:.2f}, the two sides work at once"
    best = min(
        (s for s in possible_splits(config, shape, None) if s.memory.fits), key=lambda s: s.seconds, default=None
    )
    if best is not None and best.seconds < 0.95 * split.seconds:
        yield (
            f"cluster.trainer_gpus = {best.trainer_gpus} (and {best.engines} engines): {best.seconds:.2f} s a step "
            f"instead of {split.seconds:.2f}"
        )
    if split.level and split.hand_over > split.seconds:
        by_files = config.weight_broadcast.type == "filesystem"
        cure = "a faster file system (/dev/shm)" if by_files else 'weight_broadcast.type = "filesystem" in /dev/shm'
        yield (
            f"weights take {split.hand_over:.1f} s to hand over, longer than a step: samples will be older than "
            f"max_async_level wants and engines will be waited for; use {cure} or LoRA"
        )


def advise_engines(config: PlanConfig, shape: Shape, split: Split) -> Iterator[str]:
    """Memory and queues of the engines."""
    assert config.inference is not None and split.generation is not None
    tp, memory = config.inference.parallel.tp, engine_memory(config, shape)
    if not memory.fits or split.generation.concurrent < 1:
        yield f"inference.parallel.tp = {2 * tp}: an engine does not hold the model and one sequence with tp = {tp}"
    elif split.generation.concurrent < 0.9 * split.generation.wanted:
        by_memory = cache_tokens(config, shape) / (config.workload.prompt_tokens + config.completion_tokens / 2)
        limit = "memory for keys and values" if by_memory < config.inference.max_batch_size else "max_batch_size"
        yield f"rollouts queue: {limit} lets {split.generation.concurrent:,.0f} run at once on an engine"


def save_memory(config: PlanConfig, shape: Shape, split: Split) -> Iterator[str]:
    """Changes to the trainer that make it fit, the cheapest first; those that do not help are left out."""
    changes: dict[str, dict[str, object]] = {
        "[trainer.model.ac]: layers keep their inputs only, for a third more operations": {"ac": {}},
        "[trainer.model.ac] and optim_cpu_offload: the optimizer works in host memory": {
            "ac": {},
            "optim_cpu_offload": True,
        },
        "[trainer.model.lora] and ac: an adapter is trained": {"ac": {}, "lora": {}},
    }
    found = False
    for words, change in changes.items():
        model = type(config.trainer.model).model_validate(config.trainer.model.model_dump() | change)
        changed = config.model_copy(update={"trainer": config.trainer.model_copy(update={"model": model})})
        memory = trainer_memory(changed, shape, split.parallel)
        if memory.fits and model != config.trainer.model:
            found = True
            yield f"{words}: {memory}"
    dims = split.parallel
    for more in (2, 4, 8, 16, 32, 64):
        wider = dims.model_copy(update={"dp_shard": (dims.dp_shard or 1) * more})
        if trainer_memory(config, shape, wider).fits:
            found = True
            yield f"{split.trainer_gpus * more} GPUs for the trainer: {trainer_memory(config, shape, wider)}"
            break
    if not found:
        yield f"shorter packs: seq_len below {config.seq_len}, or trainer.parallel.cp: activations grow with tokens"


def main() -> None:
    """Console script `plan`."""
    run_command(
        "plan",
        PlanConfig,
        plan,
        summary="Say what fits on a cluster, how long a step takes, who waits for whom, and what to change.",
    )


if __name__ == "__main__":
    main()
