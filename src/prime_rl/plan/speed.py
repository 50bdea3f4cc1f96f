"""Time estimates of a training step, a batch of rollouts and a weight update: data-sheet bound / efficiency."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from prime_rl.plan.config import Gpu, PlanConfig
from prime_rl.plan.memory import cache_tokens, count_critic, count_lora, count_models, count_policy
from prime_rl.plan.shapes import ModelShape
from prime_rl.trainer.parallel_config import ParallelDims

LAUNCH_S = 6e-6 * 4
"""Launch overhead of one layer in a decode step, independent of the batch size."""
GRID = 64
PUBLISH_S_PER_GB, RECEIVE_S_PER_GB = 0.43, 1.25
"""Process-group transfer: copying and hashing; sending and verifying. See `benchmarks/bench_sync.py`."""


@dataclass(frozen=True)
class Training:
    """Seconds of one optimizer step, by component."""

    compute: float
    exchange: float
    optimizer: float
    tokens: float

    @property
    def seconds(self) -> float:
        """Communication overlaps with compute; the optimizer does not."""
        return max(self.compute, self.exchange) + self.optimizer


@dataclass(frozen=True)
class Generation:
    """Seconds of one batch: at steady load (`steady`), and from start to the last token (`alone`)."""

    steady: float
    alone: float
    concurrent: float
    demand: float
    token_s: float


def training_flops(config: PlanConfig, shape: ModelShape) -> tuple[float, float, float]:
    """FLOPs of one token for (dense layers, experts, attention): forward, backward and recomputation of every epoch.

    Frozen base weights have no weight gradient; the chunked output layer is always computed twice. A critic with a
    backbone of its own doubles the layers.
    """
    passes, epochs = 2.0 + 2.0 + (0.0 if count_lora(config, shape) else 2.0), config.trainer.num_epochs
    num_models, before = count_models(config), 2.0 * has_first_pass(config)
    recompute = 0.0 if config.trainer.model.ac is None else 2.0 / config.trainer.model.ac.freq
    if config.trainer.model.ac is not None and config.trainer.model.ac.mode == "selective":
        recompute *= 0.2
    of_layers = num_models * (epochs * (passes + recompute) + before)
    matrices = of_layers * (shape.attention_parameters + (0 if shape.experts else shape.active_inner_parameters))
    matrices += (epochs * (passes + 2.0) + before) * shape.head_parameters
    experts = of_layers * shape.active_inner_parameters if shape.experts else 0.0
    length = config.prompt_tokens + config.completion_tokens
    attention = num_models * shape.attention_flops(length / 2) * (epochs * (3.5 + recompute / 2) + before / 2)
    return matrices, experts, attention


def has_first_pass(config: PlanConfig) -> bool:
    """Whether a forward pass over the batch comes before the first update: for values, or log-probs of the trainer."""
    return config.trainer.critic is not None or config.trainer.loss.old_logprobs == "recomputed"


def train(config: PlanConfig, shape: ModelShape, parallel: ParallelDims, num_gpus: int) -> Training:
    """One step over `orchestrator.batch_size` rollouts: all of its optimizer steps."""
    gpu, share = config.cluster.spec, config.efficiency
    epochs, minibatches = config.trainer.num_epochs, config.trainer.num_minibatches
    tokens = config.orchestrator.batch_size * float(config.prompt_tokens + config.completion_tokens)
    matrices, experts, attention = training_flops(config, shape)
    peak = gpu.tflops * 1e12
    token_s = matrices / (peak * share.matmul) + experts / (peak * share.experts) + attention / (peak * share.attention)
    micros = max(tokens / (num_gpus * config.count_micro_tokens("cuda")), minibatches)
    bubble = 1 + (parallel.pp - 1) / max(micros / minibatches * parallel.pp * parallel.pp_stages, 1)
    trained = count_policy(config, shape).trained + count_critic(config, shape).trained
    link = link_speed(config, gpu, num_gpus) * share.link
    shards = (parallel.dp_shard or 1) * parallel.cp
    gathers = 2 * epochs + has_first_pass(config)
    moved = 2.0 * gathers * count_models(config) * shape.parameters * (shards > 1)
    moved += 4.0 * epochs * trained * (num_gpus > 1)
    moved /= parallel.tp * parallel.pp
    cut = shards * parallel.tp * parallel.pp
    return Training(
        compute=tokens * token_s / num_gpus * bubble,
        exchange=moved * micros / link,
        optimizer=epochs * minibatches * 28.0 * trained / cut / (gpu.bandwidth * 1e9 * share.memory),
        tokens=tokens,
    )


def link_speed(config: PlanConfig, gpu: Gpu, num_gpus: int) -> float:
    """Bytes per second of the slowest link of a ring over the ranks."""
    within = num_gpus <= config.cluster.gpus_per_node
    return (gpu.link if within else min(config.cluster.network_gbs, gpu.link)) * 1e9


def decode_s(config: PlanConfig, shape: ModelShape, batch: float, context: float) -> float:
    """One decode step with `batch` sequences of `context` tokens: bound by memory or by compute."""
    assert config.inference is not None
    gpu, tp = config.cluster.spec, config.inference.parallel.tp
    touched = 1.0
    if shape.experts:  # experts without tokens are not read
        touched = 1 - (1 - shape.active / shape.experts) ** batch
    weights = 2.0 * (shape.parameters - shape.expert_parameters * (1 - touched))
    read = (weights + batch * context * shape.kv_bytes) / tp / (gpu.bandwidth * 1e9 * config.efficiency.memory)
    computed = 2.0 * batch * shape.active_parameters / tp / (gpu.tflops * 1e12 * config.efficiency.matmul)
    return max(read, computed) + LAUNCH_S * shape.layers


def generate(config: PlanConfig, shape: ModelShape, engines: int) -> Generation:
    """One batch of rollouts on `engines` engines."""
    assert config.inference is not None
    rollouts, mean = config.orchestrator.batch_size, float(config.completion_tokens)
    context = config.prompt_tokens + mean / 2
    waiting = config.workload.turns * config.workload.latency_s
    level = config.max_async_level
    demand = rollouts * (1.0 + (level > 0)) * max(config.orchestrator.oversampling_factor, 1.0)
    demand = min(demand, config.orchestrator.max_concurrent or demand) / engines
    capacity = min(config.inference.max_batch_size, cache_tokens(config, shape) / context)
    concurrent = min(demand, capacity)
    if concurrent < 1:
        return Generation(math.inf, math.inf, concurrent, demand, math.inf)
    # Fixed point: rollouts that wait for the environment do not take part in a decode step.
    batch = concurrent
    for _ in range(20):
        step = decode_s(config, shape, batch, context)
        batch = max(concurrent * mean * step / (mean * step + waiting), min(concurrent, 1.0))
    prefill = prefill_s(config, shape, rollouts / engines)
    steady = rollouts / engines * (mean * step + waiting) / concurrent + prefill
    lengths = list(quantiles(mean, config.workload.spread, config.longest_completion))
    alone, before = prefill + waiting, 0.0
    for i, length in enumerate(lengths):
        active = min(rollouts / engines * (1 - i / GRID), concurrent)
        alone += (length - before) * decode_s(config, shape, max(active, 1.0), context)
        before = length
    return Generation(steady, max(alone, steady), concurrent, demand, step)


def quantiles(mean: float, spread: float, longest: int) -> Iterator[float]:
    """Quantiles of a log-normal length distribution with this mean, truncated at `longest`."""
    from statistics import NormalDist

    location = math.log(mean) - spread**2 / 2
    for i in range(GRID):
        yield min(math.exp(location + spread * NormalDist().inv_cdf((i + 0.5) / GRID)), float(longest))


def prefill_s(config: PlanConfig, shape: ModelShape, rollouts: float) -> float:
    """Prefill seconds of `rollouts` rollouts on one engine; a group's prompt is computed once."""
    assert config.inference is not None
    gpu, tp = config.cluster.spec, config.inference.parallel.tp
    shared = config.orchestrator.rollouts_per_example if config.inference.cache.enable_prefix_caching else 1
    tokens = rollouts / shared * config.prompt_tokens
    return 2.0 * tokens * shape.active_parameters / tp / (gpu.tflops * 1e12 * config.efficiency.matmul)


def weight_update_s(config: PlanConfig, shape: ModelShape, engines: int) -> float:
    """Weight update: written once and read by all engines in parallel, or sent to each engine."""
    lora = config.trainer.model.lora
    size = 2.0 * (shape.parameters if lora is None or lora.merge else count_policy(config, shape).trained)
    if config.weight_broadcast.type == "filesystem":
        return 2 * size / (config.cluster.disk_gbs * 1e9)
    gigabytes = size / 1e9
    return gigabytes * (PUBLISH_S_PER_GB + max(RECEIVE_S_PER_GB, engines / config.cluster.network_gbs))
