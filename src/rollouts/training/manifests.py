"""Manifests of published weights: dtype, shape and digest of every tensor."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import xxhash

from rollouts.training.tensor_files import MappedTensors

if TYPE_CHECKING:
    from torch import Tensor, dtype

SCHEMA = 1
MANIFEST_FILE = "manifest.json"
INDEX_FILE = "model.safetensors.index.json"


class TensorEntry(msgspec.Struct, frozen=True):
    """Dtype (such as `float32`), shape, and digest of the bytes."""

    dtype: str
    shape: tuple[int, ...]
    digest: str


class Manifest(msgspec.Struct, frozen=True):
    """The contents of one published version."""

    schema: int
    step: int
    tensors: dict[str, TensorEntry]


def digest_tensor(tensor: Tensor) -> str:
    """xxh3_128 in hex over the contiguous bytes of a tensor on any device."""
    return _digest_pieces([tensor.detach().to("cpu").contiguous().reshape(-1)])


def _digest_pieces(pieces: Iterable[Tensor]) -> str:
    import torch

    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece.view(torch.uint8).numpy().data if piece.numel() else b"")
    return digest.hexdigest()


def describe_tensors(tensors: Mapping[str, Tensor]) -> dict[str, TensorEntry]:
    """Manifest entries for `tensors`."""
    return {name: _describe(tensors, name) for name in tensors}


def _describe(tensors: Mapping[str, Tensor], name: str) -> TensorEntry:
    tensor = tensors[name]
    digest = _digest_pieces(tensors.pieces(name)) if isinstance(tensors, MappedTensors) else digest_tensor(tensor)
    return TensorEntry(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), digest)


def build_manifest(step: int, tensors: Mapping[str, Tensor]) -> Manifest:
    """The manifest of version `step`."""
    return Manifest(SCHEMA, step, describe_tensors(tensors))


def find_dtype(name: str) -> dtype:
    """The torch dtype of a manifest entry; `ValueError` if there is none of this name."""
    import torch

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype")
    return found


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write it into a directory that is being published."""
    (directory / MANIFEST_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a published directory; `ValueError` if it is missing, malformed or of another schema."""
    path = Path(directory) / MANIFEST_FILE
    if not path.is_file():
        raise ValueError(f"{directory} has no {MANIFEST_FILE}: it was not published by a trainer")
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ValueError(f"{path} is no manifest: {error}") from error
    if manifest.schema != SCHEMA:
        raise ValueError(f"{path} has schema {manifest.schema}, this version reads schema {SCHEMA}")
    return manifest


def read_index(directory: Path) -> dict[str, str]:
    """Tensor name to file of a sharded model; empty without an index.

    `ValueError` when the index is malformed or names anything but a safetensors file of the directory itself.
    """
    path = Path(directory) / INDEX_FILE
    if not path.is_file():
        return {}
    try:
        files = msgspec.convert(json.loads(path.read_text(encoding="utf-8"))["weight_map"], dict[str, str])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is no index of weights: {error}") from error
    for file in files.values():
        if Path(file).name != file or not file.endswith(".safetensors") or "\0" in file:
            raise ValueError(f"{path} names {file[:200]!r}: an index may name .safetensors files beside it only")
    return files
