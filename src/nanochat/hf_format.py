"""Converts nanochat models to Hugging Face directories for `rl`, `transformers` and vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from nanochat.gpt import GPT, LOGIT_CAP, ROPE_BASE, GPTConfig
from nanochat.tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS, NanochatTokenizer
from rollouts.training.tensor_files import save_tensors

_LAYER_PARTS = {
    "attn.c_q": "self_attn.q_proj",
    "attn.c_k": "self_attn.k_proj",
    "attn.c_v": "self_attn.v_proj",
    "attn.c_proj": "self_attn.o_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
_EPS = 1.1920928955078125e-07  # default of torch's rms_norm in float32


def hf_name(name: str) -> str:
    """The Hugging Face name of a parameter; unknown names are returned unchanged."""
    if name == "transformer.wte.weight":
        return "model.embed_tokens.weight"
    head, _, rest = name.partition("transformer.h.")
    if head or not rest:
        return name
    layer, _, part = rest.partition(".")
    return f"model.layers.{layer}.{_LAYER_PARTS[part.removesuffix('.weight')]}.weight"


def to_hf(held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under their Hugging Face names; views, not copies."""
    return {hf_name(name): tensor for name, tensor in held.items()}


def to_hf_config(config: GPTConfig, tokenizer: NanochatTokenizer) -> dict[str, Any]:
    """A `config.json`."""
    return {
        "architectures": ["NanoChatForCausalLM"],
        "model_type": "nanochat",
        "dtype": "float32",
        "vocab_size": config.vocab_size,
        "hidden_size": config.n_embd,
        "intermediate_size": 4 * config.n_embd,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_kv_head,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.sequence_len,
        "hidden_act": "relu2",
        "rms_norm_eps": _EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_BASE},
        "final_logit_softcapping": LOGIT_CAP,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.get_bos_token_id(),
        "eos_token_id": tokenizer.encode_special("<|assistant_end|>"),
        "pad_token_id": tokenizer.encode_special("<|assistant_end|>"),
    }


def export_model(directory: Path, model: GPT, tokenizer: NanochatTokenizer) -> None:
    """Write weights, config, tokenizer and chat template."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    save_tensors(to_hf(tensors), directory / "model.safetensors", metadata={"format": "pt"})
    config = to_hf_config(model.config, tokenizer)
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    tokenizer.save(directory)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|assistant_end|>",
        "pad_token": "<|assistant_end|>",
        "additional_special_tokens": list(SPECIAL_TOKENS),
        "model_max_length": model.config.sequence_len,
        "clean_up_tokenization_spaces": False,
    }
    files = {"config.json": config, "generation_config.json": special, "tokenizer_config.json": tokenizer_config}
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
