"""Splits a model over tensor, expert and pipeline parallel ranks."""

from __future__ import annotations

import copy

from torch import nn

from prime_rl.trainer.models.causal_lm import CausalLM
from prime_rl.trainer.parallel.context_parallel import check_heads
from prime_rl.trainer.parallel.pipeline_parallel import build_stages, check_layers
from prime_rl.trainer.parallel.tensor_parallel import check_shape, split_parameters
from prime_rl.trainer.parallel_dims import Mesh
from prime_rl.trainer.sharded_checkpoint import ShardSlice


def split_model(model: CausalLM, mesh: Mesh) -> tuple[CausalLM, CausalLM, dict[str, ShardSlice]]:
    """Split `model` in place; returns this rank's part, the full model on the meta device, and the slices by name.

    Without tp, cp, pp or ep both models are `model`. `ValueError` for a model that does not support the split.
    """
    kinds = mesh.dims.splits_model
    if not kinds:
        return model, model, {}
    if type(model) is not CausalLM:
        raise ValueError(
            f"parallel.{kinds[0]} supports only Llama, SmolLM3, Qwen2, Qwen3 and Qwen3-MoE: use parallel.dp"
        )
    whole = to_meta(model)
    check_shape(model.config, mesh.dims.tp, mesh.dims.ep)
    check_heads(model.config, mesh.dims.cp, mesh.dims.tp, mesh.dims.cp_style)
    check_layers(model.config.num_hidden_layers, mesh.dims.pp, mesh.dims.pp_stages)
    cuts = split_parameters(model, mesh)
    if mesh.pp.size > 1:
        model = build_stages(model, mesh.pp, mesh.dims.pp_stages)
    return model, whole, cuts


def to_meta(model: CausalLM) -> CausalLM:
    """A copy on the meta device: names and shapes without values."""
    empty = {id(p): nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, empty)
