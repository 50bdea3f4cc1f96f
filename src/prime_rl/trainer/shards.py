"""Tensors in files of which each rank writes its own rows, and from which any number of ranks can read theirs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from rollouts.training.backends.ranks import Ranks

ROWS = "rows"
"""Key of a file's metadata: `{tensor: [first row held here, rows of the whole tensor]}` as JSON."""


@dataclass(frozen=True)
class Piece:
    """Rows of a tensor that one file holds, from `start`; of `whole` rows, or None when it is no part of a larger."""

    file: Any
    start: int
    whole: int | None
    shape: tuple[int, ...]


def shard_name(kind: str, rank: int, size: int) -> str:
    """`model.safetensors` of the only rank, `model-1-of-2.safetensors` of the first of two."""
    return f"{kind}.safetensors" if size == 1 else f"{kind}-{rank + 1}-of-{size}.safetensors"


def save_shards(directory: Path, kind: str, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Write this rank's rows; what several ranks hold alike is written by the first of them."""
    held, rows = {}, {}
    for name, tensor in tensors.items():
        if not _is_ours(tensor, ranks):
            continue
        held[name] = local_part(tensor).detach().to("cpu").contiguous()
        if isinstance(tensor, DTensor):
            rows[name] = [first_row(tensor), tensor.shape[0]]
    path = directory / shard_name(kind, ranks.rank, ranks.size)
    save_file(held, path, metadata={ROWS: json.dumps(rows)} if rows else None)
    with path.open("rb") as file:
        os.fsync(file.fileno())


class Shards:
    """The tensors of all files of one kind."""

    def __init__(self, source: Path, pieces: Mapping[str, list[Piece]]) -> None:
        self.source = source
        self._pieces = pieces

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of the whole tensor; None when there is none of this name."""
        pieces = self._pieces.get(name)
        if not pieces:
            return None
        first = pieces[0]
        return first.shape if first.whole is None else (first.whole, *first.shape[1:])

    def read(self, name: str, like: Tensor | None = None) -> Tensor:
        """The rows that this rank holds of `like`, or the whole tensor; only the bytes that are needed are read."""
        pieces = self._pieces[name]
        if pieces[0].whole is None and not isinstance(like, DTensor):
            whole: Tensor = pieces[0].file.get_tensor(name)
            return whole
        start, stop = 0, (self.shape(name) or (0,))[0]
        if isinstance(like, DTensor):
            start = first_row(like)
            stop = start + local_part(like).shape[0]
        parts = []
        for piece in sorted(pieces, key=lambda piece: piece.start):
            low, high = max(start, piece.start), min(stop, piece.start + piece.shape[0])
            if low < high:
                parts.append(piece.file.get_slice(name)[low - piece.start : high - piece.start])
        found: Tensor = torch.cat(parts) if parts else pieces[0].file.get_slice(name)[0:0]
        if len(found) != stop - start:
            raise ValueError(f"{self.source} lacks rows of {name}: a file of it is missing")
        return found


@contextmanager
def open_shards(directory: Path, kind: str, num_ranks: int) -> Iterator[Shards]:
    """The files that `num_ranks` ranks wrote; `ValueError` when one cannot be read."""
    pieces: dict[str, list[Piece]] = {}
    with ExitStack() as stack:
        for rank in range(num_ranks):
            path = directory / shard_name(kind, rank, num_ranks)
            try:
                file: Any = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path} cannot be read: {error}") from error
            rows = json.loads((file.metadata() or {}).get(ROWS, "{}"))
            for name in file.keys():  # noqa: SIM118
                start, whole = rows.get(name, (0, None))
                pieces.setdefault(name, []).append(Piece(file, start, whole, tuple(file.get_slice(name).get_shape())))
        yield Shards(directory, pieces)


def local_part(tensor: Tensor) -> Tensor:
    """The rows of a tensor that this rank holds; all of a plain one."""
    if not isinstance(tensor, DTensor):
        return tensor
    part: Tensor = tensor.to_local()
    return part


def first_row(tensor: DTensor) -> int:
    """Number of the first row this rank holds: rows are dealt out in equal chunks, the last ones may be shorter."""
    for dim, placement in enumerate(tensor.placements):
        if placement.is_shard():
            assert placement.is_shard(0), "parameters are cut between rows"
            size: int = tensor.device_mesh.size(dim)
            chunk = -(-tensor.shape[0] // size)
            return min(tensor.device_mesh.get_local_rank(dim) * chunk, tensor.shape[0])
    return 0


def like_shard(rows: Tensor, own: Tensor) -> Tensor:
    """This rank's rows as a tensor that is cut as `own` is."""
    if not isinstance(own, DTensor):
        return rows
    held = rows.to(local_part(own).device)
    whole: Tensor = DTensor.from_local(
        held, own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride()
    )
    return whole


def _is_ours(tensor: Tensor, ranks: Ranks) -> bool:
    """Whether this rank is the one that writes its part."""
    if not isinstance(tensor, DTensor):
        return ranks.rank == 0
    coordinate: list[int] = list(tensor.device_mesh.get_coordinate() or ())
    return all(at == 0 for at, placement in zip(coordinate, tensor.placements, strict=True) if placement.is_replicate())
