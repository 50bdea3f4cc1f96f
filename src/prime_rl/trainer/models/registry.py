"""Loads a model from a Hugging Face model directory, with stored or random weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from prime_rl.runtime.tokenizer import find_weight_files, load_tokenizer, resolve_model_dir
from prime_rl.trainer.lora import Adapter, load_adapter, merge_adapter
from prime_rl.trainer.models.causal_lm import CausalLM, init_weights, tensor_names
from prime_rl.trainer.models.decoder_config import DecoderConfig, Impl, choose_impl
from prime_rl.trainer.models.gemma3 import Gemma3LM
from prime_rl.trainer.models.hf_model import load_hf_model
from prime_rl.trainer.models.nanochat import NanochatLM
from prime_rl.transport.weights import ADAPTER_CONFIG_FILE, is_adapter
from rollouts.training.backends import checkpoint
from rollouts.training.json_files import read_json_file
from rollouts.training.manifests import read_index
from rollouts.training.model_config import GENERATION_FILE, read_eos_ids
from rollouts.training.tensor_files import MappedTensors

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
MODEL_CLASSES: dict[str, type[CausalLM]] = {"gemma3_text": Gemma3LM, "nanochat": NanochatLM}
"""Model types with their own class; all others use `CausalLM`."""
_MAX_LISTED = 4  # maximum number of names in an error message


def load_hf_config(model_dir: Path) -> dict[str, Any]:
    """Read `config.json` of a model directory; `ValueError` when it is missing or not a JSON object."""
    path = Path(model_dir) / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{model_dir} has no {CONFIG_FILE}: give a Hugging Face model directory")
    return read_json_file(path)


def load_eos_ids(model_dir: Path) -> list[int]:
    """EOS token ids from `generation_config.json`, else `config.json`, else the tokenizer's."""
    ids = read_eos_ids(model_dir / GENERATION_FILE) or read_eos_ids(model_dir / CONFIG_FILE)
    if not ids and (model_dir / "tokenizer.json").is_file():
        eos = load_tokenizer(str(model_dir)).eos_token_id
        return [] if eos is None else [eos]
    return ids


def load_causal_lm(
    model_dir: Path,
    *,
    impl: Impl = "auto",
    random_init: bool = False,
    num_layers: int | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    max_len: int | None = None,
) -> CausalLM:
    """Load a model with the implementation `impl`; `max_len` as for `HFCausalLM`, all else as `load_decoder`."""
    options: dict[str, Any] = {"random_init": random_init, "num_layers": num_layers, "seed": seed}
    model: CausalLM
    if choose_impl(impl, model_dir) == "hf":
        model = load_hf_model(model_dir, **options, dtype=dtype, device=device, max_len=max_len)
        logger.info(model.describe())
    else:
        model = load_decoder(model_dir, **options, dtype=dtype, device=device)
        logger.info(f"{model.config.model_type} runs on the native decoder")
    return model


def load_decoder(
    model_dir: Path,
    *,
    random_init: bool = False,
    num_layers: int | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> CausalLM:
    """Load the decoder of a Hugging Face directory, with its weights or, with `random_init`, weights drawn from `seed`.

    `num_layers` truncates the model. Random weights are drawn in fp32 and then cast, a pure function of (config,
    seed); those of a PEFT adapter are its base model's, with the adapter merged. `ValueError` for an unsupported model,
    missing or unexpected tensors, and a directory without weights.
    """
    model_dir = Path(model_dir)
    config = DecoderConfig.from_hf(load_hf_config(model_dir))
    if num_layers is not None:
        if num_layers > config.num_hidden_layers:
            raise ValueError(f"model.debug.num_layers is {num_layers} but {model_dir} has {config.num_hidden_layers}")
        config = replace(config, num_hidden_layers=num_layers)
    model = _build_empty(config, dtype, device)
    if random_init and is_adapter(model_dir):
        adapter = load_adapter(model_dir)
        options: dict[str, Any] = {"seed": seed, "dtype": dtype, "device": device}
        num_layers = config.num_hidden_layers
        base = load_decoder(find_base(model_dir, adapter), random_init=True, num_layers=num_layers, **options)
        drawn = {name: tensor.detach() for name, tensor in tensor_names(base).items()}
        fill_weights(model, merge_adapter(drawn, adapter), source=str(model_dir))
    elif random_init:
        init_weights(model, seed)
    else:
        fill_weights(model, read_tensors(model_dir), ignore_layers_from=num_layers, source=str(model_dir))
    return model


def _build_empty(config: DecoderConfig, dtype: torch.dtype, device: torch.device | str) -> CausalLM:
    """A decoder with uninitialized parameters, which skips torch's slow random initialization.

    Not `Module.to_empty`: it imports torch's compiler (a second of start-up) and unties the head.
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
) -> dict[str, Tensor]:
    """Copy `tensors` into the model's parameters, casting to their dtype; returns them by the names of `tensor_names`.

    All names must match. Experts may be individual, as in checkpoints, or stacked, as in transformers 5. A tied head
    and layers from `ignore_layers_from` on are skipped. `ValueError`, without any change, for mismatched names or
    shapes, and for a tied head that is not the embedding.
    """
    expected = tensor_names(model)
    named = model.parse_tensors(tensors)
    given = {name: tensor for name, tensor in named.items() if not _skipped(name, model, ignore_layers_from)}
    if missing := expected.keys() - given.keys():
        raise ValueError(f"{source} is missing {_listed(missing)}: the checkpoint does not match its config.json")
    if unexpected := given.keys() - expected.keys():
        raise ValueError(f"{source} has unexpected tensors {_listed(unexpected)}")
    for name, parameter in expected.items():
        if given[name].shape != parameter.shape:
            shapes = f"shape {tuple(given[name].shape)}, expected {tuple(parameter.shape)} from config.json"
            raise ValueError(f"{name} of {source} has {shapes}")
    head, table = (named.get(f"{name}.weight") for name in ("lm_head", "model.embed_tokens"))
    if (
        model.config.tie_word_embeddings
        and head is not None
        and table is not None
        and not torch.equal(head, table.to(head.dtype))
    ):
        raise ValueError(
            f"{source} have an lm_head.weight that is not the embedding, to which tie_word_embeddings = true in "
            "config.json ties it: set that to false, or remove the tensor"
        )
    given = MappedTensors(given) if isinstance(tensors, MappedTensors) else given
    model.copy_tensors(given)
    return given


def read_tensors(model_dir: Path) -> dict[str, Tensor]:
    """Read all tensors of a model directory to the CPU; of a PEFT adapter, the base model with the adapter merged.

    Files in torch's format are read if there are no safetensors. `ValueError` when a file cannot be read.
    """
    model_dir = Path(model_dir)
    if is_adapter(model_dir):
        adapter = load_adapter(model_dir)
        return merge_adapter(read_tensors(find_base(model_dir, adapter)), adapter)
    files = find_weight_files(model_dir)
    if files and files[0].suffix != ".safetensors":
        return {name: tensor for file in files for name, tensor in checkpoint.read_tensors(file).items()}
    return MappedTensors(read_files(model_dir))


def find_base(model_dir: Path, adapter: Adapter) -> Path:
    """Directory of the base model of the adapter in `model_dir`; `ValueError` if it names none."""
    if not adapter.base_model:
        raise ValueError(f"{model_dir / ADAPTER_CONFIG_FILE} has no base model: set base_model_name_or_path")
    return resolve_model_dir(adapter.base_model)


def read_files(model_dir: Path) -> dict[str, Tensor]:
    """Read `model.safetensors`, or the shards of the index; `ValueError` when a file cannot be read."""
    if (model_dir / WEIGHTS_FILE).is_file():
        files: Iterable[str] = [WEIGHTS_FILE]
    elif not (files := sorted(set(read_index(model_dir).values()))):
        raise ValueError(
            f"{model_dir} has no weights ({WEIGHTS_FILE}): set model.debug.random_init = true for random initialization"
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
    if name.endswith("rotary_emb.inv_freq"):  # a derived buffer in old checkpoints
        return True
    head, _, rest = name.partition("model.layers.")
    return ignore_layers_from is not None and not head and bool(rest) and int(rest.split(".")[0]) >= ignore_layers_from


def _listed(names: Iterable[str]) -> str:
    """`a, b, c and 12 more`."""
    ordered = sorted(names)
    more = len(ordered) - _MAX_LISTED
    return ", ".join(ordered[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
