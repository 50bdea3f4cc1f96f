"""Names and layouts of tensors and metadata in GGUF files, by architecture (llama.cpp's conventions)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Architecture:
    """A model family that GGUF files hold and Hugging Face directories name differently."""

    model_type: str
    """`model_type` in `config.json`; `general.architecture` in GGUF has the same name."""
    class_name: str
    interleaved_rope: bool = False
    """Whether rows of query and key projections are stored in the order of interleaved rotary pairs."""


ARCHITECTURES = {
    row.model_type: row
    for row in (
        Architecture("llama", "LlamaForCausalLM", interleaved_rope=True),
        Architecture("qwen2", "Qwen2ForCausalLM"),
        Architecture("qwen3", "Qwen3ForCausalLM"),
        Architecture("smollm3", "SmolLM3ForCausalLM", interleaved_rope=True),
    )
}

MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies: Llama 3's scaling, [head_dim / 2]."""

CONFIG_KEYS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "head_dim": "attention.key_length",
}
"""Keys of `config.json` --> keys of GGUF below the architecture's name."""
OPTIONAL_KEYS = ("num_key_value_heads", "rope_theta", "head_dim")


def to_hf_name(name: str) -> str | None:
    """Name of a tensor in a Hugging Face checkpoint; None if it has no counterpart."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, module, kind = match.groups()
        return f"model.layers.{layer}.{LAYER_MODULES[module]}.{kind}" if module in LAYER_MODULES else None
    module, _, kind = name.rpartition(".")
    return f"{MODULES[module]}.{kind}" if module in MODULES else None


def to_gguf_name(name: str) -> str | None:
    """The result of inverting `to_hf_name`."""
    module, _, kind = name.rpartition(".")
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module):
        found = next((short for short, long in LAYER_MODULES.items() if long == match[2]), None)
        return f"blk.{match[1]}.{found}.{kind}" if found else None
    found = next((short for short, long in MODULES.items() if long == module), None)
    return f"{found}.{kind}" if found else None


def interleave_rope(rows: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """Reorder the rows of a projection [heads * head_dim, ...] from rotated halves to interleaved pairs."""
    half = len(rows) // num_heads // 2
    return rows.reshape(num_heads, 2, half, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def separate_rope(rows: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """The inverse of `interleave_rope`."""
    half = len(rows) // num_heads // 2
    return rows.reshape(num_heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def compute_llama3_factors(
    head_dim: int,
    rope_theta: float,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
    **_: Any,
) -> NDArray[np.float32]:
    """Divisors of the rotary frequencies for Llama 3's context extension, [head_dim / 2].

    Frequencies with a wavelength above original / low_freq_factor are divided by `factor`, those below
    original / high_freq_factor are kept, and those between are interpolated (rope type "llama3" of transformers).
    """
    frequencies = rope_theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    cycles = original_max_position_embeddings * frequencies / (2 * np.pi)
    smooth = (cycles - low_freq_factor) / (high_freq_factor - low_freq_factor)
    between = 1 / ((1 - smooth) / factor + smooth)
    factors = np.where(cycles < low_freq_factor, factor, np.where(cycles > high_freq_factor, 1.0, between))
    return factors.astype(np.float32)
