"""Which processes train together: their number, the process group that joins them, and the mesh they form.

    rank = ((pp * dp_replicate + replicate) * dp_shard + shard) * cp * tp + context * tp + tensor

Ranks that talk most stand next to each other: tensor parallel ones innermost, pipeline stages outermost.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from prime_rl.trainer.config import ParallelDims, SFTConfig, TrainConfig
from rollouts.training.backends.ranks import Ranks

__all__ = ["Mesh", "ParallelDims", "Team", "build_mesh", "count_ranks", "join_ranks", "leave_ranks"]


@dataclass(frozen=True)
class Team:
    """The ranks along one dimension of the mesh: this one is number `rank` of `size`; alone it has no `group`."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class Mesh:
    """Where this rank stands among all, by dimension.

    `dense` is what parameters are sharded over, `experts` those of experts where ranks have different ones.
    """

    dims: ParallelDims = field(default_factory=lambda: ParallelDims().resolve(1))
    dp_rank: int = 0
    pp: Team = Team()
    ends: dist.ProcessGroup | None = None
    """The first and the last stage, on a rank of either."""
    cp: Team = Team()
    tp: Team = Team()
    ep: Team = Team()
    dense: DeviceMesh | None = None
    experts: DeviceMesh | None = None

    @property
    def dp_size(self) -> int:
        """Groups of ranks that each train a share of the batch."""
        return self.dims.dp or 1

    @property
    def speaks(self) -> bool:
        """Whether this rank counts and reports for those that train the same micro-batches."""
        return self.tp.rank == self.cp.rank == 0 and self.pp.rank == self.pp.size - 1


def count_ranks(parallel: ParallelDims, environ: Mapping[str, str]) -> int:
    """Ranks of this run: what torchrun started, which must be what the config asks for (`ValueError`)."""
    started = int(environ.get("WORLD_SIZE", "1"))
    parallel.resolve(started)
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
        _group.cache_clear()
        dist.destroy_process_group()


def build_mesh(parallel: ParallelDims, ranks: Ranks) -> Mesh:
    """This rank's place among all; every rank must call."""
    dims = parallel.resolve(ranks.size)
    if ranks.size == 1:
        return Mesh(dims)
    replicas, shards = dims.dp_replicate, dims.dp_shard or 1
    mesh = _arrange(ranks, dims, replicate=replicas, shard=shards, cp=dims.cp, tp=dims.tp)
    # Ranks that share tokens share parameters too: to these they are data parallel.
    held = _arrange(ranks, dims, replicate=replicas, shard=shards * dims.cp, tp=dims.tp)
    by_expert = _arrange(ranks, dims, replicate=replicas, shard=shards * dims.cp // dims.ep, ep=dims.ep, tp=dims.tp)
    return Mesh(
        dims,
        dp_rank=mesh.get_local_rank("replicate") * shards + mesh.get_local_rank("shard"),
        pp=_team(mesh, "pp"),
        ends=_join_ends(ranks, dims.pp) if dims.pp > 1 else None,
        cp=_team(mesh, "cp"),
        tp=_team(mesh, "tp"),
        ep=_team(by_expert, "ep"),
        dense=_holders(held),
        experts=_holders(by_expert) if dims.ep > 1 else None,
    )


def _arrange(ranks: Ranks, dims: ParallelDims, **sizes: int) -> DeviceMesh:
    """All ranks by these dimensions, inside of stages."""
    names, shape = ("pp", *sizes), (dims.pp, *sizes.values())
    numbers = torch.arange(ranks.size).view(shape)
    groups = [_join(numbers.movedim(dim, -1).reshape(-1, shape[dim]).tolist(), ranks) for dim in range(len(shape))]
    held = [group for group in groups if group is not None]
    assert len(held) == len(groups), "every rank is in one row of each dimension"
    return DeviceMesh.from_group(held, ranks.device.type, numbers, mesh_dim_names=names)


def _join_ends(ranks: Ranks, pp: int) -> dist.ProcessGroup | None:
    """A group for each rank of the first stage and the one at the same place of the last; this rank's, if it is one."""
    stride = ranks.size // pp
    return _join([[rank, ranks.size - stride + rank] for rank in range(stride)], ranks)


def _join(rows: Sequence[Sequence[int]], ranks: Ranks) -> dist.ProcessGroup | None:
    """A group of each row of ranks, made by all of them in this order; returns the one that this rank is in."""
    groups = [_group(dist.group.WORLD, tuple(row)) for row in rows]
    return next((group for row, group in zip(rows, groups, strict=True) if ranks.rank in row), None)


@cache
def _group(world: dist.ProcessGroup, members: tuple[int, ...]) -> dist.ProcessGroup:
    """The group of these ranks. Each has connections and threads (or buffers on a GPU), so there is one, whichever
    dimensions of whichever mesh it serves; all ranks must ask."""
    return world if len(members) == world.size() else dist.new_group(list(members))


def _holders(mesh: DeviceMesh) -> DeviceMesh:
    """Over which ranks this one's parameters are sharded, and copied where there are several copies."""
    return mesh["shard"] if mesh["replicate"].size() == 1 else mesh["replicate", "shard"]


def _team(mesh: DeviceMesh, name: str) -> Team:
    size = mesh[name].size()
    return Team() if size == 1 else Team(mesh.get_local_rank(name), size, mesh.get_group(name))
