"""Validates the sizes in a model's `config.json` before allocation, and reads its end tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollouts.training.json_files import read_json_file

GENERATION_FILE = "generation_config.json"
LIMITS = {
    "vocab_size": 100_000_000,
    "hidden_size": 1_000_000,
    "intermediate_size": 10_000_000,
    "moe_intermediate_size": 10_000_000,
    "num_hidden_layers": 10_000,
    "num_attention_heads": 100_000,
    "num_key_value_heads": 100_000,
    "head_dim": 100_000,
    "num_experts": 100_000,
    "num_local_experts": 100_000,
    "num_experts_per_tok": 100_000,
    "max_position_embeddings": 1_000_000_000,
    # Names in the configs of GPT-2 and nanochat.
    "n_layer": 10_000,
    "n_head": 100_000,
    "n_kv_head": 100_000,
    "n_embd": 1_000_000,
    "n_positions": 1_000_000_000,
    "sequence_len": 1_000_000_000,
}
"""Maximum plausible value of each key."""
LOWEST = {
    "num_experts": 0,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "moe_intermediate_size": 0,
    "num_key_value_heads": 0,
    "max_position_embeddings": -1,  # some families: unlimited
    "n_positions": -1,
}
DECODER_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


def check_model_config(
    config: Mapping[str, Any], source: object = "config.json", required: tuple[str, ...] = ()
) -> None:
    """Raise `ValueError` naming the first size that is missing, no whole number, not positive, or implausibly large.

    `None` counts as missing. Also checks `text_config`, the language model of a multimodal one.
    """
    for key in required:
        if config.get(key) is None:
            raise ValueError(f"{source} has no {key}")
    for key, limit in LIMITS.items():
        lowest = LOWEST.get(key, 1)
        value = config.get(key)
        for size in value if isinstance(value, list) else [value]:  # some families list a size per layer
            if size is None:
                continue
            if isinstance(size, bool) or not isinstance(size, int) or not lowest <= size <= limit:
                raise ValueError(f"{key} = {value!r} in {source} must be a whole number from {lowest} to {limit}")
    if isinstance(nested := config.get("text_config"), Mapping):
        check_model_config(nested, f"text_config of {source}")


def read_eos_ids(path: Path) -> list[int]:
    """The end tokens that a configuration file names; empty if it names none or is missing."""
    ids = read_json_file(path).get("eos_token_id") if path.is_file() else None
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
