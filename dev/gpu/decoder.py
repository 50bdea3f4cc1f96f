"""The native decoder and the adapter of transformers models, on the device, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from dev.gpu.context import Context, Measured, measure_error

from prime_rl.trainer.models.attention import PackedAttention
from prime_rl.trainer.models.hf_model import load_hf_model
from prime_rl.trainer.models.registry import load_decoder

OPTIONS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True},
    "gemma3_text": {"sliding_window": 16, "sliding_window_pattern": 2},
}


def write_transformers_model(context: Context, family: str) -> tuple[Any, Path]:
    """A random transformers model on the device, and its directory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    hidden, layers = (64, 2) if context.tiny else (512, 4)
    sizes: dict[str, Any] = {
        "vocab_size": 300,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "max_position_embeddings": 1024,
        "initializer_range": 0.1,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = AutoConfig.for_model(family, **sizes, **OPTIONS.get(family, {}))
    inner = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    directory = context.folder(family)
    inner.save_pretrained(directory)
    return inner.to(context.device).eval(), directory


@torch.no_grad()
def compare_logits(context: Context, family: str) -> Measured:
    """Logits of a sequence in fp32."""
    inner, directory = write_transformers_model(context, family)
    model = load_decoder(directory, device=context.device)
    num = 40 if context.tiny else 700
    ids, positions = torch.randint(300, (num,), device=context.device), torch.arange(num, device=context.device)
    hidden = model(ids, positions, PackedAttention([num], context.device, "sdpa"))
    return Measured(measure_error([model.logits(hidden)], [inner(input_ids=ids[None]).logits[0]]))


@torch.no_grad()
def compare_packed(context: Context, family: str) -> Measured:
    """Logits of a pack of two sequences by the adapter, for a family without a native decoder."""
    inner, directory = write_transformers_model(context, family)
    options = {"random_init": False, "num_layers": None, "seed": 0, "dtype": torch.float32}
    model = load_hf_model(directory, device=context.device, **options)  # type: ignore[arg-type]
    lengths = [25, 14]
    parts = [torch.randint(300, (num,), device=context.device) for num in lengths]
    positions = torch.cat([torch.arange(num, device=context.device) for num in lengths])
    hidden = model(torch.cat(parts), positions, PackedAttention(lengths, context.device, "sdpa"))
    expected = torch.cat([inner(input_ids=part[None]).logits[0] for part in parts])
    return Measured(measure_error([model.logits(hidden)], [expected]))
