"""safetensors files."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

PIECE = 1 << 22


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file with the permissions that the umask gives; the library alone writes mode 0600."""
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata=dict(metadata) if metadata is not None else None)
    path.chmod(mode)


class MappedTensors(dict[str, "Tensor"]):
    """Tensors mapped from a file, which nothing modifies: each leaves the memory when the next one is looked up.

    Reading one that has left the memory reads the file again, from the system's cache.
    """

    _last: Tensor | None = None

    def __getitem__(self, name: str) -> Tensor:
        if self._last is not None:
            _release_pages(self._last)
        self._last = super().__getitem__(name)
        return self._last

    def pieces(self, name: str) -> Iterator[Tensor]:
        """A contiguous tensor in flat pieces of `PIECE` elements; each leaves the memory before the next one."""
        for piece in self[name].view(-1).split(PIECE):
            yield piece
            _release_pages(piece)


def copy_tensor(tensors: Mapping[str, Tensor], name: str, target: Tensor) -> None:
    """Copy a tensor into `target`; one that is mapped takes little memory meanwhile."""
    if isinstance(tensors, MappedTensors) and target.is_contiguous() and tensors[name].is_contiguous():
        for piece, part in zip(tensors.pieces(name), target.view(-1).split(PIECE), strict=True):
            part.copy_(piece)
    else:
        target.copy_(tensors[name])


def _release_pages(tensor: Tensor) -> None:
    """Remove the whole pages of a mapped tensor from this process's memory."""
    if sys.platform == "linux":
        page, start = mmap.PAGESIZE, tensor.data_ptr()
        first, end = -(-start // page) * page, (start + tensor.nbytes) // page * page
        if end > first:
            _load_libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)


@cache
def _load_libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
