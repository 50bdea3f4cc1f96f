"""CPU memory in huge pages, which is read faster: fewer addresses are looked up."""

from __future__ import annotations

import contextlib
import mmap
import threading

import torch
from torch import Tensor

PAGE = 1 << 21
CHUNK = 16 * PAGE
"""Bytes that allocations share: one of less than a huge page cannot have its own."""
MIN_BYTES = 1 << 16
"""Smaller tensors stay in small pages."""

_lock = threading.Lock()
_chunk = torch.empty(0, dtype=torch.uint8)
"""What is left of the last chunk. A chunk is freed with its last tensor."""


def map_memory(size: int, huge_pages: bool = True) -> Tensor:
    """`size` bytes of zeros, whose pages take memory when they are first written."""
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:size]


def empty(size: int, dtype: torch.dtype) -> Tensor:
    """`torch.empty(size, dtype=dtype)` for tensors that are read often and live as long as each other."""
    global _chunk
    num_bytes = size * dtype.itemsize
    if num_bytes < MIN_BYTES:
        return torch.empty(size, dtype=dtype)
    with _lock:
        if num_bytes > len(_chunk):
            room = -(-max(num_bytes, CHUNK) // PAGE) * PAGE
            memory = map_memory(room + PAGE)
            _chunk = memory[-memory.data_ptr() % PAGE :][:room]
        taken, _chunk = _chunk[:num_bytes], _chunk[-(-num_bytes // 64) * 64 :]
    return taken.view(dtype)
