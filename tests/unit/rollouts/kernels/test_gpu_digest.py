"""Digests by Triton kernels, in Triton's interpreter on a CPU, against xxhash."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import xxhash
from torch import Tensor

if importlib.util.find_spec("triton") is None:
    pytest.skip("no triton; cure: make test-extras", allow_module_level=True)

from rollouts.kernels.gpu_digest import BLOCK, CHUNK, MIN_SIZE, TILE, UNROLL, digest_on_gpu

SIZES = [0, 1, MIN_SIZE - 1, MIN_SIZE, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 64, BLOCK + 65, 2 * BLOCK, 5000, 9 * BLOCK]
LARGE = [(TILE + 1) * BLOCK + 100, CHUNK * BLOCK + 1, (UNROLL + CHUNK + 3) * BLOCK + 700]


def expected(tensor: Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def draw(size: int) -> Tensor:
    return torch.randint(256, (size,), dtype=torch.uint8)


@pytest.mark.parametrize("size", SIZES + LARGE)
def test_bytes(size: int) -> None:
    tensor = draw(size)
    assert digest_on_gpu([tensor]) == [expected(tensor)]


def test_many_tensors() -> None:
    tensors = [draw(size) for size in [*LARGE, *SIZES, *reversed(LARGE)]]
    assert digest_on_gpu(tensors) == [expected(tensor) for tensor in tensors]
    assert digest_on_gpu([]) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_tensors(dtype: torch.dtype) -> None:
    """Of any type and shape, also transposed ones and those whose memory does not begin at a word."""
    whole = torch.randint(-100, 100, (90, 77)).to(dtype)
    tensors = [whole, whole.t(), whole[1:], whole.flatten()[1:], whole.flatten()[3:200], whole[0, 0]]
    assert digest_on_gpu(tensors) == [expected(tensor.reshape(-1)) for tensor in tensors]
