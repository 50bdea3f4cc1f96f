"""GGUF files to Hugging Face directories."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prime_rl.pretrained.gguf_architectures import (
    ARCHITECTURES,
    CONFIG_KEYS,
    GEMMA3_LOCAL_ROPE_THETA,
    OPTIONAL_KEYS,
    ROPE_FACTORS,
    Architecture,
    compute_llama3_factors,
    gemma3_layer_types,
    gemma3_query_scalar,
    separate_rope,
)
from prime_rl.pretrained.gguf_tokenizer import build_tokenizer_files, find_end_tokens
from rollouts.training.model_config import check_model_config
from rollouts.training.tensor_files import save_tensors

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor
    from torch import Tensor

MAX_SHARD_BYTES = 4 * 2**30
FLOAT_TYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.int16}
"""GGUF types that are copied, with a numpy type of their size."""
HF_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def convert_gguf(path: Path, directory: Path) -> None:
    """Write the model of a GGUF file as a Hugging Face directory: config, tokenizer, chat template, weights.

    Float tensors keep their type, quantized ones become float32, equal to `gguf.dequantize`. `ValueError` names what
    is not supported: the architecture, the tokenizer, a tensor, or a file that is split, damaged or no GGUF file.
    """
    reader = _open(path)
    with _explaining(path):
        metadata = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
        architecture = _find_architecture(metadata)
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        config = _build_config(metadata, architecture, tensors)
        check_model_config(config, path)
        directory.mkdir(parents=True, exist_ok=True)
        files = {"config.json": config, **build_tokenizer_files(metadata, config["max_position_embeddings"])}
        files["generation_config.json"] = _build_generation_config(metadata)
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content, indent=2, ensure_ascii=False) + "\n"
            (directory / name).write_text(text, encoding="utf-8")
        shards = _plan_shards(tensors, config, architecture)
    _write_shards(directory, shards)


def _open(path: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ValueError(f"{path} needs the package gguf to be read: pip install gguf") from error
    try:
        return GGUFReader(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    except Exception as error:  # the reader raises whatever numpy raises for damaged files
        raise ValueError(f"{path} is no GGUF file, or damaged: {error}") from error


@contextmanager
def _explaining(path: Path) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{path} is damaged or incomplete: {type(error).__name__}: {error}") from error


def _find_architecture(metadata: dict[str, Any]) -> Architecture:
    name, by_name = metadata.get("general.architecture"), {row.name: row for row in ARCHITECTURES.values()}
    if name not in by_name:
        known = ", ".join(by_name)
        raise ValueError(f"architecture {name!r} is not supported, only {known}; give a Hugging Face directory instead")
    if metadata.get("split.count", 1) > 1:
        raise ValueError("the model is split into several files; merge them (llama-gguf-split --merge)")
    return by_name[name]


def _build_config(
    metadata: dict[str, Any], architecture: Architecture, tensors: dict[str, ReaderTensor]
) -> dict[str, Any]:
    prefix = f"{architecture.name}."
    config: dict[str, Any] = {"architectures": [architecture.class_name], "model_type": architecture.model_type}
    for key, name in CONFIG_KEYS.items():
        value = metadata.get(prefix + name)
        if value is not None:
            config[key] = value
        elif key not in OPTIONAL_KEYS:
            raise ValueError(f"metadata key {prefix + name} is missing")
    if isinstance(config["num_attention_heads"], list) or isinstance(config["intermediate_size"], list):
        raise ValueError("layers of different sizes are not supported")
    embedding, head_dim = tensors["token_embd.weight"], config["hidden_size"] // config["num_attention_heads"]
    quantized = any(t.tensor_type.name not in FLOAT_TYPES for t in tensors.values())
    config |= {
        "head_dim": config.get("head_dim", head_dim),
        "num_key_value_heads": config.get("num_key_value_heads", config["num_attention_heads"]),
        # Stored as float32, in which 1e-5 has more digits than it was written with.
        "rms_norm_eps": float(f"{config['rms_norm_eps']:.7g}"),
        "vocab_size": int(embedding.shape[1]),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": architecture.model_type == "llama" and "blk.0.attn_q.bias" in tensors,
        "torch_dtype": "float32" if quantized else HF_DTYPES[embedding.tensor_type.name],
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    if (scaling := _read_rope_scaling(metadata, prefix, config, tensors.get(ROPE_FACTORS))) is not None:
        config["rope_scaling"] = scaling
    return _complete_gemma3(config, metadata[f"{prefix}attention.sliding_window"]) if prefix == "gemma3." else config


def _complete_gemma3(config: dict[str, Any], sliding_window: int) -> dict[str, Any]:
    """Options of Gemma 3, most of which follow from its sizes."""
    del config["hidden_act"]
    scaling = config.pop("rope_scaling", None) or {"rope_type": "default"}
    theta = config.pop("rope_theta", 1_000_000.0)
    return {
        **config,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": gemma3_query_scalar(config),
        "sliding_window": sliding_window,
        "layer_types": gemma3_layer_types(config["num_hidden_layers"]),
        "rope_parameters": {
            "full_attention": {**scaling, "rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": GEMMA3_LOCAL_ROPE_THETA},
        },
    }


def _read_rope_scaling(
    metadata: dict[str, Any], prefix: str, config: dict[str, Any], factors: ReaderTensor | None
) -> dict[str, Any] | None:
    """`rope_scaling` of `config.json`; Llama 3's parameters are recovered from its factors and checked against them."""
    if factors is not None:
        found: dict[str, Any] = {
            "rope_type": "llama3",
            "factor": float(factors.data.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        expected = compute_llama3_factors(config["head_dim"], config.get("rope_theta", 10000.0), **found)
        if expected.shape != factors.data.shape or not np.allclose(expected, factors.data, rtol=1e-4):
            raise ValueError(f"the frequencies in {ROPE_FACTORS} are not those of Llama 3's scaling")
        return found
    kind = metadata.get(f"{prefix}rope.scaling.type", "none")
    if kind == "none":
        return None
    found = {"rope_type": kind, "factor": metadata[f"{prefix}rope.scaling.factor"]}
    original = metadata.get(f"{prefix}rope.scaling.original_context_length")
    return found if original is None else {**found, "original_max_position_embeddings": original}


def _build_generation_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """End tokens of messages and of texts, and the other special ids."""
    ids = {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": find_end_tokens(metadata) or None,
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    return {key: value for key, value in ids.items() if value is not None}


Shard = list[tuple[str, "ReaderTensor", int | None, bool]]
"""Tensors of a file: name, tensor, the number of heads whose rows are reordered, and whether 1 is subtracted."""


def _plan_shards(tensors: dict[str, ReaderTensor], config: dict[str, Any], architecture: Architecture) -> list[Shard]:
    shards: list[Shard] = [[]]
    size = 0
    for gguf_name, tensor in tensors.items():
        if gguf_name == ROPE_FACTORS:
            continue
        if (name := architecture.to_hf_name(gguf_name)) is None:
            raise ValueError(f"tensor {gguf_name} is not supported for {architecture.name}")
        heads = None
        if architecture.interleaved_rope and (".q_proj." in name or ".k_proj." in name):
            heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        if shards[-1] and size + 4 * tensor.n_elements > MAX_SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append((name, tensor, heads, architecture.is_offset_norm(name)))
        size += 4 * int(tensor.n_elements)
    return shards


def _write_shards(directory: Path, shards: list[Shard]) -> None:

    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        tensors = {name: _read_tensor(*how) for name, *how in shard}
        save_tensors(tensors, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _read_tensor(tensor: ReaderTensor, heads: int | None, has_offset: bool) -> Tensor:
    """Values in Hugging Face's shape and row order."""
    import torch
    from gguf import dequantize

    shape = tuple(int(n) for n in reversed(tensor.shape))
    kind = tensor.tensor_type.name
    if kind in FLOAT_TYPES:
        array = tensor.data.view(FLOAT_TYPES[kind]).reshape(shape)
    else:
        array = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
    values = torch.from_numpy(np.array(array if heads is None else separate_rope(array, heads)))
    values = values.view(torch.bfloat16) if kind == "BF16" else values
    return values - 1 if has_offset else values
