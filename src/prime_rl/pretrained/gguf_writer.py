"""Hugging Face directories to GGUF files, for llama.cpp and programs built on it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl.pretrained.gguf_architectures import (
    ARCHITECTURES,
    CONFIG_KEYS,
    GEMMA3_LOCAL_ROPE_THETA,
    ROPE_FACTORS,
    Architecture,
    compute_llama3_factors,
    gemma3_layer_types,
    gemma3_query_scalar,
    interleave_rope,
)
from prime_rl.pretrained.gguf_tokenizer import read_tokenizer_metadata
from rollouts.training.json_files import read_json_file
from rollouts.training.manifests import read_index
from rollouts.training.model_config import DECODER_SIZES, check_model_config

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFWriter
    from numpy.typing import NDArray

FILE_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
"""Types of the matrices; vectors are always float32, as llama.cpp expects."""
YARN_DEFAULTS = {"beta_fast": 32, "beta_slow": 1, "attention_factor": None, "mscale": None, "mscale_all_dim": None}
UNSUPPORTED = ("mlp_bias", "use_sliding_window", "quantization_config", "final_logit_softcapping")


def write_gguf(directory: Path, path: Path, file_type: str = "f16") -> None:
    """Write the model of a Hugging Face directory as one GGUF file, under a temporary name until it is complete.

    `ValueError` names what GGUF or this writer does not support: the architecture, an option, the tokenizer, a tensor.
    """
    import gguf

    if (directory / "adapter_config.json").is_file():
        raise ValueError(f"{directory} is a LoRA adapter: merge it into its base model first")
    config = read_json_file(directory / "config.json")
    architecture = _find_architecture(config, directory)
    check_model_config(config, directory / "config.json", required=DECODER_SIZES)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    writer = gguf.GGUFWriter(temporary, architecture.name)
    try:
        writer.add_name(directory.resolve().name)
        writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[file_type]])
        _add_config(writer, config)
        for key, (value, kind) in read_tokenizer_metadata(directory, config["vocab_size"]).items():
            writer.add_key_value(key, value, *kind)
        _add_tensors(writer, directory, config, architecture, gguf.GGMLQuantizationType[file_type.upper()])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with temporary.open("rb") as handle:
            os.fsync(handle.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def _find_architecture(config: dict[str, Any], directory: Path) -> Architecture:
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(f"{directory}: model_type {kind!r} cannot be written as GGUF, only {', '.join(ARCHITECTURES)}")
    for key in UNSUPPORTED:
        if config.get(key):
            raise ValueError(f"{directory}: {key} = {config[key]!r} cannot be written as GGUF")
    if kind != "gemma3_text" and config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{directory}: hidden_act = {config['hidden_act']!r} cannot be written as GGUF, only 'silu'")
    if kind in ("qwen3", "smollm3") and config.get("attention_bias"):
        raise ValueError(f"{directory}: attention_bias = true of {kind} cannot be written as GGUF")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for key, value in YARN_DEFAULTS.items():
        if rope.get(key, value) != value:
            raise ValueError(f"{directory}: {key} = {rope[key]!r} of its RoPE cannot be written as GGUF, only {value}")
    if kind == "smollm3":
        _check_rope_layers(config, directory)
    if kind == "gemma3_text":
        _check_gemma3(config, directory)
    return ARCHITECTURES[kind]


def _check_rope_layers(config: dict[str, Any], directory: Path) -> None:
    """`ValueError` unless every fourth layer has no rotary embedding: GGUF has no key for it."""
    num_layers, interval = config["num_hidden_layers"], config.get("no_rope_layer_interval", 4)
    rotated = config.get("no_rope_layers") or [(layer + 1) % interval for layer in range(num_layers)]
    if [bool(value) for value in rotated[:num_layers]] != [(layer + 1) % 4 > 0 for layer in range(num_layers)]:
        raise ValueError(f"{directory}: no_rope_layers = {rotated} cannot be written as GGUF, only every fourth layer")


def _check_gemma3(config: dict[str, Any], directory: Path) -> None:
    """`ValueError` for options that differ from those of the published sizes: GGUF has no keys for them."""
    num_layers = config["num_hidden_layers"]
    expected = {
        "layer_types": gemma3_layer_types(num_layers),
        "query_pre_attn_scalar": gemma3_query_scalar({"head_dim": 256, **config}),
        "rope_local_base_freq": GEMMA3_LOCAL_ROPE_THETA,
    }
    local = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
    found = {"query_pre_attn_scalar": 256, "rope_local_base_freq": local.get("rope_theta", 10000.0), **config}
    if found.get("layer_types") is None:  # of older versions of transformers
        found["layer_types"] = gemma3_layer_types(num_layers, found.get("sliding_window_pattern") or 6)
    for key, value in expected.items():
        if found.get(key, value) != value:
            raise ValueError(f"{directory}: {key} = {found[key]!r} cannot be written as GGUF, only {value}")


def _read_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """`config` with the defaults of transformers."""
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = rope.get("full_attention", rope)  # of Gemma 3; those of sliding layers are checked
    return {
        **config,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "rope_theta": rope.get("rope_theta") or config.get("rope_theta") or 10000.0,
        "rope": rope,
    }


def _add_config(writer: GGUFWriter, config: dict[str, Any]) -> None:
    import gguf

    sizes = _read_sizes(config)
    for key, name in CONFIG_KEYS.items():
        add = writer.add_float32 if key in ("rms_norm_eps", "rope_theta") else writer.add_uint32
        add(f"{writer.arch}.{name}", sizes[key])
    writer.add_value_length(sizes["head_dim"])
    writer.add_rope_dimension_count(sizes["head_dim"])
    writer.add_vocab_size(sizes["vocab_size"])
    if writer.arch == "gemma3":
        writer.add_sliding_window(sizes["sliding_window"])
    rope = sizes["rope"]
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "llama3":
        factors = compute_llama3_factors(**{**rope, "head_dim": sizes["head_dim"], "rope_theta": sizes["rope_theta"]})
        writer.add_tensor(ROPE_FACTORS, factors)
    elif kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
        if (original := rope.get("original_max_position_embeddings")) is not None:
            writer.add_rope_scaling_orig_ctx_len(original)
    elif kind != "default":
        raise ValueError(f"rope type {kind!r} cannot be written as GGUF")


def _add_tensors(
    writer: GGUFWriter, directory: Path, config: dict[str, Any], architecture: Architecture, matrix_type: Any
) -> None:
    import gguf

    sizes = _read_sizes(config)
    for name, values in _iterate_tensors(directory):
        if (gguf_name := architecture.to_gguf_name(name)) is None:
            raise ValueError(f"{directory}: tensor {name} cannot be written as GGUF for {architecture.model_type}")
        if architecture.interleaved_rope and (".q_proj." in name or ".k_proj." in name):
            heads = sizes["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            values = interleave_rope(values, heads)
        if architecture.is_offset_norm(name):
            values = values + 1
        kind = matrix_type if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        if values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:  # no whole blocks: as llama.cpp's converter does
            kind = gguf.GGMLQuantizationType.F16
        if kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
            writer.add_tensor(gguf_name, gguf.quantize(values, kind))
        else:
            writer.add_tensor(gguf_name, gguf.quantize(values, kind), raw_dtype=kind)


def _iterate_tensors(directory: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """All tensors of a directory as float32, one at a time."""
    from safetensors import safe_open

    read_index(directory)
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{directory} has no safetensors files")
    for file in files:
        with safe_open(file, "pt") as handle:
            for name in handle.keys():  # noqa: SIM118 - a handle is not a mapping
                yield name, handle.get_tensor(name).float().contiguous().numpy()
