"""Memory of one GPU, in bytes: of a trainer rank and of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from prime_rl.plan.config import GiB, PlanConfig
from prime_rl.plan.shapes import ModelShape
from prime_rl.trainer.config import ParallelDims

RUNTIME = 1.5 * GiB
"""CUDA context, libraries, communication buffers, fragmentation."""
LOGITS = 16 * 2**20 * 4 * 3
"""One chunk of the output layer on a CPU, or of an engine: logits in fp32, their gradient and a copy."""
FUSED_CHUNK, PLAIN_CHUNK, SAVED_CHUNKS = 2**27, 2**26, 4
"""Logits in a chunk of the output layer on a GPU, with and without kernels; chunks kept for the backward pass."""
GPU_MEMORY_UTILIZATION = 0.9
"""Fraction of GPU memory that an engine uses."""


@dataclass(frozen=True)
class MemoryBreakdown:
    """Named memory components, in bytes."""

    parts: dict[str, float]
    limit: float

    @property
    def total(self) -> float:
        """Sum of all components."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether they fit on the GPU."""
        return self.total <= self.limit

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {size / GiB:.1f}" for name, size in self.parts.items() if size >= 0.05 * GiB)
        return f"{self.total / GiB:.1f} of {self.limit / GiB:.0f} GiB ({shown})"


def count_lora(config: PlanConfig, shape: ModelShape) -> int:
    """Number of LoRA parameters; 0 without LoRA."""
    lora = config.trainer.model.lora
    if lora is None:
        return 0
    hidden, queries, keys = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    copies = max(shape.experts, 1)
    sizes = {
        "q_proj": hidden + queries,
        "k_proj": hidden + keys,
        "v_proj": hidden + keys,
        "o_proj": hidden + queries,
        "gate_proj": (hidden + shape.inner) * copies,
        "up_proj": (hidden + shape.inner) * copies,
        "down_proj": (hidden + shape.inner) * copies,
    }
    return lora.rank * shape.layers * sum(sizes.get(name, 0) for name in lora.target_modules)


def logits_memory(config: PlanConfig, shape: ModelShape, parallel: ParallelDims) -> float:
    """Logits of one trainer rank.

    GPU kernels need one chunk in fp32 and its gradient in bf16. A vocabulary-parallel head has no kernels: its
    log-probs are kept if they are few, and of a chunk there are a gradient and a copy.
    """
    tokens = config.count_micro_tokens("cuda") / parallel.cp
    logits = tokens * shape.vocab / parallel.tp
    if parallel.tp == 1:
        return 6.0 * min(logits, FUSED_CHUNK)
    kept = logits if logits <= SAVED_CHUNKS * PLAIN_CHUNK else 0
    return 4.0 * (kept + 3 * min(logits, PLAIN_CHUNK))


def trainer_memory(config: PlanConfig, shape: ModelShape, parallel: ParallelDims) -> MemoryBreakdown:
    """One rank: sharded fp32 parameters, gradients and moments, gathered bf16 layers, saved activations."""
    model, dims = config.trainer.model, parallel
    split = dims.tp * dims.pp
    shards = (dims.dp_shard or 1) * dims.cp * split
    total, trained = shape.parameters, count_lora(config, shape) or shape.parameters
    frozen = total - trained if trained < total else 0
    # A single rank keeps a bf16 copy of its fp32 parameters; several ranks gather one layer at a time.
    gathered = total / split if shards == split else 2 * (total - shape.head_parameters) / shape.layers / split
    gathered = 0.0 if frozen else gathered + (shape.head_parameters / split if shards > split else 0)
    tokens = config.count_micro_tokens("cuda") / dims.cp
    layers = shape.layers / dims.pp
    flows = dims.pp if dims.pp > 1 else 1  # micro-batches in flight in a pipeline
    if model.ac is None:
        activations = layers * shape.layer_bytes / dims.tp * tokens * flows
    else:
        inputs = 0.0 if model.ac_offloading else 2.0 * shape.hidden * layers / model.ac.freq
        recomputed = shape.layer_bytes / dims.tp * (layers * (1 - 1 / model.ac.freq) + 1)
        matrices = 0.45 * shape.layer_bytes / dims.tp * layers if model.ac.mode == "selective" else 0.0
        activations = (inputs + recomputed + matrices) * tokens * flows
    optimizer = 0.0 if model.optim_cpu_offload else 8.0 * trained / shards
    parts = {
        "parameters": (0.0 if model.optim_cpu_offload else 4.0) * trained / shards + 2.0 * frozen / shards,
        "gradients": 4.0 * trained / shards,
        "moments": optimizer,
        "gathered": 2.0 * gathered,
        "activations": activations,
        "logits": logits_memory(config, shape, parallel),
        "runtime": RUNTIME,
    }
    return MemoryBreakdown(parts, config.cluster.spec.memory * GiB)


def engine_memory(config: PlanConfig, shape: ModelShape) -> MemoryBreakdown:
    """One GPU of an engine, without the KV cache."""
    assert config.inference is not None
    weights = 2.0 * shape.parameters / config.inference.parallel.tp
    limit = GPU_MEMORY_UTILIZATION * config.cluster.spec.memory * GiB
    return MemoryBreakdown({"weights": weights, "runtime": RUNTIME + 2 * LOGITS}, limit)


def cache_tokens(config: PlanConfig, shape: ModelShape) -> float:
    """Capacity of the KV cache of one engine, in tokens."""
    assert config.inference is not None
    memory, tp = engine_memory(config, shape), config.inference.parallel.tp
    free = max(memory.limit - memory.total, 0.0)
    return free / (shape.kv_bytes / min(tp, shape.kv_heads))
