"""Tiny random models with byte-level BPE tokenizers, as Hugging Face directories, for tests of GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, trainers
from transformers import AutoConfig, AutoModelForCausalLM

from prime_rl.pretrained.gguf_tokenizer import _build_byte_level

CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "In 2024 I'd pay 1234567  dollars\n\n  for naïve café 日本語 🙂",
    "  leading and trailing  \t tabs\r\n\r\nend ",
    "def f(x):\n    return x ** 2  # it's we'll THEY'VE",
    "e\u0301 combining, <|im_start|>user\nquoted<|im_end|>",
    "",
]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def save_model(directory: Path, family: str, pre: str = "qwen2", **options: Any) -> Path:
    """A random model of `family`, a `model_type` that GGUF holds, whose tokenizer splits text as `pre` does."""
    directory.mkdir(parents=True)
    vocab_size = _save_tokenizer(directory, pre)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    sizes |= {"rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}, "vocab_size": vocab_size, **options}
    if family == "qwen2":
        sizes["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
    if family == "smollm3":  # every fourth layer differs; the default padding token exceeds the vocabulary
        sizes = {"pad_token_id": None, **sizes, "num_hidden_layers": 4}
    if family == "gemma3_text":  # every sixth layer differs, and has the rotary parameters of its own
        theta = {"rope_type": "default", "rope_theta": 1_000_000.0}
        ropes = {"full_attention": theta, "sliding_attention": theta | {"rope_theta": 10_000.0}}
        sizes |= {"num_hidden_layers": 6, "sliding_window": 8, "query_pre_attn_scalar": 8, "rope_parameters": ropes}
        sizes |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms and biases with values that are not neutral
                parameter.uniform_(0.5, 1.5)
            assert name
    model.save_pretrained(directory)
    return directory


def _save_tokenizer(directory: Path, pre: str) -> int:
    metadata = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": []}
    tokenizer = _build_byte_level(metadata, [])
    from tokenizers import pre_tokenizers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in ("<|im_start|>", "<|im_end|>", "<pad>")])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<pad>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return tokenizer.get_vocab_size() + 5
