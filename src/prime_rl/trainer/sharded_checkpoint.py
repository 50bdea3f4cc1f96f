"""Sharded tensors: shard maps, one checkpoint file per rank, and gathering of full tensors."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollouts.training.backends.ranks import Ranks, is_shard
from rollouts.training.tensor_files import save_tensors

BOXES = "boxes"
"""File metadata key: `{tensor: [offset of the shard in this file, shape of the full tensor]}` as JSON."""

ROWS = "rows"
"""The same in schema 2, which shards by rows only: `{tensor: [first row, rows of the full tensor]}`."""


@dataclass(frozen=True)
class ShardSlice:
    """A slice of a tensor of shape `whole`: `shape` elements per dimension, from `offset`."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]

    def within(self, outer: ShardSlice) -> ShardSlice:
        """Translate a slice of `outer` to a slice of the full tensor."""
        offset = tuple(a + b for a, b in zip(self.offset, outer.offset, strict=True))
        return ShardSlice(offset, self.shape, outer.whole)

    def overlap(self, other: ShardSlice) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """Intersection in the coordinates of this slice and of `other`; None if empty."""
        self_slices, other_slices = [], []
        for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True):
            low, high = max(a, b), min(a + n, b + m)
            if low >= high:
                return None
            self_slices.append(slice(low - a, high - a))
            other_slices.append(slice(low - b, high - b))
        return tuple(self_slices), tuple(other_slices)


ShardSlices = Mapping[str, ShardSlice]
"""Slices by parameter name, for parameters split beyond FSDP."""


def find_local_slice(tensor: Tensor, cut: ShardSlice | None = None) -> ShardSlice:
    """This rank's slice; rows are split into equal chunks, of which the last ones may be shorter."""
    local, offset = local_part(tensor), [0] * tensor.ndim
    if is_shard(tensor):
        for dim, placement in enumerate(tensor.placements):
            if placement.is_shard():
                assert placement.is_shard(0), "parameters are sharded by rows"
                size: int = tensor.device_mesh.size(dim)
                chunk = -(-tensor.shape[0] // size)
                offset[0] = min(tensor.device_mesh.get_local_rank(dim) * chunk, tensor.shape[0])
    box = ShardSlice(tuple(offset), tuple(local.shape), tuple(tensor.shape))
    return box if cut is None else box.within(cut)


@dataclass(frozen=True)
class ShardMap:
    """Ranks of every slice of every parameter; `local` are the slices of this rank."""

    local: Mapping[str, ShardSlice]
    by_name: Mapping[str, Mapping[ShardSlice, Sequence[int]]]

    def copies(self, name: str) -> int:
        """Number of ranks with the same slice as this one."""
        return len(self.by_name[name][self.local[name]])

    def is_first(self, name: str, rank: int) -> bool:
        """Whether this rank is the first with its slice, which writes it."""
        return self.by_name[name][self.local[name]][0] == rank

    def full_shape(self, name: str) -> tuple[int, ...]:
        """Shape of the full parameter."""
        return next(iter(self.by_name[name])).whole


def gather_shard_map(parameters: Mapping[str, Tensor], ranks: Ranks, cuts: ShardSlices | None = None) -> ShardMap:
    """All-gather the shard map (collective)."""
    local = {name: find_local_slice(p, (cuts or {}).get(name)) for name, p in parameters.items()}
    encoded = json.dumps({name: [box.offset, box.shape, box.whole] for name, box in local.items()}).encode()
    by_name: dict[str, dict[ShardSlice, list[int]]] = {}
    for rank, data in enumerate(ranks.gather_bytes(encoded)):
        for name, parts in json.loads(data).items():
            by_name.setdefault(name, {}).setdefault(ShardSlice(*map(tuple, parts)), []).append(rank)
    return ShardMap(local, by_name)


@torch.no_grad()
def gather_full_tensors(
    tensors: Mapping[str, Tensor], shard_map: ShardMap, ranks: Ranks, dtypes: Mapping[str, torch.dtype]
) -> dict[str, Tensor]:
    """Gather full tensors in their `dtypes` on the CPU of rank 0; empty on the other ranks (collective)."""
    whole: dict[str, Tensor] = {}
    for name, parts in shard_map.by_name.items():
        dtype = dtypes[name]
        if ranks.rank == 0:
            whole[name] = torch.empty(shard_map.full_shape(name), dtype=dtype)
        for box, owners in parts.items():
            if 0 in (owners[0], math.prod(box.shape)):
                if ranks.rank == 0 and owners[0] == 0:
                    _place(whole[name], box, local_part(tensors[name]))
            elif ranks.rank == owners[0]:
                dist.send(local_part(tensors[name]).to(ranks.device, dtype).contiguous(), 0)
            elif ranks.rank == 0:
                part = torch.empty(box.shape, dtype=dtype, device=ranks.device)
                dist.recv(part, owners[0])
                _place(whole[name], box, part)
    return whole


def _place(whole: Tensor, box: ShardSlice, part: Tensor) -> None:
    whole[tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))] = part.to("cpu", whole.dtype)


def shard_name(kind: str, rank: int, size: int) -> str:
    """`model.safetensors` for a single rank, `model-1-of-2.safetensors` for the first of two."""
    return f"{kind}.safetensors" if size == 1 else f"{kind}-{rank + 1}-of-{size}.safetensors"


def save_shards(
    directory: Path, kind: str, tensors: Mapping[str, Tensor], boxes: Mapping[str, ShardSlice], ranks: Ranks
) -> None:
    """Write this rank's shards with their slices; tensors without a slice are full."""
    local = {name: local_part(tensor).detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    cut = {name: [box.offset, box.whole] for name, box in boxes.items() if name in local and box.shape != box.whole}
    path = directory / shard_name(kind, ranks.rank, ranks.size)
    save_tensors(local, path, metadata={BOXES: json.dumps(cut)} if cut else None)
    with path.open("rb") as file:
        os.fsync(file.fileno())


class Shards:
    """Tensors of all files of one kind."""

    def __init__(self, source: Path, pieces: Mapping[str, list[tuple[ShardSlice, Any]]]) -> None:
        self.source = source
        self._pieces = pieces

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of the full tensor; None for an unknown name."""
        pieces = self._pieces.get(name)
        return pieces[0][0].whole if pieces else None

    def read(self, name: str, box: ShardSlice | None = None) -> Tensor:
        """Read the slice `box` of a tensor, or the full tensor; only the needed bytes are read."""
        pieces = self._pieces[name]
        if box is None or box.shape == box.whole:
            if len(pieces) == 1 and pieces[0][0].shape == pieces[0][0].whole:
                whole: Tensor = pieces[0][1].get_tensor(name)
                return whole
            box = ShardSlice((0,) * len(pieces[0][0].whole), pieces[0][0].whole, pieces[0][0].whole)
        out: Tensor | None = None
        num_read = 0
        for piece, file in pieces:
            both = piece.overlap(box)
            if both is None:
                continue
            part: Tensor = file.get_slice(name)[both[0]]
            out = torch.empty(box.shape, dtype=part.dtype) if out is None else out
            out[both[1]] = part
            num_read += part.numel()
        if num_read != math.prod(box.shape):
            raise ValueError(f"{self.source} is missing parts of {name}: a file is missing")
        if out is None:  # empty slice
            out = torch.empty(box.shape, dtype=pieces[0][1].get_slice(name)[0:0].dtype)
        return out


@contextmanager
def open_shards(directory: Path, kind: str, num_ranks: int) -> Iterator[Shards]:
    """Open the files written by `num_ranks` ranks; `ValueError` when one cannot be read."""
    pieces: dict[str, list[tuple[ShardSlice, Any]]] = {}
    with ExitStack() as stack:
        for rank in range(num_ranks):
            path = directory / shard_name(kind, rank, num_ranks)
            try:
                file: Any = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path} cannot be read: {error}") from error
            for name, box in _boxes(file, path).items():
                pieces.setdefault(name, []).append((box, file))
        yield Shards(directory, pieces)


def _boxes(file: Any, path: Path) -> dict[str, ShardSlice]:
    """Slices of a file by tensor."""
    metadata = file.metadata() or {}
    try:
        cut, rows = json.loads(metadata.get(BOXES, "{}")), json.loads(metadata.get(ROWS, "{}"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} has damaged metadata: {error}") from error
    boxes = {}
    for name in file.keys():  # noqa: SIM118
        shape = tuple(file.get_slice(name).get_shape())
        offset, whole = (0,) * len(shape), shape
        if name in cut:
            offset, whole = map(tuple, cut[name])
        elif name in rows:
            offset, whole = (rows[name][0], *offset[1:]), (rows[name][1], *shape[1:])
        boxes[name] = ShardSlice(offset, shape, whole)
    return boxes


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; a plain tensor unchanged."""
    if not is_shard(tensor):
        return tensor
    part: Tensor = tensor.to_local()
    return part


def shard_like(part: Tensor, other: Tensor) -> Tensor:
    """Wrap this rank's shard as a DTensor sharded like `other`."""
    if not is_shard(other):
        return part
    from torch.distributed.tensor import DTensor

    local = part.to(local_part(other).device)
    whole: Tensor = DTensor.from_local(
        local, other.device_mesh, other.placements, run_check=False, shape=other.shape, stride=other.stride()
    )
    return whole
