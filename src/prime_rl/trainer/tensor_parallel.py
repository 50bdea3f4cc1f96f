"""Tensor parallelism: each rank holds some heads, some columns of the feed-forward, some experts and some tokens' rows.

    x --copy--> q k v --attention over own heads--> o --sum--> + x      copy: backward sums; sum: forward sums
    x --copy--> gate, up --> silu(gate) * up --> down --sum--> + x      (Megatron-LM, 1909.08053)

The residual stream, the norms and the router are whole on every rank. The output head stays cut: see `VocabPart`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from prime_rl.trainer.collectives import copy_to_all, sum_over
from prime_rl.trainer.expert_parallel import PartExperts
from prime_rl.trainer.models.causal_lm import MLP, Attention, CausalLM, DecoderConfig
from prime_rl.trainer.models.moe import SparseMLP
from prime_rl.trainer.parallel_dims import Mesh, Team
from prime_rl.trainer.shards import Box
from rollouts.training.rl_losses import VocabPart

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Matrices of which each rank computes some outputs."""

ROWS = ("o_proj", "down_proj")
"""Matrices of which each rank has some inputs; their outputs are sums over ranks."""

VOCABULARY = ("embed_tokens", "lm_head")
EXPERTS = ("gate_up_proj", "down_proj")


def find_cut(name: str) -> int | None:
    """The dimension along which a parameter is cut; None for one that every rank holds whole."""
    parts = name.split(".")
    if parts[-2:-1] == ["experts"]:
        return 0
    if len(parts) > 2 and parts[-2] in ("lora_A", "lora_B"):
        kind, half = parts[-3], parts[-2]
        return 0 if kind in COLUMNS and half == "lora_B" else 1 if kind in ROWS and half == "lora_A" else None
    kind = parts[-2] if len(parts) > 1 else ""
    return 0 if kind in (*COLUMNS, *VOCABULARY) else 1 if kind in ROWS else None


def is_partial(name: str) -> bool:
    """Whether ranks that hold this parameter whole each have the gradient of their own heads or columns only."""
    parts = name.split(".")
    if len(parts) > 2 and parts[-2] in ("lora_A", "lora_B"):
        return find_cut(name) is None
    return name.endswith(("q_norm.weight", "k_norm.weight", "mlp.gate.weight"))


def check_shape(config: DecoderConfig, tp: int, ep: int) -> None:
    """`ValueError` when heads, columns or experts of this model cannot be dealt out evenly."""
    if ep > 1 and (not config.num_experts or config.num_experts % (ep * tp)):
        found = f"ep {ep} * tp {tp} does not divide its {config.num_experts}" if config.num_experts else "it has none"
        raise ValueError(f"parallel.ep {ep} needs a model with experts to deal out, and {found}: set ep = 1")
    if tp > 1 and (config.out_bias or config.mlp_bias):
        raise ValueError(f"parallel.tp {tp}: this model adds biases to sums over ranks, which tp does not: set tp = 1")
    for what, number in (
        ("attention heads", config.num_attention_heads),
        ("key heads", config.num_key_value_heads),
        ("columns of the feed-forward", config.intermediate_size),
        ("experts", config.num_experts),
    ):
        if number % tp:
            raise ValueError(f"parallel.tp {tp} does not divide the {number} {what} of this model")


def cut_model(model: CausalLM, mesh: Mesh) -> dict[str, Box]:
    """Leave this rank's part of every tensor in `model`, in place; returns where the parts lie, by name."""
    tp, ep = mesh.tp, mesh.ep
    new: dict[int, nn.Parameter] = {}
    boxes: dict[str, Box] = {}
    for path, module in model.named_modules():
        for own_name, parameter in list(module.named_parameters(recurse=False)):
            name = f"{path}.{own_name}"
            box = _find_box(name, parameter, tp, ep)
            if box is None:
                continue
            if id(parameter) not in new:
                part = parameter.detach()[tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))]
                new[id(parameter)] = nn.Parameter(part.clone(), requires_grad=parameter.requires_grad)
                boxes[name] = box
            setattr(module, own_name, new[id(parameter)])
    for _, module in list(model.named_modules()):
        if isinstance(module, SparseMLP):
            module.experts = PartExperts(module.experts, tp, ep)
        if tp.size > 1 and isinstance(module, Attention | MLP | SparseMLP):
            _join(module, tp)
    if tp.size > 1:
        rows = model.config.vocab_size
        table: Any = model.model.embed_tokens.weight
        model.model.embed_tokens = PartEmbedding(table, vocab_part(rows, tp))  # type: ignore[assignment]
    return boxes


def _find_box(name: str, parameter: Tensor, tp: Team, ep: Team) -> Box | None:
    dim = find_cut(name)
    is_expert = dim == 0 and parameter.ndim == 3
    size, rank = (tp.size * ep.size, tp.rank * ep.size + ep.rank) if is_expert else (tp.size, tp.rank)
    if dim is None or size == 1:
        return None
    whole = tuple(parameter.shape)
    width = -(-whole[dim] // size)
    start = min(rank * width, whole[dim])
    offset, shape = [0] * len(whole), list(whole)
    offset[dim], shape[dim] = start, min(width, whole[dim] - start)
    return Box(tuple(offset), tuple(shape), whole)


def vocab_part(vocab_size: int, tp: Team) -> VocabPart:
    """This rank's rows of embedding and head: equal chunks, the last of which may be shorter."""
    assert tp.group is not None
    widest = -(-vocab_size // tp.size)
    return VocabPart(min(tp.rank * widest, vocab_size), widest, tp.group)


class PartEmbedding(nn.Module):
    """Look-up in a table of which every rank has some rows."""

    def __init__(self, weight: nn.Parameter, part: VocabPart) -> None:
        super().__init__()
        self.weight, self.part = weight, part

    def forward(self, ids: Int[Tensor, " tokens"]) -> Float[Tensor, "tokens hidden"]:
        rows, mine = self.part.own(ids, self.weight.shape[0])
        found = torch.where(mine[:, None], F.embedding(rows, self.weight), 0.0)
        return sum_over(found, self.part.group)


def _join(module: nn.Module, tp: Team) -> None:
    """Let the first input's gradient and the output be sums over ranks."""

    def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (copy_to_all(args[0], tp.group), *args[1:])

    def after(_: nn.Module, __: Any, out: Tensor) -> Any:
        return sum_over(out, tp.group)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)
