"""Tensor parallelism: splits attention by heads, the feed-forward by columns, experts, and the vocabulary by rows.

    x --copy--> q k v --attention over local heads--> o --sum--> + x      copy: backward sums; sum: forward sums
    x --copy--> gate, up --> silu(gate) * up --> down --sum--> + x      (Megatron-LM, 1909.08053)

Residual stream, norms and router are replicated. Logits stay split over the vocabulary: see `VocabPart`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from prime_rl.trainer.models.causal_lm import Attention, CausalLM, GatedMLP
from prime_rl.trainer.models.decoder_config import DecoderConfig
from prime_rl.trainer.models.moe import SparseMLP
from prime_rl.trainer.parallel.collectives import all_reduce_sum, copy_to_group
from prime_rl.trainer.parallel.expert_parallel import ParallelExperts
from prime_rl.trainer.parallel_dims import Mesh, MeshAxisGroup
from prime_rl.trainer.sharded_checkpoint import ShardSlice
from rollouts.training.rl_losses import VocabPart

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Column-parallel matrices: split by outputs."""

ROWS = ("o_proj", "down_proj")
"""Row-parallel matrices: split by inputs; outputs are summed over ranks."""

VOCABULARY = ("embed_tokens", "lm_head")


def find_split_dim(name: str) -> int | None:
    """Dimension along which a parameter is split; None for replicated parameters."""
    parts = name.split(".")
    if parts[-2:-1] == ["experts"]:
        return 0
    if len(parts) > 2 and parts[-2] in ("lora_A", "lora_B"):
        kind, half = parts[-3], parts[-2]
        return 0 if kind in COLUMNS and half == "lora_B" else 1 if kind in ROWS and half == "lora_A" else None
    kind = parts[-2] if len(parts) > 1 else ""
    return 0 if kind in (*COLUMNS, *VOCABULARY) else 1 if kind in ROWS else None


def is_partial(name: str) -> bool:
    """Whether the gradient of this replicated parameter is partial on each rank and must be summed."""
    parts = name.split(".")
    if len(parts) > 2 and parts[-2] in ("lora_A", "lora_B"):
        return find_split_dim(name) is None
    return name.endswith(("q_norm.weight", "k_norm.weight", "mlp.gate.weight"))


def check_shape(config: DecoderConfig, tp: int, ep: int) -> None:
    """`ValueError` when tp or ep does not divide heads, columns or experts."""
    if ep > 1 and (not config.num_experts or config.num_experts % (ep * tp)):
        reason = f"ep {ep} * tp {tp} does not divide its {config.num_experts}" if config.num_experts else "it has none"
        raise ValueError(f"parallel.ep {ep} needs a model with divisible experts, but {reason}: set ep = 1")
    if tp > 1 and (config.out_bias or config.mlp_bias):
        raise ValueError(f"parallel.tp {tp}: biases of row-parallel layers are not supported: set tp = 1")
    for what, number in (
        ("attention heads", config.num_attention_heads),
        ("key heads", config.num_key_value_heads),
        ("columns of the feed-forward", config.intermediate_size),
        ("experts", config.num_experts),
    ):
        if number % tp:
            raise ValueError(f"parallel.tp {tp} does not divide the {number} {what} of this model")


def split_parameters(model: CausalLM, mesh: Mesh) -> dict[str, ShardSlice]:
    """Replace every split tensor of `model` by this rank's slice, in place; returns the slices by name."""
    tp, ep = mesh.tp, mesh.ep
    new: dict[int, nn.Parameter] = {}
    boxes: dict[str, ShardSlice] = {}
    for path, module in model.named_modules():
        for own_name, parameter in list(module.named_parameters(recurse=False)):
            name = f"{path}.{own_name}"
            box = _find_slice(name, parameter, tp, ep)
            if box is None:
                continue
            if id(parameter) not in new:
                part = parameter.detach()[tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))]
                new[id(parameter)] = nn.Parameter(part.clone(), requires_grad=parameter.requires_grad)
                boxes[name] = box
            setattr(module, own_name, new[id(parameter)])
    for _, module in list(model.named_modules()):
        if isinstance(module, SparseMLP):
            module.experts = ParallelExperts(module.experts, tp, ep)
        if tp.size > 1 and isinstance(module, Attention | GatedMLP | SparseMLP):
            _add_reduce_hooks(module, tp)
    if tp.size > 1:
        rows = model.config.vocab_size
        table: Any = model.model.embed_tokens.weight
        model.model.embed_tokens = VocabParallelEmbedding(table, vocab_part(rows, tp))  # type: ignore[assignment]
    return boxes


def _find_slice(name: str, parameter: Tensor, tp: MeshAxisGroup, ep: MeshAxisGroup) -> ShardSlice | None:
    dim = find_split_dim(name)
    is_expert = dim == 0 and parameter.ndim == 3
    size, rank = (tp.size * ep.size, tp.rank * ep.size + ep.rank) if is_expert else (tp.size, tp.rank)
    if dim is None or size == 1:
        return None
    whole = tuple(parameter.shape)
    width = -(-whole[dim] // size)
    start = min(rank * width, whole[dim])
    offset, shape = [0] * len(whole), list(whole)
    offset[dim], shape[dim] = start, min(width, whole[dim] - start)
    return ShardSlice(tuple(offset), tuple(shape), whole)


def vocab_part(vocab_size: int, tp: MeshAxisGroup) -> VocabPart:
    """This rank's rows of embedding and head: equal chunks, of which the last may be shorter."""
    assert tp.group is not None
    widest = -(-vocab_size // tp.size)
    return VocabPart(min(tp.rank * widest, vocab_size), widest, tp.group)


class VocabParallelEmbedding(nn.Module):
    """Embedding split by vocabulary rows; out-of-range tokens contribute zeros to the sum over ranks."""

    def __init__(self, weight: nn.Parameter, part: VocabPart) -> None:
        super().__init__()
        self.weight, self.part = weight, part

    def forward(self, ids: Int[Tensor, " tokens"]) -> Float[Tensor, "tokens hidden"]:
        rows, in_range = self.part.local_rows(ids, self.weight.shape[0])
        out = torch.where(in_range[:, None], F.embedding(rows, self.weight), 0.0)
        return all_reduce_sum(out, self.part.group)


def _add_reduce_hooks(module: nn.Module, tp: MeshAxisGroup) -> None:
    """Add hooks that all-reduce the output and the gradient of the first input."""

    def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (copy_to_group(args[0], tp.group), *args[1:])

    def after(_: nn.Module, __: Any, out: Tensor) -> Any:
        return all_reduce_sum(out, tp.group)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)
