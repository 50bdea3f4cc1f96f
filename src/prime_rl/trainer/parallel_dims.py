"""World size, process group and device mesh of a trainer.

    rank = ((pp * dp_replicate + replicate) * dp_shard + shard) * cp * tp + context * tp + tensor

Dimensions with the most communication are innermost: tensor parallel ranks are adjacent, pipeline stages outermost.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from prime_rl.runtime.machine import check_interfaces
from prime_rl.trainer.parallel_config import ParallelDims
from rollouts.training.backends.ranks import Ranks


@dataclass(frozen=True)
class MeshAxisGroup:
    """One dimension of the mesh: this rank's index, the size, and the process group (None for size 1)."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class Mesh:
    """This rank's coordinates in the mesh.

    `dense` is the FSDP mesh of parameters, `experts` that of expert parameters under expert parallelism.
    """

    dims: ParallelDims = field(default_factory=lambda: ParallelDims().resolve(1))
    dp_rank: int = 0
    pp: MeshAxisGroup = MeshAxisGroup()
    ends: dist.ProcessGroup | None = None
    """Group of the first and last pipeline stage, on their ranks."""
    cp: MeshAxisGroup = MeshAxisGroup()
    tp: MeshAxisGroup = MeshAxisGroup()
    ep: MeshAxisGroup = MeshAxisGroup()
    dense: DeviceMesh | None = None
    experts: DeviceMesh | None = None

    @property
    def dp_size(self) -> int:
        """Data parallel size."""
        return self.dims.dp or 1

    @property
    def is_reporting_rank(self) -> bool:
        """Whether this rank reports metrics for all ranks with the same micro-batches."""
        return self.tp.rank == self.cp.rank == 0 and self.pp.rank == self.pp.size - 1


def init_process_group(parallel: ParallelDims, timeout_s: float, device: torch.device) -> Ranks:
    """Initialize the process group: gloo for CPUs, NCCL for GPUs; a single rank needs none.

    An existing process group is reused. `TimeoutError` when the ranks do not connect within `timeout_s`; `ValueError`
    for interfaces that this machine lacks, and if torchrun started another number of ranks than the config has.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    parallel.resolve(size)
    if size == 1:
        return Ranks(device=device)
    check_interfaces("GLOO_SOCKET_IFNAME")
    if device.type == "cuda":
        check_interfaces("NCCL_SOCKET_IFNAME")
        torch.cuda.set_device(device)
    try:
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl", timeout=timedelta(seconds=timeout_s)
            )
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise TimeoutError(
            f"rank {os.environ.get('RANK')} of {size} did not connect to the others within {timeout_s:g} s: start all "
            "of them with the same MASTER_ADDR and MASTER_PORT, as torchrun does"
        ) from error
    return Ranks(dist.get_rank(), size, device)


def destroy_process_group() -> None:
    """Destroy the process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        _group.cache_clear()
        dist.destroy_process_group()


def build_mesh(parallel: ParallelDims, ranks: Ranks, timeout_s: float) -> Mesh:
    """Build the mesh and its process groups, whose operations time out after `timeout_s` (collective)."""
    dims = parallel.resolve(ranks.size)
    if ranks.size == 1:
        return Mesh(dims)
    replicas, shards = dims.dp_replicate, dims.dp_shard or 1
    timeout = timedelta(seconds=timeout_s)
    mesh = _device_mesh(ranks, dims, timeout, replicate=replicas, shard=shards, cp=dims.cp, tp=dims.tp)
    # Context parallel ranks have different tokens, so parameters are also sharded over them.
    fsdp = _device_mesh(ranks, dims, timeout, replicate=replicas, shard=shards * dims.cp, tp=dims.tp)
    per_expert = shards * dims.cp // dims.ep
    by_expert = _device_mesh(ranks, dims, timeout, replicate=replicas, shard=per_expert, ep=dims.ep, tp=dims.tp)
    return Mesh(
        dims,
        dp_rank=mesh.get_local_rank("replicate") * shards + mesh.get_local_rank("shard"),
        pp=_axis_group(mesh, "pp"),
        ends=_build_end_group(ranks, dims.pp, timeout) if dims.pp > 1 else None,
        cp=_axis_group(mesh, "cp"),
        tp=_axis_group(mesh, "tp"),
        ep=_axis_group(by_expert, "ep"),
        dense=_shard_mesh(fsdp),
        experts=_shard_mesh(by_expert) if dims.ep > 1 else None,
    )


def _device_mesh(ranks: Ranks, dims: ParallelDims, timeout: timedelta, **sizes: int) -> DeviceMesh:
    """Device mesh of all ranks with these dimensions inside each pipeline stage."""
    names, shape = ("pp", *sizes), (dims.pp, *sizes.values())
    numbers = torch.arange(ranks.size).view(shape)
    rows = [numbers.movedim(dim, -1).reshape(-1, shape[dim]).tolist() for dim in range(len(shape))]
    groups = [_groups_of(part, ranks, timeout) for part in rows]
    own = [group for group in groups if group is not None]
    assert len(own) == len(groups), "every rank is in one row of each dimension"
    return DeviceMesh.from_group(own, ranks.device.type, numbers, mesh_dim_names=names)


def _build_end_group(ranks: Ranks, pp: int, timeout: timedelta) -> dist.ProcessGroup | None:
    """Pair each rank of the first stage with its counterpart in the last; returns this rank's group, if any."""
    stride = ranks.size // pp
    return _groups_of([[rank, ranks.size - stride + rank] for rank in range(stride)], ranks, timeout)


def _groups_of(rows: Sequence[Sequence[int]], ranks: Ranks, timeout: timedelta) -> dist.ProcessGroup | None:
    """Create one group per row of ranks, in the same order on all ranks; returns the group of this rank."""
    groups = [_group(dist.group.WORLD, tuple(row), timeout) for row in rows]
    return next((group for row, group in zip(rows, groups, strict=True) if ranks.rank in row), None)


@cache
def _group(world: dist.ProcessGroup, members: tuple[int, ...], timeout: timedelta) -> dist.ProcessGroup:
    """Process group of these ranks, cached across meshes because groups own connections, threads and buffers
    (collective)."""
    return world if len(members) == world.size() else dist.new_group(list(members), timeout=timeout)


def _shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """FSDP mesh: shard dimension, and replicate dimension if larger than 1 (HSDP)."""
    return mesh["shard"] if mesh["replicate"].size() == 1 else mesh["replicate", "shard"]


def _axis_group(mesh: DeviceMesh, name: str) -> MeshAxisGroup:
    size = mesh[name].size()
    return MeshAxisGroup() if size == 1 else MeshAxisGroup(mesh.get_local_rank(name), size, mesh.get_group(name))
