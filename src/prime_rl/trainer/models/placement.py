"""The device, number format and threads that `auto` stands for, in the trainer and in the embedded engine."""

from __future__ import annotations

import os

import torch

from prime_rl.runtime.machine import FEW_CORES, num_cores


def find_device(name: str) -> torch.device:
    """The device of `model.device`; `auto` is a GPU if there is one. `ValueError` if this machine does not have it."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        if (assigned := os.environ.get("CUDA_VISIBLE_DEVICES", "")) not in ("", "-1"):
            from loguru import logger

            logger.warning(f"CUDA_VISIBLE_DEVICES={assigned}, but torch finds no GPU: computing on the CPU")
        return torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"model.device {name!r} is not a device: use auto, cpu or cuda:0") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"model.device {name!r} is not supported: use auto, cpu or cuda:0")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= num_gpus:
        raise ValueError(f"model.device is {name!r}, but torch finds {num_gpus} GPUs: use auto or cpu")
    return device


def find_dtype(name: str, device: torch.device) -> torch.dtype:
    """The number format of `model.dtype`; `auto` is bfloat16 on a GPU and float32 on a CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def limit_threads() -> int:
    """Set the number of threads to OMP_NUM_THREADS, by default one on few cores; returns it."""
    configured, cores = os.environ.get("OMP_NUM_THREADS", ""), num_cores()
    threads = int(configured) if configured.isdigit() else 0
    threads = threads or (1 if cores <= FEW_CORES else cores // 2)
    torch.set_num_threads(threads)
    return threads
