"""Config of the native decoder, read from a Hugging Face `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rollouts.training.json_files import read_json_file
from rollouts.training.model_config import DECODER_SIZES, check_model_config

AttentionMode = Literal["exact", "sdpa", "flash"]
"""exact: batch-invariant, bit for bit; sdpa, flash: faster (`attention`)."""

Impl = Literal["auto", "custom", "hf"]
MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe", "smollm3", "gemma3_text", "nanochat")
ACTIVATIONS = {"nanochat": "relu2", "gemma3_text": "gelu_pytorch_tanh"}
"""Activations other than silu."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "smollm3": {"num_key_value_heads": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True},
    "gemma3_text": {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
    },
}
"""Defaults of transformers for keys that are missing, where they depend on the model type."""


@dataclass(frozen=True)
class DecoderConfig:
    """Dimensions and architecture options of a decoder."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    initializer_range: float
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    dense_layers: frozenset[int] = frozenset()
    """Layers with a dense feed-forward network in a mixture-of-experts model."""
    logit_cap: float | None = None
    """Logit softcapping: c tanh(logits / c)."""
    no_rope_layers: frozenset[int] = frozenset()
    """Layers whose queries and keys are not rotated (NoPE, 2305.19466)."""
    sliding_layers: frozenset[int] = frozenset()
    """Layers that attend to the last `sliding_window` tokens only, with the rotary base `local_rope_theta`."""
    sliding_window: int = 0
    local_rope_theta: float = 0.0
    query_scale: float = 1.0
    """Factor of queries in addition to 1 / sqrt(head_dim)."""

    def find_window(self, layer: int) -> int | None:
        """Number of tokens that a query of this layer attends to, itself included; None for all."""
        return self.sliding_window if layer in self.sliding_layers else None

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> DecoderConfig:
        """Parse a `config.json`; `ValueError` for unsupported options."""
        kind = config.get("model_type")
        if kind not in MODEL_TYPES:
            raise ValueError(
                f"model_type {kind!r} is not supported by the native decoder, only {', '.join(MODEL_TYPES)}"
            )
        config = {**DEFAULTS.get(kind, {}), **config}
        check_model_config(config, required=(*DECODER_SIZES, "intermediate_size"))
        activation = ACTIVATIONS.get(kind, "silu")
        for key in ("hidden_act", "hidden_activation"):
            if config.get(key, activation) != activation:
                raise ValueError(f"{key} {config[key]!r} is not supported, only {activation!r}")
        if config.get("quantization_config"):
            raise ValueError('quantized weights are not supported by the native decoder: set model.impl = "hf"')
        if config.get("use_sliding_window"):
            raise ValueError("use_sliding_window is not supported")
        if kind != "gemma3_text" and set(config.get("layer_types") or ()) - {"full_attention"}:
            raise ValueError(f"layer_types of {kind} must all be full_attention")
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        rope = rope.get("full_attention") or ({} if "sliding_attention" in rope else rope)
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type not in ("default", "llama3", "linear"):
            raise ValueError(f"rope type {rope_type!r} is not supported, only default, linear and llama3")
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        if heads % kv_heads:
            raise ValueError(f"num_attention_heads = {heads} must be a multiple of num_key_value_heads = {kv_heads}")
        bias = bool(config.get("attention_bias", False))
        return cls(
            model_type=kind,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_hidden_layers=config["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            rope_scaling=None if rope_type == "default" else dict(rope, rope_type=rope_type),
            max_position_embeddings=config.get("max_position_embeddings", 32768),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=kind == "qwen2" or bias,
            out_bias=kind != "qwen2" and bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=kind in ("qwen3", "qwen3_moe", "gemma3_text"),
            initializer_range=config.get("initializer_range", 0.02),
            logit_cap=config.get("final_logit_softcapping"),
            no_rope_layers=_read_no_rope_layers(config) if kind == "smollm3" else frozenset(),
            **(_read_experts(config) if kind == "qwen3_moe" else {}),
            **(_read_gemma3(config) if kind == "gemma3_text" else {}),
        )


def choose_impl(impl: Impl, model_dir: Path) -> Literal["custom", "hf"]:
    """Resolve `auto`: the native decoder for supported models, otherwise transformers."""
    if impl != "auto":
        return impl
    try:
        DecoderConfig.from_hf(read_json_file(model_dir / "config.json"))
    except ValueError:
        return "hf"
    return "custom"


def _read_no_rope_layers(config: dict[str, Any]) -> frozenset[int]:
    """Layers without rotary embedding: those with a 0 in `no_rope_layers`, by default every fourth one."""
    num_layers, rotated = config["num_hidden_layers"], config.get("no_rope_layers")
    if rotated is None:
        interval = config.get("no_rope_layer_interval", 4)
        if not isinstance(interval, int) or interval < 1:
            raise ValueError(f"no_rope_layer_interval = {interval!r} must be a positive whole number")
        rotated = [(layer + 1) % interval for layer in range(num_layers)]
    if not isinstance(rotated, list) or len(rotated) < num_layers:
        raise ValueError(f"no_rope_layers must be a list with a 0 or 1 for each of {num_layers} layers")
    return frozenset(layer for layer in range(num_layers) if not rotated[layer])


def _read_gemma3(config: dict[str, Any]) -> dict[str, Any]:
    """Sliding windows and query scale; `ValueError` for options of other Gemma models."""
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if config.get(key):
            raise ValueError(f"{key} = {config[key]!r} is not supported for gemma3_text")
    num_layers, kinds = config["num_hidden_layers"], config.get("layer_types")
    if kinds is None:
        pattern = config.get("sliding_window_pattern", 6)
        if not isinstance(pattern, int) or pattern < 1:
            raise ValueError(f"sliding_window_pattern = {pattern!r} must be a positive whole number")
        kinds = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) < num_layers or set(kinds) - {"sliding_attention", "full_attention"}:
        raise ValueError(f"layer_types must be sliding_attention or full_attention for each of {num_layers} layers")
    for key in ("sliding_window", "query_pre_attn_scalar", "head_dim"):
        if not isinstance(config[key], int) or config[key] < 1:
            raise ValueError(f"{key} = {config[key]!r} must be a positive whole number")
    local = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
    if local.get("rope_type", "default") != "default":
        raise ValueError(f"rope type {local['rope_type']!r} of sliding_attention is not supported, only default")
    return {
        "sliding_layers": frozenset(i for i in range(num_layers) if kinds[i] == "sliding_attention"),
        "sliding_window": config["sliding_window"],
        "local_rope_theta": float(local.get("rope_theta") or config["rope_local_base_freq"]),
        "query_scale": (config["head_dim"] / config["query_pre_attn_scalar"]) ** 0.5,
    }


def _read_experts(config: dict[str, Any]) -> dict[str, Any]:
    """Mixture-of-experts fields, with the defaults of transformers."""
    num_experts = config.get("num_experts") or config.get("num_local_experts") or 128
    sparse_step = config.get("decoder_sparse_step", 1)
    dense_only = set(config.get("mlp_only_layers") or ())
    dense = {i for i in range(config["num_hidden_layers"]) if i in dense_only or (i + 1) % sparse_step}
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": config.get("num_experts_per_tok", 8),
        "moe_intermediate_size": config.get("moe_intermediate_size", 768),
        "norm_topk_prob": bool(config.get("norm_topk_prob", False)),
        "dense_layers": frozenset(dense),
    }
