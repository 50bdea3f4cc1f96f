"""Loads the trained model: device, number format, attention and weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from prime_rl.pretrained.fetch import KNOWN_MODELS
from prime_rl.runtime.tokenizer import ASSETS_DIR, resolve_model_dir
from prime_rl.trainer.lora import LoraSpec, add_lora
from prime_rl.trainer.model_config import LoraConfig, ModelConfig
from prime_rl.trainer.models.attention import has_flash
from prime_rl.trainer.models.causal_lm import CausalLM
from prime_rl.trainer.models.decoder_config import AttentionMode, choose_impl
from prime_rl.trainer.models.placement import find_device, find_dtype
from prime_rl.trainer.models.registry import load_causal_lm
from prime_rl.trainer.sft.config import SFTModelConfig
from rollouts.kernels.cpu import arithmetic_dtype
from rollouts.kernels.linear import Linear


@dataclass(frozen=True)
class DeviceConfig:
    """Device, data types and attention of the model; the optimizer always uses float32."""

    device: torch.device
    dtype: torch.dtype
    """Precision of weights, keys and values."""
    attn: AttentionMode
    arithmetic: torch.dtype
    """Compute data type: `dtype`, or float32 for a bfloat16 model on a CPU, see `arithmetic_dtype`."""


def resolve_placement(config: ModelConfig, local_rank: int = 0, num_ranks: int = 1) -> DeviceConfig:
    """Resolve `auto` for device, dtype and attention; `ValueError` for a device this machine does not have.

    Each `local_rank` uses its own GPU. Several ranks exchange tensors in `dtype`, so they also compute in it.
    """
    device = find_device(config.device)
    is_gpu = device.type == "cuda"
    if device == torch.device("cuda"):
        device = find_device(f"cuda:{local_rank}")
    if is_gpu and local_rank and device.index != local_rank:
        raise ValueError(
            f"model.device is {config.device!r}, a single GPU for all ranks: use cuda for one GPU per rank"
        )
    dtype = find_dtype(config.dtype, device)
    may_be_exact = not is_gpu and not isinstance(config, SFTModelConfig) and config.compile is None
    may_be_exact = may_be_exact and config.attn in ("auto", "exact")
    arithmetic = arithmetic_dtype(dtype, device, may_be_exact) if num_ranks == 1 else dtype
    exact = may_be_exact and arithmetic != torch.bfloat16
    can_flash = dtype == torch.bfloat16 and has_flash(device)
    attn = config.attn if config.attn != "auto" else "exact" if exact else "flash" if can_flash else "sdpa"
    if attn == "flash" and not can_flash:
        raise ValueError("model.attn flash needs bfloat16 on a GPU supported by torch's FlashAttention: use sdpa")
    return DeviceConfig(device, dtype, attn, arithmetic)


def load_model(
    config: ModelConfig,
    placement: DeviceConfig,
    seed: int = 0,
    *,
    sharded: bool = False,
    has_critic: bool = False,
    max_len: int | None = None,
) -> tuple[CausalLM, Path]:
    """Load the model in the optimizer's precision; returns it with its directory.

    It is on its device, or on the CPU when it is to be `sharded`, because the full model may not fit. With `lora`, only
    a new adapter initialized from `seed` is trainable; if nothing else will be, the other weights are loaded in the
    precision of the model, which takes half of the memory, of sharded models also later. `max_len`: see
    `HFCausalLM`.
    """
    model_dir = resolve_model_dir(config.name)
    debug = config.debug
    dtype = torch.float64 if placement.dtype == torch.float64 else torch.float32
    is_native = choose_impl(config.impl, model_dir) != "hf"  # transformers' models are checked against fp32
    if config.lora is not None and is_native and not (config.lora.modules_to_save or has_critic):
        dtype = placement.dtype
    model = load_causal_lm(
        model_dir,
        impl=config.impl,
        random_init=debug.random_init,
        num_layers=debug.num_layers,
        seed=debug.seed,
        dtype=dtype,
        device="cpu" if sharded else placement.device,
        max_len=max_len,
    )
    for module in model.modules():
        if isinstance(module, Linear):
            module.exact = placement.attn == "exact"
    if config.lora is not None:
        was_tied = model.config.tie_word_embeddings
        add_lora(model, build_adapter_spec(config.lora), seed)
        is_untied = was_tied and not model.config.tie_word_embeddings
        if is_untied and config.lora.merge and not isinstance(config, SFTModelConfig):
            raise ValueError(
                f"model.lora.modules_to_save unties the output head of {config.name} from its embedding: inference "
                "servers keep them tied and cannot load the merged weights\n"
                "  leave out lm_head and embed_tokens, or train without model.lora"
            )
    if placement.attn == "exact" and placement.arithmetic != placement.dtype:
        model.round_inputs(placement.dtype)
    return model, model_dir


def build_adapter_spec(config: LoraConfig) -> LoraSpec:
    """Convert the config section to a `LoraSpec`."""
    return LoraSpec(
        rank=config.rank,
        alpha=config.alpha,
        dropout=config.dropout,
        target_modules=tuple(config.target_modules),
        modules_to_save=tuple(config.modules_to_save),
    )


def find_base_name(name: str, model_dir: Path) -> str:
    """Base model name in the adapter config: the hub id, else the directory, which other programs load, too."""
    is_local = Path(name).expanduser().exists() or (ASSETS_DIR / name).is_dir() or name in KNOWN_MODELS
    return str(model_dir) if is_local else name
