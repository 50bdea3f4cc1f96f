"""Base directory, device, compute dtype and distributed setup of nanochat."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from rollouts.training.backends.ranks import Ranks

log = logging.getLogger("nanochat")

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
RENDEZVOUS_S = 300


def get_base_dir() -> Path:
    """$NANOCHAT_BASE_DIR, or ~/.cache/nanochat: tokenizer, checkpoints and data."""
    return Path(os.environ.get("NANOCHAT_BASE_DIR") or Path.home() / ".cache" / "nanochat").expanduser()


def resolve_device(device: torch.device | str = "auto") -> torch.device:
    """The named device; "auto" is the best available, "cuda" without a GPU is the CPU (logged once)."""
    if str(device) == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device {str(device)!r} is no device: use auto, cpu, cuda or cuda:0") from error
    if found.type == "cuda" and not torch.cuda.is_available():
        _warn_once(f"device is {str(device)!r} but this machine has no GPU: using the CPU")
        return torch.device("cpu")
    return found


def resolve_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """The compute dtype. None: bfloat16 on a GPU, float32 on a CPU, where it is faster."""
    if name is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Autocast to `dtype` with float32 parameters; no-op for float32."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


@contextmanager
def open_ranks(device: torch.device | str = "auto", backend: str | None = None) -> Iterator[Ranks]:
    """Process group from torchrun's variables, nccl on GPUs and gloo on CPUs; a single rank without them.

    A `backend` that is another one is logged. RANK without LOCAL_RANK, as by hand, takes the GPU `RANK % GPUs`.
    `TimeoutError` when the others do not come.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    where = resolve_device(device)
    used = "nccl" if where.type == "cuda" else "gloo"
    if backend not in (None, used):
        _warn_once(f"distributed.backend is {backend!r}, but collectives on {where.type} use {used}")
    if size == 1:
        yield Ranks(device=where)
        return
    rank = _read_rank(size)
    if where.type == "cuda":
        local = int(os.environ.get("LOCAL_RANK", rank % torch.cuda.device_count()))
        where = torch.device("cuda", local)
        torch.cuda.set_device(where)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    wait_s = int(os.environ.get("NANOCHAT_RENDEZVOUS_S", RENDEZVOUS_S))
    log.info("rank %d waits for %d ranks at %s", rank, size, address)
    try:
        store, rank, size = next(rendezvous("env://", rank, size, timeout=timedelta(seconds=wait_s)))
        store.set(f"rank {rank}", "connected")
        store.wait([f"rank {other}" for other in range(size)])
        store.set_timeout(default_pg_timeout)  # one rank may wait for another's rewards for longer
        dist.init_process_group(used, store=store, rank=rank, world_size=size)
    except (dist.DistError, TimeoutError, ValueError) as error:
        raise TimeoutError(
            f"rank {rank} waited {wait_s} s for {size} ranks at {address}: start every rank with the same MASTER_ADDR, "
            "MASTER_PORT and WORLD_SIZE and its own RANK"
        ) from error
    try:
        yield Ranks(rank, size, where)
    finally:
        dist.destroy_process_group()


def _read_rank(size: int) -> int:
    rank = os.environ.get("RANK", "")
    if not rank.isdigit() or int(rank) >= size:
        raise ValueError(f"WORLD_SIZE is {size} and RANK {rank!r}: give each process its own RANK from 0 to {size - 1}")
    return int(rank)


@cache
def _warn_once(text: str) -> None:
    log.warning(text)
