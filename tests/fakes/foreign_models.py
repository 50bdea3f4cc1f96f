"""Random models of 10 to 30 million parameters in the shapes of published families, with published tokenizers.

Each differs from the others in what programs tend to take for granted: tied heads, vocabulary sizes, special tokens,
chat templates, generation configs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from real_tokenizers import fetch_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

MARKED = """\
{%- for message in messages -%}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>' + message['content'] + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>' -}}{% endif -%}
"""


@dataclass(frozen=True)
class ForeignModel:
    """A model family with a tokenizer of another vocabulary size."""

    family: str
    tokenizer: str
    hidden: int
    vocab: int
    """Rows of the embedding, at least as many as the tokenizer has."""
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Changes of `tokenizer_config.json`; None removes a key."""
    generation: Mapping[str, Any] | None = None
    """`generation_config.json`, if there is one."""


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FOREIGN_MODELS = {
    # SentencePiece with byte fallback, untied head, no padding token, no chat template, no generation config.
    "llama2": ForeignModel(
        "llama", "llama2", 160, 32003, {"tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2}
    ),
    # Byte-level BPE as tiktoken; several end tokens, a template that adds a system message, RoPE scaling, no pad token.
    "llama3": ForeignModel(
        "llama",
        "llama3_2",
        96,
        128256,
        {"rope_parameters": LLAMA3_ROPE, "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009]},
        generation={"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "temperature": 0.6},
    ),
    # A template with a default system message, no start token; biases.
    "qwen2": ForeignModel(
        "qwen2",
        "qwen2_5",
        96,
        151667,
        {"bos_token_id": 151643, "eos_token_id": 151645},
        generation={"eos_token_id": [151645, 151643], "pad_token_id": 151643, "repetition_penalty": 1.05, "top_k": 20},
    ),
    # Untied head; a template that drops earlier reasoning; no generation config.
    "qwen3": ForeignModel(
        "qwen3", "qwen3", 64, 151669, {"tie_word_embeddings": False, "head_dim": 32, "eos_token_id": 151645}
    ),
    # Layers without RoPE; an end token of the template that only generation_config.json names.
    "smollm3": ForeignModel(
        "smollm3",
        "llama3",
        96,
        128261,
        {"pad_token_id": 128002, "bos_token_id": 128000, "eos_token_id": 128001},
        {"pad_token": "<|reserved_special_token_0|>", "chat_template": MARKED},
        {"eos_token_id": 128009},
    ),
    # SentencePiece with 262,144 tokens, sliding windows.
    "gemma3": ForeignModel(
        "gemma3_text",
        "gemma3",
        64,
        262147,
        {"sliding_window": 16, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0},
        generation={"bos_token_id": 2, "eos_token_id": [1, 106], "pad_token_id": 0, "do_sample": True},
    ),
    # A vocabulary of 200,000 without a chat template, end token equal to the padding token.
    "gptoss": ForeignModel(
        "qwen3",
        "gptoss",
        64,
        200021,
        {"head_dim": 32, "eos_token_id": 199999, "pad_token_id": 199999},
        {"eos_token": "<|endoftext|>", "bos_token": None},
    ),
}


def save_foreign_model(name: str, directory: Path) -> Path:
    """Write a model as a Hugging Face directory; skips the test if its tokenizer cannot be downloaded."""
    row = FOREIGN_MODELS[name]
    source = fetch_tokenizer(row.tokenizer)
    options: dict[str, Any] = {
        "vocab_size": row.vocab,
        "hidden_size": row.hidden,
        "intermediate_size": 3 * row.hidden,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": row.hidden // 4,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        **row.options,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(row.family, **options))
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    if row.generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(row.generation))
    (directory / "tokenizer.json").symlink_to(source / "tokenizer.json")
    settings = json.loads((source / "tokenizer_config.json").read_text()) | row.settings
    settings = {key: value for key, value in settings.items() if value is not None}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory
