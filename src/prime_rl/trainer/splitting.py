"""Which part of a model this rank computes, beyond sharding: checked against the model's shape, then cut out."""

from __future__ import annotations

import copy

from torch import nn

from prime_rl.trainer.context_parallel import check_heads
from prime_rl.trainer.models.causal_lm import CausalLM
from prime_rl.trainer.parallel_dims import Mesh
from prime_rl.trainer.pipeline_parallel import check_layers, cut_stages
from prime_rl.trainer.shards import Box
from prime_rl.trainer.tensor_parallel import check_shape, cut_model


def split_model(model: CausalLM, mesh: Mesh) -> tuple[CausalLM, CausalLM, dict[str, Box]]:
    """This rank's part of `model`, which is used up; an outline of the whole, and where the parts lie in it, by name.

    `ValueError` when this model cannot be split in this way.
    """
    kinds = mesh.dims.splits_model
    if not kinds:
        return model, model, {}
    if type(model) is not CausalLM:
        raise ValueError(f"parallel.{kinds[0]} cuts Llama, Qwen2, Qwen3 and Qwen3-MoE, not this model: use parallel.dp")
    whole = outline(model)
    check_shape(model.config, mesh.dims.tp, mesh.dims.ep)
    check_heads(model.config, mesh.dims.cp, mesh.dims.tp, mesh.dims.cp_style)
    check_layers(model.config.num_hidden_layers, mesh.dims.pp, mesh.dims.pp_stages)
    cuts = cut_model(model, mesh)
    if mesh.pp.size > 1:
        model = cut_stages(model, mesh.pp, mesh.dims.pp_stages)
    return model, whole, cuts


def outline(model: CausalLM) -> CausalLM:
    """A copy with every name and shape, and no values."""
    empty = {id(p): nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, empty)
