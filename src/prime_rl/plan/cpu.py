"""Estimates for a run on the processor of this machine: time per step, memory and total time.

Times are those of one thread each for the engine and every rank of the trainer. The speed of matrix products and of
memory is measured when the plan is made, in half a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prime_rl.plan.config import GiB, PlanConfig
from prime_rl.plan.memory import LOGITS, count_critic, count_models, count_policy
from prime_rl.plan.shapes import ModelShape, read_shape
from prime_rl.plan.speed import training_flops
from prime_rl.runtime.core_lease import MIN_PARAMETERS
from prime_rl.runtime.machine import FEW_CORES, find_memory, num_cores

ROWS = 256
"""Rows of the measured products, as in a micro-batch."""
COPIED_BYTES = 64 * 2**20
MEASURE_S = 0.25
TRAIN_SHARE, DECODE_SHARE, MEMORY_SHARE = 0.8, 0.5, 0.6
"""Achieved fraction of the measured figures: attention, norms and the loss are slower than products."""
RUNTIME = 0.5 * GiB
"""Libraries of a process."""
NUM_PROCESSES = 4
"""Trainer, engine, orchestrator and environment worker; ranks and a teacher are counted besides."""
STARTUP_S = 20.0


@dataclass(frozen=True)
class Machine:
    """Cores, memory in bytes, and the speed of one thread: FLOP/s of products, bytes per second copied."""

    cores: int
    memory: float
    flops: float
    bandwidth: float


@dataclass(frozen=True)
class CpuEstimate:
    """Seconds of one step by component, and bytes of memory by process."""

    training: float
    generation: float
    weight_update: float
    overlaps: bool
    trainer_bytes: float
    engine_bytes: float
    teacher_bytes: float
    memory: float

    @property
    def seconds(self) -> float:
        """Seconds per step: the slower side if both run at the same time, else the sum."""
        if self.overlaps:
            return max(self.training, self.generation) + self.weight_update
        return self.training + self.generation + self.weight_update

    @property
    def total_bytes(self) -> float:
        """Memory of all processes."""
        return self.trainer_bytes + self.engine_bytes + self.teacher_bytes + (NUM_PROCESSES - 2) * RUNTIME

    @property
    def fits(self) -> bool:
        """Whether all processes fit into the memory."""
        return self.total_bytes <= self.memory


def uses_bfloat16(config: PlanConfig) -> bool:
    """Whether trainer and engine are in bfloat16."""
    dtypes = [config.trainer.model.dtype, *([] if config.inference is None else [config.inference.model.dtype])]
    return set(dtypes) == {"bfloat16"}


def measure_machine(inputs: int, outputs: int, in_bfloat16: bool = False) -> Machine:
    """Measure one thread on products of this size; the best of several, since other processes disturb.

    They are in fp32, or `in_bfloat16` by instructions for it if the CPU has them.
    """
    import torch

    from rollouts.kernels.cpu import name_bf16_instructions
    from rollouts.kernels.linear import linear
    from rollouts.training.numerics import using_threads

    rounded = in_bfloat16 and bool(name_bf16_instructions())

    with using_threads(1):
        x, weight = torch.randn(ROWS, inputs), torch.randn(outputs, inputs)
        source, target = torch.ones(COPIED_BYTES // 4), torch.empty(COPIED_BYTES // 4)
        with torch.inference_mode():
            product_s = find_shortest(lambda: linear(x, weight, rounded=rounded))
        copy_s = find_shortest(lambda: target.copy_(source))
    return Machine(num_cores(), find_memory(), 2.0 * ROWS * inputs * outputs / product_s, 2 * COPIED_BYTES / copy_s)


def find_shortest(run: Callable[[], object]) -> float:
    """Shortest CPU time of one call, in seconds; time in which other processes have the core does not count."""
    shortest, end = float("inf"), time.thread_time() + MEASURE_S
    while time.thread_time() < end:
        start = time.thread_time()
        run()
        shortest = min(shortest, time.thread_time() - start)
    return shortest


def count_concurrent(config: PlanConfig, shape: ModelShape, machine: Machine, num_ranks: int) -> int:
    """Micro-batches that the trainer computes at once."""
    model = config.trainer.model
    has_dropout = model.lora is not None and model.lora.dropout > 0
    if num_ranks > 1 or shape.experts or model.ac is not None or model.compile is not None or has_dropout:
        return 1
    by_default = 2 if shape.parameters >= MIN_PARAMETERS and machine.cores <= FEW_CORES else 1
    return min(config.trainer.max_concurrent_micro_batches or by_default, machine.cores)


def estimate_cpu(config: PlanConfig, shape: ModelShape, machine: Machine) -> CpuEstimate:
    """Estimate one step; a group's prompt is computed once, in engine and trainer.

    Without `inference`, the engine is on another machine: only training is estimated. The ranks of `trainer.parallel`
    share the work, and those of a replica its weights; those that split the model share the activations.
    """
    num_ranks = config.trainer.parallel.num_ranks
    parallel = config.trainer.parallel.resolve(num_ranks)
    rollouts, completion = config.orchestrator.batch_size, float(config.completion_tokens)
    prompts = rollouts / config.orchestrator.rollouts_per_example * config.prompt_tokens
    tokens = rollouts * completion + prompts
    policy, critic = count_policy(config, shape), count_critic(config, shape)
    trained, frozen = policy.trained + critic.trained, policy.frozen + critic.frozen
    training = tokens * sum(training_flops(config, shape)) / (machine.flops * TRAIN_SHARE)
    num_updates = config.trainer.num_epochs * config.trainer.num_minibatches
    training += num_updates * 28.0 * trained / (machine.bandwidth * MEMORY_SHARE)
    training /= min(num_ranks, machine.cores)
    concurrent = min(rollouts, config.orchestrator.max_concurrent or rollouts)
    concurrent = concurrent if config.inference is None else min(concurrent, config.inference.max_batch_size)
    computed = 2.0 * concurrent * shape.active_parameters / (machine.flops * DECODE_SHARE)
    read = 4.0 * shape.active_parameters / (machine.bandwidth * MEMORY_SHARE)
    turns = rollouts / concurrent * config.workload.turns * config.workload.latency_s
    generation = rollouts / concurrent * completion * max(computed, read) + turns
    generation += 2.0 * prompts * shape.active_parameters / (machine.flops * TRAIN_SHARE)
    update = 6 * 4.0 * policy.trained / (machine.bandwidth * MEMORY_SHARE)  # written, digested, read, verified, packed
    micro = config.count_micro_tokens("cpu")
    kept = 2.0 * shape.layer_bytes * micro * (shape.layers if config.trainer.model.ac is None else 1)
    kept *= count_models(config)
    fixed = 16.0 if config.trainer.ema_decay is not None else 12.0  # weights, two moments, and their average
    cached = rollouts * (config.prompt_tokens + config.longest_completion) * 2.0 * shape.kv_bytes
    at_once = count_concurrent(config, shape, machine, num_ranks)
    weights = ((fixed + 4.0 * at_once) * trained + 4.0 * frozen) * parallel.dp_replicate
    activations = at_once * (kept * num_ranks / parallel.model_ranks + LOGITS * num_ranks)
    engine = count_engine_bytes(shape) + min(cached, machine.memory / 4)
    if config.weight_broadcast.type != "filesystem" or config.weight_broadcast.delta:
        engine += 4.0 * shape.parameters  # the new weights, in memory until they are packed
    if config.inference is None:
        generation = update = engine = 0.0
    teacher = None
    if (server := config.teacher_inference) is not None:
        teacher = shape if server.model.name == config.model.name else read_shape(server.model.name)
    return CpuEstimate(
        training=training,
        generation=generation,
        weight_update=update,
        overlaps=config.max_async_level > 0 and machine.cores > 1,
        trainer_bytes=weights + activations + num_ranks * RUNTIME,
        engine_bytes=engine,
        teacher_bytes=0.0 if teacher is None else count_engine_bytes(teacher),
        memory=machine.memory,
    )


def count_engine_bytes(shape: ModelShape) -> float:
    """Bytes of an engine without the KV cache; a tied head is packed beside the embedding."""
    return 4.0 * (shape.parameters + (shape.head_parameters if shape.tied else 0)) + RUNTIME


def describe_cpu(config: PlanConfig, shape: ModelShape, machine: Machine, estimate: CpuEstimate) -> Iterator[str]:
    """Lines of the report."""
    yield f"{config.model.name}: {shape.parameters / 1e9:.2f}B parameters"
    yield (
        f"this machine: {machine.cores} cores, {machine.memory / GiB:.0f} GiB; one thread measured at "
        f"{machine.flops / 1e9:.0f} GFLOP/s and {machine.bandwidth / 1e9:.0f} GB/s"
    )
    yield ""
    verdict, has_engine = "fits" if estimate.fits else "TOO MUCH", config.inference is not None
    engine = f", engine {estimate.engine_bytes / GiB:.1f}" if has_engine else ""
    engine += f", teacher {estimate.teacher_bytes / GiB:.1f}" if estimate.teacher_bytes else ""
    yield (
        f"memory              {verdict}: {estimate.total_bytes / GiB:.1f} of {estimate.memory / GiB:.0f} GiB "
        f"(trainer {estimate.trainer_bytes / GiB:.1f}{engine})"
    )
    yield f"train a batch       {estimate.training:8.1f} s"
    if has_engine:
        yield f"generate a batch    {estimate.generation:8.1f} s   {'overlapped' if estimate.overlaps else ''}".rstrip()
        yield f"update weights      {estimate.weight_update:8.1f} s"
    yield f"a step              {estimate.seconds:8.1f} s"
    if config.max_steps is not None:
        total = config.max_steps * estimate.seconds + STARTUP_S
        yield f"the run             {total / 60:8.1f} min  for {config.max_steps} steps"
    yield ""
    workload = config.workload
    if workload.prompt_tokens is None:
        yield f"- prompts of {config.prompt_tokens} tokens are assumed: set workload.prompt_tokens"
    if workload.completion_tokens is None:
        yield f"- completions of {config.completion_tokens} tokens are assumed: set workload.completion_tokens"
    if not has_engine:
        yield "- generation is not estimated: inference is off, so the engine is on another machine"
    if config.orchestrator.teacher_model is not None:
        yield "- not counted: the time in which the teacher scores samples"
    yield "- times are those of idle cores, often within a factor of two"
    if not estimate.fits:
        yield "- lower trainer.micro_bs or seq_len, set [trainer.model.ac], or train an adapter: [trainer.model.lora]"
