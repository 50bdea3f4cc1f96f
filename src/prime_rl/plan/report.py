"""Text report of a plan: memory, time per step and recommendations."""

from __future__ import annotations

import math
from collections.abc import Iterator

from prime_rl.plan.config import PlanConfig
from prime_rl.plan.memory import MemoryBreakdown, cache_tokens, engine_memory, trainer_memory
from prime_rl.plan.shapes import ModelShape
from prime_rl.plan.split import Split, possible_splits

MESH_DIMENSIONS = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")


def describe(config: PlanConfig, shape: ModelShape, split: Split) -> Iterator[str]:
    """Lines of the report."""
    cluster, tokens = config.cluster, split.training.tokens
    sizes = {name: getattr(split.parallel, name) or 1 for name in MESH_DIMENSIONS}
    dims = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"
    tp = config.inference.parallel.tp if config.inference is not None else 0
    yield f"{config.model.name}: {shape.parameters / 1e9:.2f}B parameters" + (
        f", {shape.active_parameters / 1e9:.2f}B per token" if shape.experts else ""
    )
    gpu = "h100 (assumed: cluster.gpu names another)" if cluster.gpu == "auto" else cluster.gpu
    teacher = f", {split.teacher_gpus} for the teacher" if split.teacher_gpus else ""
    yield f"{cluster.num_gpus} x {gpu}: {split.trainer_gpus} train ({dims}), {split.engines} engines of {tp}{teacher}"
    yield ""
    yield f"trainer, each GPU   {fits(split.memory)}"
    if config.inference is not None and split.generation is not None:
        memory = engine_memory(config, shape)
        yield f"engine, each GPU    {fits(memory)}"
        yield (
            f"keys and values     {cache_tokens(config, shape):,.0f} tokens an engine: "
            f"{split.generation.concurrent:,.0f} of {split.generation.demand:,.0f} rollouts at once"
        )
    yield ""
    rate = tokens / split.training.seconds
    yield f"train a batch       {split.training.seconds:8.2f} s   {rate:,.0f} tokens/s on {split.trainer_gpus} GPUs"
    if split.generation is not None:
        rate = config.orchestrator.batch_size * config.completion_tokens / split.generation_s
        yield f"generate a batch    {split.generation_s:8.2f} s   {rate:,.0f} tokens/s on {split.engines} engines"
    how = "overlapped" if split.level else "trainer and engines wait"
    yield f"update weights      {split.weight_update:8.2f} s   {how}"
    idle = "trainer waits {trainer:.0%}, engines wait {engines:.0%}".format(**split.idle)
    yield f"a step              {split.seconds:8.2f} s   {idle}"
    advice = list(advise(config, shape, split))
    yield ""
    yield from (f"- {line}" for line in advice or ["everything fits, and no other split of these GPUs is faster"])
    if config.orchestrator.teacher_model is not None:
        yield "- not counted: memory of the teacher's server, and the time in which the teacher scores samples"


def fits(memory: MemoryBreakdown) -> str:
    """The breakdown, prefixed with `fits` or `TOO MUCH`."""
    return f"{'fits' if memory.fits else 'TOO MUCH'}: {memory}"


def advise(config: PlanConfig, shape: ModelShape, split: Split) -> Iterator[str]:
    """Recommended changes with their estimated effect."""
    if not split.memory.fits:
        yield from save_memory(config, shape, split)
    if split.generation is not None:
        yield from advise_engines(config, shape, split)
    if not math.isfinite(split.seconds):
        return
    if not config.max_async_level and split.generation is not None:
        overlapped = max(split.training.seconds, split.generation.steady)
        yield f"max_async_level = 1: {overlapped:.2f} s a step instead of {split.seconds:.2f}, as both overlap"
    best = min(
        (s for s in possible_splits(config, shape, None) if s.memory.fits), key=lambda s: s.seconds, default=None
    )
    if best is not None and best.seconds < 0.95 * split.seconds:
        yield (
            f"cluster.trainer_gpus = {best.trainer_gpus} (and {best.engines} engines): {best.seconds:.2f} s a step "
            f"instead of {split.seconds:.2f}"
        )
    if split.level and split.weight_update > split.seconds:
        by_files = config.weight_broadcast.type == "filesystem"
        fix = "a faster file system (/dev/shm)" if by_files else 'weight_broadcast.type = "filesystem" in /dev/shm'
        yield (
            f"a weight update takes {split.weight_update:.1f} s, longer than a step: weights arrive late, so "
            f"the trainer will wait for samples that max_async_level allows; use {fix} or LoRA"
        )


def advise_engines(config: PlanConfig, shape: ModelShape, split: Split) -> Iterator[str]:
    """Recommendations on memory and concurrency of the engines."""
    assert config.inference is not None and split.generation is not None
    tp, memory = config.inference.parallel.tp, engine_memory(config, shape)
    if not memory.fits or split.generation.concurrent < 1:
        yield f"inference.parallel.tp = {2 * tp}: the model and one sequence do not fit on an engine with tp = {tp}"
    elif split.generation.concurrent < 0.9 * split.generation.demand:
        by_memory = cache_tokens(config, shape) / (config.prompt_tokens + config.completion_tokens / 2)
        limit = "KV cache memory" if by_memory < config.inference.max_batch_size else "max_batch_size"
        yield f"rollouts queue: {limit} allows {split.generation.concurrent:,.0f} at once on an engine"


def save_memory(config: PlanConfig, shape: ModelShape, split: Split) -> Iterator[str]:
    """Changes of the trainer with which it fits, cheapest first."""
    changes: dict[str, dict[str, object]] = {
        "[trainer.model.ac]: checkpoint layer inputs, for a third more FLOPs": {"ac": {}},
        "[trainer.model.ac] and optim_cpu_offload: keep optimizer states in host memory": {
            "ac": {},
            "optim_cpu_offload": True,
        },
        "[trainer.model.lora] and ac: train an adapter": {"ac": {}, "lora": {}},
    }
    has_fix = False
    for description, change in changes.items():
        model = type(config.trainer.model).model_validate(config.trainer.model.model_dump() | change)
        changed = config.model_copy(update={"trainer": config.trainer.model_copy(update={"model": model})})
        memory = trainer_memory(changed, shape, split.parallel)
        if memory.fits and model != config.trainer.model:
            has_fix = True
            yield f"{description}: {memory}"
    dims = split.parallel
    for more in (2, 4, 8, 16, 32, 64):
        wider = dims.model_copy(update={"dp_shard": (dims.dp_shard or 1) * more})
        if trainer_memory(config, shape, wider).fits:
            has_fix = True
            yield f"{split.trainer_gpus * more} GPUs for the trainer: {trainer_memory(config, shape, wider)}"
            break
    if not has_fix:
        yield f"shorter packs: seq_len below {config.seq_len}, or trainer.parallel.cp: activations grow with tokens"
