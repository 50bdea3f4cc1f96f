"""Model shapes with derived parameter counts, KV cache bytes and FLOPs per token."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollouts.training.json_files import read_json_file
from rollouts.training.model_config import DECODER_SIZES, check_model_config


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder. With `experts`, `inner` is the size of one expert and a token uses `active` of them."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    tied: bool
    experts: int = 0
    active: int = 0

    @property
    def attention_parameters(self) -> int:
        """Attention parameters of all layers."""
        return self.layers * self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)

    @property
    def expert_parameters(self) -> int:
        """Feed-forward parameters of all layers."""
        return self.layers * 3 * self.hidden * self.inner * max(self.experts, 1)

    @property
    def active_inner_parameters(self) -> int:
        """Feed-forward parameters that are active for one token."""
        return self.layers * 3 * self.hidden * self.inner * max(self.active, 1)

    @property
    def head_parameters(self) -> int:
        """Parameters of the output layer."""
        return self.hidden * self.vocab

    @property
    def parameters(self) -> int:
        """All parameters."""
        embeddings = self.head_parameters * (1 if self.tied else 2)
        return self.attention_parameters + self.expert_parameters + embeddings

    @property
    def active_parameters(self) -> int:
        """Parameters that are active for one token."""
        return self.attention_parameters + self.active_inner_parameters + self.head_parameters

    @property
    def kv_bytes(self) -> int:
        """KV cache bytes of one token, in bf16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim

    def attention_flops(self, context: float) -> float:
        """Forward FLOPs of attention for one token with `context` predecessors, in all layers."""
        return 4.0 * self.layers * self.heads * self.head_dim * context

    @property
    def layer_bytes(self) -> int:
        """Saved activations of one token in one layer, in bf16.

        Two norms, queries and keys with their own norms, what attention reads and gives, gate, up, their activation and
        product. As counted by autograd's hooks for a layer of Qwen3.
        """
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return 8 * self.hidden + 8 * queries + 6 * keys + 8 * self.inner * max(self.active, 1)


def _qwen3(
    hidden: int, layers: int, heads: int, inner: int, *, tied: bool = False, kv_heads: int = 8, experts: int = 0
) -> ModelShape:
    return ModelShape(
        hidden, layers, heads, kv_heads, 128, inner, 151936, tied, experts=experts, active=8 if experts else 0
    )


KNOWN = {
    "Qwen/Qwen3-0.6B": _qwen3(1024, 28, 16, 3072, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 28, 16, 6144, tied=True),
    "Qwen/Qwen3-4B": _qwen3(2560, 36, 32, 9728, tied=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 36, 32, 12288),
    "Qwen/Qwen3-14B": _qwen3(5120, 40, 40, 17408),
    "Qwen/Qwen3-32B": _qwen3(5120, 64, 64, 25600),
    "Qwen/Qwen3-30B-A3B": _qwen3(2048, 48, 32, 768, kv_heads=4, experts=128),
    "Qwen/Qwen3-235B-A22B": _qwen3(4096, 94, 64, 1536, kv_heads=4, experts=128),
}
"""Shapes available without the hub."""


def read_shape(name: str) -> ModelShape:
    """The shape of a model directory, a shipped model or a hub name; `ValueError` if it is unknown."""
    from prime_rl.runtime.tokenizer import resolve_model_dir

    if name in KNOWN and not Path(name).is_dir():
        return KNOWN[name]
    directory = resolve_model_dir(name)
    config = read_json_file(directory / "config.json")
    experts = config.get("num_experts") or config.get("num_local_experts")
    inner = "moe_intermediate_size" if experts else "intermediate_size"
    check_model_config(config, directory / "config.json", required=(*DECODER_SIZES, inner))
    return parse_shape(config)


def parse_shape(config: dict[str, Any]) -> ModelShape:
    """The shape in a `config.json`."""
    heads, experts = config["num_attention_heads"], config.get("num_experts") or config.get("num_local_experts") or 0
    return ModelShape(
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        inner=config["moe_intermediate_size"] if experts else config["intermediate_size"],
        vocab=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings")),
        experts=experts,
        active=config.get("num_experts_per_tok", 0) if experts else 0,
    )
