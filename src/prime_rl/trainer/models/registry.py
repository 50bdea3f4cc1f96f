"""From a Hugging Face directory to a decoder: config, tensors, random weights, and clear words when they do not fit."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from prime_rl.trainer.lora import load_adapter, merge_adapter
from prime_rl.trainer.models.causal_lm import CausalLM, DecoderConfig, init_weights, tensor_names
from prime_rl.trainer.models.moe import split_experts
from prime_rl.trainer.models.nanochat import NanochatLM
from prime_rl.transport.weights import ADAPTER_CONFIG_FILE
from prime_rl.utils.tokenizer import resolve_model_dir

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
MODEL_CLASSES: dict[str, type[CausalLM]] = {"nanochat": NanochatLM}
"""Families with an architecture of their own; all others are `CausalLM`."""
_LISTED = 4  # names shown before an error says "and N more"


def load_hf_config(model_dir: Path) -> dict[str, Any]:
    """The `config.json` of a model directory; `ValueError` when there is none or it is no JSON object."""
    path = Path(model_dir) / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{model_dir} has no {CONFIG_FILE}: give a Hugging Face model directory")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return config


def load_decoder(
    model_dir: Path,
    *,
    random_init: bool = False,
    num_layers: int | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> CausalLM:
    """The decoder of a Hugging Face directory, with its weights or, with `random_init`, those of `seed`.

    `num_layers` keeps the first layers only. Random weights are drawn in fp32 and then cast, so that every process
    that asks for the same (config, seed) holds the same bits. `ValueError` for a model this decoder does not
    implement, for missing or unexpected tensors, and for a directory without weights.
    """
    model_dir = Path(model_dir)
    config = DecoderConfig.from_hf(load_hf_config(model_dir))
    if num_layers is not None:
        if num_layers > config.num_hidden_layers:
            raise ValueError(f"model.debug.num_layers is {num_layers} but {model_dir} has {config.num_hidden_layers}")
        config = replace(config, num_hidden_layers=num_layers)
    model = _build_empty(config, dtype, device)
    if random_init:
        init_weights(model, seed)
    else:
        fill_weights(model, read_tensors(model_dir), ignore_layers_from=num_layers, source=str(model_dir))
    return model


def _build_empty(config: DecoderConfig, dtype: torch.dtype, device: torch.device | str) -> CausalLM:
    """A decoder whose parameters hold no values yet; torch's own initialisation would cost seconds and be thrown away.

    `Module.to_empty` would do, but it imports torch's compiler (a second of start-up) and unties the head.
    """
    with torch.device("meta"):
        model = MODEL_CLASSES.get(config.model_type, CausalLM)(config)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device=device)))
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


@torch.no_grad()
def fill_weights(
    model: CausalLM, tensors: dict[str, Tensor], *, ignore_layers_from: int | None = None, source: str = "the weights"
) -> None:
    """Copy `tensors` into the model's parameters, casting to their dtype; every name must fit exactly.

    Experts may be listed one by one, as checkpoints do, or stacked, as transformers 5 holds them in memory.
    A tied head in the file is skipped, and layers from `ignore_layers_from` on. Nothing is written when the names or
    shapes do not fit (`ValueError` lists them).
    """
    wanted = tensor_names(model)
    given = {
        name: tensor for name, tensor in split_experts(tensors).items() if not _skipped(name, model, ignore_layers_from)
    }
    if missing := wanted.keys() - given.keys():
        raise ValueError(
            f"{source} lacks {_listed(missing)}: the checkpoint and its config.json do not belong together"
        )
    if unexpected := given.keys() - wanted.keys():
        raise ValueError(f"{source} holds {_listed(unexpected)}, which this architecture has no place for")
    for name, parameter in wanted.items():
        if given[name].shape != parameter.shape:
            found, asked = tuple(given[name].shape), tuple(parameter.shape)
            raise ValueError(f"{name} of {source} has shape {found}, config.json asks for {asked}")
    for name, parameter in wanted.items():
        parameter.copy_(given[name])


def read_tensors(model_dir: Path) -> dict[str, Tensor]:
    """All tensors of a directory on the CPU: `model.safetensors`, or the shards its index names.

    Of a PEFT adapter: the tensors of its base model with the adapter merged in.
    """
    model_dir = Path(model_dir)
    if (model_dir / ADAPTER_CONFIG_FILE).is_file():
        adapter = load_adapter(model_dir)
        if not adapter.base_model:
            raise ValueError(f"{model_dir / ADAPTER_CONFIG_FILE} names no base model: set base_model_name_or_path")
        return merge_adapter(read_tensors(resolve_model_dir(adapter.base_model)), adapter)
    if (model_dir / WEIGHTS_FILE).is_file():
        files: Iterable[str] = [WEIGHTS_FILE]
    elif (model_dir / INDEX_FILE).is_file():
        files = sorted(set(json.loads((model_dir / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        raise ValueError(
            f"{model_dir} has no weights ({WEIGHTS_FILE}): set model.debug.random_init = true to start from random ones"
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(model_dir / file, framework="pt") as opened:
                tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, FileNotFoundError) as error:
            raise ValueError(f"{model_dir / file} cannot be read: {error}") from error
    return tensors


def _skipped(name: str, model: CausalLM, ignore_layers_from: int | None) -> bool:
    if name == "lm_head.weight" and model.config.tie_word_embeddings:
        return True
    if name.endswith("rotary_emb.inv_freq"):  # a derived table that old exports carry along
        return True
    head, _, rest = name.partition("model.layers.")
    return ignore_layers_from is not None and not head and bool(rest) and int(rest.split(".")[0]) >= ignore_layers_from


def _listed(names: Iterable[str]) -> str:
    """`a, b, c and 12 more`."""
    ordered = sorted(names)
    more = len(ordered) - _LISTED
    return ", ".join(ordered[:_LISTED]) + (f" and {more} more" if more > 0 else "")
