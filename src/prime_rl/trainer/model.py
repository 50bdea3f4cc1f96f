"""The model of a trainer: which device, number format and attention, and where its weights come from."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from prime_rl.trainer.config import ModelConfig
from prime_rl.trainer.models.attention import AttentionMode
from prime_rl.trainer.models.causal_lm import CausalLM
from prime_rl.trainer.models.registry import load_decoder
from prime_rl.utils.tokenizer import resolve_model_dir

FEW_CORES = 4
"""On so few cores the processes of a run would fight over them, and two threads that fight are slower than one."""


@dataclass(frozen=True)
class Placement:
    """Where and how the model is computed; the optimizer always works in float32."""

    device: torch.device
    dtype: torch.dtype
    attn: AttentionMode


def resolve_placement(config: ModelConfig) -> Placement:
    """Settle `auto` for device, dtype and attention; `ValueError` for a device this machine does not have."""
    has_gpu = torch.cuda.is_available()
    name = config.device if config.device != "auto" else ("cuda" if has_gpu else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"model.device {name!r} is no device: use auto, cpu or cuda:0") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"model.device {name!r} is not supported: use auto, cpu or cuda:0")
    if device.type == "cuda" and (not has_gpu or (device.index or 0) >= torch.cuda.device_count()):
        raise ValueError(f"model.device is {name!r} but this machine has {torch.cuda.device_count()} GPUs: use cpu")
    is_gpu = device.type == "cuda"
    wide = config.dtype == "float32" or (config.dtype == "auto" and not is_gpu)
    attn: AttentionMode = config.attn if config.attn != "auto" else ("exact" if wide and not is_gpu else "sdpa")
    return Placement(device, torch.float32 if wide else torch.bfloat16, attn)


def load_model(config: ModelConfig, placement: Placement) -> tuple[CausalLM, Path]:
    """The model in float32 on its device, and the directory it was read from."""
    model_dir = resolve_model_dir(config.name)
    debug = config.debug
    model = load_decoder(
        model_dir,
        random_init=debug.random_init,
        num_layers=debug.num_layers,
        seed=debug.seed,
        device=placement.device,
    )
    return model, model_dir


def limit_threads() -> int:
    """Compute with OMP_NUM_THREADS threads, or when that is unset with one on few cores; returns the number."""
    cores = os.cpu_count() or 1
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    num_threads = int(wanted) if wanted.isdigit() and int(wanted) > 0 else (1 if cores <= FEW_CORES else cores // 2)
    torch.set_num_threads(num_threads)
    return num_threads
