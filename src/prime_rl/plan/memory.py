"""Memory of one GPU, in bytes: of a trainer rank and of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from prime_rl.plan.config import GiB, PlanConfig
from prime_rl.plan.shapes import ModelShape
from prime_rl.trainer.parallel_config import ParallelDims

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


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters of the trainer."""

    trained: int
    frozen: int


def list_linear(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Linear layers of a decoder with inputs and outputs, by module name, without head and experts."""
    hidden, queries, keys = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
    }
    if shape.experts:
        sizes["mlp.gate"] = hidden, shape.experts
    else:
        sizes |= {f"mlp.{name}": (hidden, shape.inner) for name in ("gate_proj", "up_proj")}
        sizes["mlp.down_proj"] = shape.inner, hidden
    return {f"model.layers.{i}.{name}": size for i in range(shape.layers) for name, size in sizes.items()}


def count_lora(config: PlanConfig, shape: ModelShape) -> int:
    """Number of parameters of LoRA matrices, which experts do not have; 0 without LoRA."""
    lora = config.trainer.model.lora
    if lora is None:
        return 0
    from prime_rl.trainer.lora import match_modules  # lazy: imports torch

    linear = list_linear(shape)
    return lora.rank * sum(sum(linear[name]) for name in match_modules(linear, lora.target_modules))


def find_saved(config: PlanConfig, shape: ModelShape) -> dict[str, int]:
    """Parameters of the modules that `modules_to_save` trains in full, by module name."""
    lora = config.trainer.model.lora
    if lora is None or not lora.modules_to_save:
        return {}
    from prime_rl.trainer.lora import match_modules  # lazy: imports torch

    sizes = {name: inputs * outputs for name, (inputs, outputs) in list_linear(shape).items()}
    sizes |= dict.fromkeys(("model.embed_tokens", "lm_head"), shape.head_parameters)
    if shape.experts:
        size = shape.expert_parameters // shape.layers
        sizes |= {f"model.layers.{i}.mlp.experts": size for i in range(shape.layers)}
    return {name: sizes[name] for name in match_modules(sizes, lora.modules_to_save)}


def count_policy(config: PlanConfig, shape: ModelShape) -> ParameterCounts:
    """Parameters of the policy. With LoRA, an embedding or head that is trained in full is untied."""
    if config.trainer.model.lora is None:
        return ParameterCounts(shape.parameters, 0)
    saved = find_saved(config, shape)
    size = sum(saved.values())
    total = shape.parameters
    if shape.tied and {"lm_head", "model.embed_tokens"} & saved.keys():
        total += shape.head_parameters
    return ParameterCounts(count_lora(config, shape) + size, max(total - size, 0))


def count_critic(config: PlanConfig, shape: ModelShape) -> ParameterCounts:
    """Parameters of a critic with a backbone of its own: a copy of the policy without its output head."""
    if count_models(config) == 1:
        return ParameterCounts(0, 0)
    policy, saved = count_policy(config, shape), find_saved(config, shape)
    if "lm_head" in saved or (not shape.tied and config.trainer.model.lora is None):
        return ParameterCounts(policy.trained - shape.head_parameters, policy.frozen)
    is_separate = not shape.tied or "model.embed_tokens" in saved
    return ParameterCounts(policy.trained, policy.frozen - (shape.head_parameters if is_separate else 0))


def count_models(config: PlanConfig) -> int:
    """2 with a critic that has a backbone of its own, else 1."""
    return 2 if config.trainer.critic is not None and config.trainer.critic.backbone == "own" else 1


def logits_memory(config: PlanConfig, shape: ModelShape, parallel: ParallelDims) -> float:
    """Logits of one trainer rank.

    GPU kernels need one chunk in fp32 and its gradient in the model's precision. A vocabulary-parallel head has no
    kernels: its log-probs are kept if they are few, and of a chunk there are a gradient and a copy.
    """
    tokens = config.count_micro_tokens("cuda") / parallel.cp
    logits = tokens * shape.vocab / parallel.tp
    if parallel.tp == 1:
        return (4.0 + count_bytes(config)) * min(logits, FUSED_CHUNK)
    kept = logits if logits <= SAVED_CHUNKS * PLAIN_CHUNK else 0
    return 4.0 * (kept + 3 * min(logits, PLAIN_CHUNK))


def count_bytes(config: PlanConfig) -> int:
    """Bytes of a weight of the model on a GPU."""
    return {"float32": 4, "float64": 8}.get(config.trainer.model.dtype, 2)


def trainer_memory(config: PlanConfig, shape: ModelShape, parallel: ParallelDims) -> MemoryBreakdown:
    """One rank: sharded fp32 parameters, gradients and moments, gathered layers, saved activations.

    A critic with a backbone of its own is a second model whose activations are stored at the same time.
    """
    model, dims = config.trainer.model, parallel
    split = dims.tp * dims.pp
    shards = (dims.dp_shard or 1) * dims.cp * split
    policy, critic = count_policy(config, shape), count_critic(config, shape)
    trained, frozen = policy.trained + critic.trained, policy.frozen + critic.frozen
    width, wide = count_bytes(config), max(count_bytes(config), 4)
    # A single rank keeps a copy of masters that are in fp32 or on the CPU; several ranks gather one layer at a time.
    if shards > split:
        gathered = 2 * (shape.parameters - shape.head_parameters) / shape.layers / split
        gathered = 0.0 if frozen else gathered + shape.head_parameters / split
    else:
        gathered = trained / split if width < wide or model.optim_cpu_offload else 0.0
    tokens = config.count_micro_tokens("cuda") / dims.cp
    layers, layer_bytes = shape.layers / dims.pp, shape.layer_bytes * width / 2  # those of a shape are in bf16
    flows = dims.pp if dims.pp > 1 else 1  # micro-batches in flight in a pipeline
    if model.ac is None:
        activations = layers * layer_bytes / dims.tp * tokens * flows
    else:
        inputs = 0.0 if model.ac_offloading else width * shape.hidden * layers / model.ac.freq
        recomputed = layer_bytes / dims.tp * (layers * (1 - 1 / model.ac.freq) + 1)
        matrices = 0.45 * layer_bytes / dims.tp * layers if model.ac.mode == "selective" else 0.0
        activations = (inputs + recomputed + matrices) * tokens * flows
    on_gpu = 0.0 if model.optim_cpu_offload else trained / shards
    # Sharded frozen weights are loaded in fp32 if others of the model are trained in full.
    loaded_wide = shards > split and (config.trainer.critic is not None or find_saved(config, shape))
    parts = {
        "parameters": wide * on_gpu + (wide if loaded_wide else width) * frozen / shards,
        "gradients": wide * trained / shards,
        "moments": 2 * wide * on_gpu,
        "moving average": 4.0 * on_gpu if config.trainer.ema_decay is not None else 0.0,
        "gathered": width * gathered,
        "activations": count_models(config) * activations,
        "logits": logits_memory(config, shape, parallel),
        "runtime": RUNTIME,
    }
    return MemoryBreakdown(parts, config.cluster.spec.memory * GiB)


def count_engine_scale(config: PlanConfig) -> int:
    """Bytes of a number in an engine, relative to bf16."""
    return 2 if config.inference is not None and config.inference.model.dtype == "float32" else 1


def engine_memory(config: PlanConfig, shape: ModelShape) -> MemoryBreakdown:
    """One GPU of an engine, without the KV cache."""
    assert config.inference is not None
    weights = 2.0 * count_engine_scale(config) * shape.parameters / config.inference.parallel.tp
    limit = GPU_MEMORY_UTILIZATION * config.cluster.spec.memory * GiB
    return MemoryBreakdown({"weights": weights, "runtime": RUNTIME + 2 * LOGITS}, limit)


def cache_tokens(config: PlanConfig, shape: ModelShape) -> float:
    """Capacity of the KV cache of one engine, in tokens."""
    assert config.inference is not None
    memory, tp = engine_memory(config, shape), config.inference.parallel.tp
    free = max(memory.limit - memory.total, 0.0)
    return free / (count_engine_scale(config) * shape.kv_bytes / min(tp, shape.kv_heads))
