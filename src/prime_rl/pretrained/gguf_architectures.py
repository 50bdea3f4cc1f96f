"""Names and layouts of tensors and metadata in GGUF files, by architecture (llama.cpp's conventions)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
GEMMA3_MODULES = LAYER_MODULES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class Architecture:
    """A model family that GGUF files hold and Hugging Face directories name differently."""

    model_type: str
    """`model_type` in `config.json`."""
    class_name: str
    interleaved_rope: bool = False
    """Whether rows of query and key projections are stored in the order of interleaved rotary pairs."""
    gguf_name: str = ""
    """`general.architecture` in GGUF, if it has another name there."""
    offset_norms: bool = False
    """Whether norms multiply by 1 + weight; GGUF holds the sum."""
    layer_modules: Mapping[str, str] = field(default_factory=lambda: LAYER_MODULES)

    @property
    def name(self) -> str:
        """`general.architecture` in GGUF."""
        return self.gguf_name or self.model_type

    def to_hf_name(self, name: str) -> str | None:
        """Name of a tensor in a Hugging Face checkpoint; None if it has no counterpart."""
        if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
            layer, module, kind = match.groups()
            return f"model.layers.{layer}.{self.layer_modules[module]}.{kind}" if module in self.layer_modules else None
        module, _, kind = name.rpartition(".")
        return f"{MODULES[module]}.{kind}" if module in MODULES else None

    def to_gguf_name(self, name: str) -> str | None:
        """The result of inverting `to_hf_name`."""
        module, _, kind = name.rpartition(".")
        if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module):
            found = next((short for short, long in self.layer_modules.items() if long == match[2]), None)
            return f"blk.{match[1]}.{found}.{kind}" if found else None
        found = next((short for short, long in MODULES.items() if long == module), None)
        return f"{found}.{kind}" if found else None

    def is_offset_norm(self, name: str) -> bool:
        """Whether this tensor (Hugging Face name) is a weight to which GGUF adds 1."""
        return self.offset_norms and name.endswith("norm.weight")


ARCHITECTURES = {
    row.model_type: row
    for row in (
        Architecture("llama", "LlamaForCausalLM", interleaved_rope=True),
        Architecture("qwen2", "Qwen2ForCausalLM"),
        Architecture("qwen3", "Qwen3ForCausalLM"),
        Architecture("smollm3", "SmolLM3ForCausalLM", interleaved_rope=True),
        Architecture("gemma3_text", "Gemma3ForCausalLM", False, "gemma3", True, GEMMA3_MODULES),
    )
}
"""By `model_type`."""

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
GEMMA3_LOCAL_ROPE_THETA = 10000.0
"""Rotary base of sliding-window layers; GGUF has no key for it."""
OPTIONAL_KEYS = ("num_key_value_heads", "rope_theta", "head_dim")


def gemma3_layer_types(num_layers: int, interval: int = 6) -> list[str]:
    """Every sixth layer of Gemma 3 attends to all tokens; GGUF has no key for it."""
    return ["full_attention" if (i + 1) % interval == 0 else "sliding_attention" for i in range(num_layers)]


def gemma3_query_scalar(config: Mapping[str, Any]) -> int:
    """`query_pre_attn_scalar`, for which GGUF has no key: of the size with 62 layers another one than `head_dim`."""
    is_largest = config["num_hidden_layers"] == 62
    return int(config["hidden_size"] // config["num_attention_heads"] if is_largest else config["head_dim"])


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
