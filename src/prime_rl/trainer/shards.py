"""Tensors that ranks hold in parts: who holds which, files of which each writes its own, and gathering them whole."""

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
from safetensors.torch import save_file
from torch import Tensor

from rollouts.training.backends.ranks import Ranks, is_shard

BOXES = "boxes"
"""Key of a file's metadata: `{tensor: [offset of the part held here, shape of the whole tensor]}` as JSON."""

ROWS = "rows"
"""The same in files of schema 2, which were cut between rows only: `{tensor: [first row, rows of the whole]}`."""


@dataclass(frozen=True)
class Box:
    """A part of a tensor of shape `whole`: `shape` elements per dimension, from `offset`."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]

    def within(self, outer: Box) -> Box:
        """This part of a part, as a part of the whole."""
        offset = tuple(a + b for a, b in zip(self.offset, outer.offset, strict=True))
        return Box(offset, self.shape, outer.whole)

    def overlap(self, other: Box) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """Where the common part lies in this box and in the other; None when there is none."""
        mine, theirs = [], []
        for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True):
            low, high = max(a, b), min(a + n, b + m)
            if low >= high:
                return None
            mine.append(slice(low - a, high - a))
            theirs.append(slice(low - b, high - b))
        return tuple(mine), tuple(theirs)


Cuts = Mapping[str, Box]
"""The part of each parameter that this rank's group of shards has, by name, where that is not the whole."""


def find_box(tensor: Tensor, cut: Box | None = None) -> Box:
    """The part that this rank holds; rows are dealt out in equal chunks, the last ones may be shorter."""
    local, offset = local_part(tensor), [0] * tensor.ndim
    if is_shard(tensor):
        for dim, placement in enumerate(tensor.placements):
            if placement.is_shard():
                assert placement.is_shard(0), "parameters are cut between rows"
                size: int = tensor.device_mesh.size(dim)
                chunk = -(-tensor.shape[0] // size)
                offset[0] = min(tensor.device_mesh.get_local_rank(dim) * chunk, tensor.shape[0])
    box = Box(tuple(offset), tuple(local.shape), tuple(tensor.shape))
    return box if cut is None else box.within(cut)


@dataclass(frozen=True)
class Holders:
    """Which ranks hold which part of every parameter of a model; `own` are the parts of this one."""

    own: Mapping[str, Box]
    by_name: Mapping[str, Mapping[Box, Sequence[int]]]

    def copies(self, name: str) -> int:
        """Ranks that hold the same part as this one."""
        return len(self.by_name[name][self.own[name]])

    def is_first(self, name: str, rank: int) -> bool:
        """Whether this is the first rank that holds its part, which writes it for all."""
        return self.by_name[name][self.own[name]][0] == rank

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return next(iter(self.by_name[name])).whole


def find_holders(parameters: Mapping[str, Tensor], ranks: Ranks, cuts: Cuts | None = None) -> Holders:
    """Tell all ranks what this one holds, and learn what they do; all must call."""
    own = {name: find_box(p, (cuts or {}).get(name)) for name, p in parameters.items()}
    told = json.dumps({name: [box.offset, box.shape, box.whole] for name, box in own.items()}).encode()
    by_name: dict[str, dict[Box, list[int]]] = {}
    for rank, data in enumerate(ranks.gather_bytes(told)):
        for name, parts in json.loads(data).items():
            by_name.setdefault(name, {}).setdefault(Box(*map(tuple, parts)), []).append(rank)
    return Holders(own, by_name)


@torch.no_grad()
def gather_whole(
    tensors: Mapping[str, Tensor], holders: Holders, ranks: Ranks, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Whole tensors in this format on the CPU of rank 0, nothing on the others; all ranks must call."""
    whole: dict[str, Tensor] = {}
    for name, parts in holders.by_name.items():
        if ranks.rank == 0:
            whole[name] = torch.empty(holders.whole_shape(name), dtype=dtype)
        for box, held_by in parts.items():
            if 0 in (held_by[0], math.prod(box.shape)):
                if ranks.rank == 0 and held_by[0] == 0:
                    _place(whole[name], box, local_part(tensors[name]))
            elif ranks.rank == held_by[0]:
                dist.send(local_part(tensors[name]).to(ranks.device, dtype).contiguous(), 0)
            elif ranks.rank == 0:
                part = torch.empty(box.shape, dtype=dtype, device=ranks.device)
                dist.recv(part, held_by[0])
                _place(whole[name], box, part)
    return whole


def _place(whole: Tensor, box: Box, part: Tensor) -> None:
    whole[tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))] = part.to("cpu", whole.dtype)


def shard_name(kind: str, rank: int, size: int) -> str:
    """`model.safetensors` of the only rank, `model-1-of-2.safetensors` of the first of two."""
    return f"{kind}.safetensors" if size == 1 else f"{kind}-{rank + 1}-of-{size}.safetensors"


def save_shards(
    directory: Path, kind: str, tensors: Mapping[str, Tensor], boxes: Mapping[str, Box], ranks: Ranks
) -> None:
    """Write this rank's parts, each of which lies at its box; a tensor without one is whole."""
    held = {name: local_part(tensor).detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    cut = {name: [box.offset, box.whole] for name, box in boxes.items() if name in held and box.shape != box.whole}
    path = directory / shard_name(kind, ranks.rank, ranks.size)
    save_file(held, path, metadata={BOXES: json.dumps(cut)} if cut else None)
    with path.open("rb") as file:
        os.fsync(file.fileno())


class Shards:
    """The tensors of all files of one kind."""

    def __init__(self, source: Path, pieces: Mapping[str, list[tuple[Box, Any]]]) -> None:
        self.source = source
        self._pieces = pieces

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of the whole tensor; None when there is none of this name."""
        pieces = self._pieces.get(name)
        return pieces[0][0].whole if pieces else None

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """The part of a tensor that lies in `box`, or the whole; only the bytes that are needed are read."""
        pieces = self._pieces[name]
        if box is None or box.shape == box.whole:
            if len(pieces) == 1 and pieces[0][0].shape == pieces[0][0].whole:
                whole: Tensor = pieces[0][1].get_tensor(name)
                return whole
            box = Box((0,) * len(pieces[0][0].whole), pieces[0][0].whole, pieces[0][0].whole)
        out: Tensor | None = None
        num_found = 0
        for piece, file in pieces:
            both = piece.overlap(box)
            if both is None:
                continue
            part: Tensor = file.get_slice(name)[both[0]]
            out = torch.empty(box.shape, dtype=part.dtype) if out is None else out
            out[both[1]] = part
            num_found += part.numel()
        if num_found != math.prod(box.shape):
            raise ValueError(f"{self.source} lacks parts of {name}: a file of it is missing")
        if out is None:  # a rank without rows of this tensor
            out = torch.empty(box.shape, dtype=pieces[0][1].get_slice(name)[0:0].dtype)
        return out


@contextmanager
def open_shards(directory: Path, kind: str, num_ranks: int) -> Iterator[Shards]:
    """The files that `num_ranks` ranks wrote; `ValueError` when one cannot be read."""
    pieces: dict[str, list[tuple[Box, Any]]] = {}
    with ExitStack() as stack:
        for rank in range(num_ranks):
            path = directory / shard_name(kind, rank, num_ranks)
            try:
                file: Any = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path} cannot be read: {error}") from error
            for name, box in _boxes(file).items():
                pieces.setdefault(name, []).append((box, file))
        yield Shards(directory, pieces)


def _boxes(file: Any) -> dict[str, Box]:
    """What a file holds, by tensor."""
    metadata = file.metadata() or {}
    cut, rows = json.loads(metadata.get(BOXES, "{}")), json.loads(metadata.get(ROWS, "{}"))
    boxes = {}
    for name in file.keys():  # noqa: SIM118
        shape = tuple(file.get_slice(name).get_shape())
        offset, whole = (0,) * len(shape), shape
        if name in cut:
            offset, whole = map(tuple, cut[name])
        elif name in rows:
            offset, whole = (rows[name][0], *offset[1:]), (rows[name][1], *shape[1:])
        boxes[name] = Box(offset, shape, whole)
    return boxes


def local_part(tensor: Tensor) -> Tensor:
    """The rows of a tensor that this rank holds; all of a plain one."""
    if not is_shard(tensor):
        return tensor
    part: Tensor = tensor.to_local()
    return part


def like_shard(part: Tensor, own: Tensor) -> Tensor:
    """This rank's part as a tensor that is cut as `own` is."""
    if not is_shard(own):
        return part
    from torch.distributed.tensor import DTensor

    held = part.to(local_part(own).device)
    whole: Tensor = DTensor.from_local(
        held, own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride()
    )
    return whole
