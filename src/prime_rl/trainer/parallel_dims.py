"""Which processes train together: their number, the process group that joins them, and the mesh they form."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from prime_rl.trainer.config import ParallelDims, SFTConfig, TrainConfig
from rollouts.training.backends.ranks import Ranks


def count_ranks(parallel: ParallelDims, environ: Mapping[str, str]) -> int:
    """Ranks of this run: what torchrun started, which must be what the config asks for (`ValueError`)."""
    started = int(environ.get("WORLD_SIZE", "1"))
    if parallel.dp is not None and parallel.dp != started:
        raise ValueError(
            f"parallel.dp is {parallel.dp} but {started} ranks were started: leave parallel.dp out, "
            f"or use torchrun --nproc-per-node {parallel.dp}"
        )
    if started % parallel.dp_replicate:
        raise ValueError(f"parallel.dp_replicate is {parallel.dp_replicate}, which does not divide {started} ranks")
    return started


def join_ranks(config: TrainConfig | SFTConfig, device: torch.device) -> Ranks:
    """Meet the other ranks: gloo between CPUs, NCCL between GPUs; the only rank needs no process group.

    A process group that is there already is used.
    `ValueError` when the others do not come within `dist_timeout_seconds`.
    """
    size = count_ranks(config.parallel, os.environ)
    if size == 1:
        return Ranks(device=device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout_s = config.dist_timeout_seconds
    try:
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl", timeout=timedelta(seconds=timeout_s)
            )
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise ValueError(
            f"rank {os.environ.get('RANK')} of {size} did not meet the others within {timeout_s:g} s: start all of "
            "them with the same MASTER_ADDR and MASTER_PORT, as torchrun does"
        ) from error
    return Ranks(dist.get_rank(), size, device)


def leave_ranks() -> None:
    """Take leave of the process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def build_mesh(parallel: ParallelDims, ranks: Ranks) -> DeviceMesh:
    """All ranks in one row of shards, or `dp_replicate` rows that each hold the whole model."""
    kind = ranks.device.type
    if parallel.dp_replicate == 1:
        return init_device_mesh(kind, (ranks.size,), mesh_dim_names=("shard",))
    shape = (parallel.dp_replicate, ranks.size // parallel.dp_replicate)
    return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))
