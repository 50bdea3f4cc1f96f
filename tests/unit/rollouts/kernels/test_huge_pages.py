"""Memory in huge pages: aligned, not shared, and freed with its tensors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from rollouts.kernels import huge_pages


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_tensors_are_aligned_and_do_not_overlap(dtype: torch.dtype) -> None:
    sizes = [1, 100_001, 5_000_000, 65_537, 40_000_000, 70_000]
    tensors = [huge_pages.empty(size, dtype) for size in sizes]
    for i, tensor in enumerate(tensors):
        tensor.fill_(i)
    for i, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
        assert tensor.shape == (size,) and tensor.dtype == dtype and tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0
        assert bool((tensor == i).all())


def test_mapped_memory_is_zero_and_writable() -> None:
    memory = huge_pages.map_memory(1000)
    assert len(memory) == 1000 and not memory.any()
    memory.fill_(3)
    assert not huge_pages.map_memory(1000).any()
    assert len(huge_pages.map_memory(0)) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_freed_with_its_last_tensor() -> None:
    tensors = [huge_pages.empty(10_000_000, torch.int8).fill_(1) for _ in range(40)]
    before = resident_mb()
    kept = tensors[7]
    del tensors
    assert resident_mb() < before - 250  # of 400 MB two chunks may stay
    assert bool((kept == 1).all())
