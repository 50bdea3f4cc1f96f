"""Attention of many queries in pages of a cache: the bits of that in tensors, whatever else the pages have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rollouts.kernels import cpu, native
from rollouts.kernels.native import KEYS

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(native.library() is None, reason="no C compiler; cure: apt-get install gcc"),
]

STARTS, LENGTHS = torch.tensor([0, 130, 17]), torch.tensor([40, 12, 3])
COUNTS = STARTS + LENGTHS
ROWS, WIDTH, PAGES = 40, 160, 4


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def build_cache(dtype: torch.dtype, kv_heads: int, dim: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Two blocks, `[2, pages, kv_heads, KEYS, dim]`, their addresses, and the pages of three sequences.

    Sequences that do not reach the second block have a page that does not exist there.
    """
    blocks = [draw(2, PAGES, kv_heads, KEYS, dim, dtype=dtype, seed=9), draw(2, 1, kv_heads, KEYS, dim, dtype=dtype)]
    blocks[0][:, 2] = float("nan")  # of another sequence
    addresses = torch.tensor([[block[half].data_ptr() for block in blocks] for half in (0, 1)])
    return blocks, addresses, torch.tensor([[3, 0, 1], [99, 0, 99]], dtype=torch.int32)


def gather(blocks: list[Tensor], half: int, pages: Tensor) -> Tensor:
    """Keys or values of every sequence in fp32, `[seqs, WIDTH, kv_heads, dim]`; zeros after its last one."""
    rows = torch.zeros(len(COUNTS), WIDTH, blocks[0].shape[2], blocks[0].shape[4])
    for seq, count in enumerate(COUNTS.tolist()):
        for j, block in enumerate(blocks):
            here = min(max(count - j * KEYS, 0), KEYS)
            if here:
                rows[seq, j * KEYS : j * KEYS + here] = block[half, pages[j, seq]].transpose(0, 1)[:here].float()
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 64), (2, 2, 128), (3, 1, 32)])
@pytest.mark.parametrize("window", [None, 20])
def test_pages_have_the_bits_of_tensors(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, window: int | None
) -> None:
    blocks, addresses, pages = build_cache(dtype, kv_heads, dim)
    projected, narrow = draw(len(COUNTS), ROWS, heads + 2 * kv_heads, dim, seed=1), dtype == torch.bfloat16
    q = projected[:, :, :heads]
    k, v = (gather(blocks, half, pages) for half in (0, 1))
    for rounded in {False, narrow and cpu.supports_rounded_queries(dim)}:
        chunks = (pages, COUNTS, STARTS, WIDTH, kv_heads)
        found = cpu.paged_attention(q, addresses, *chunks, narrow=narrow, window=window, rounded=rounded)
        expected, _ = cpu.causal_attention(q.contiguous(), k, v, STARTS, window, rounded)
        for seq, length in enumerate(LENGTHS):
            assert torch.equal(found[seq, :length], expected[seq, :length])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [3, 200])
def test_stored_keys_and_values(dtype: torch.dtype, tokens: int) -> None:
    blocks, addresses, _ = build_cache(dtype, 2, 64)
    before = [block.clone() for block in blocks]
    qkv = draw(tokens, 8, 64, seed=3)
    k, v = qkv[:, 4:6], qkv[:, 6:]
    places = torch.stack(
        (torch.arange(tokens) % 3 - 1, torch.zeros(tokens, dtype=torch.long), torch.arange(tokens) * 7 % KEYS)
    )
    places = places[:, torch.arange(tokens) < KEYS]  # every place once
    k, v = k[: places.shape[1]], v[: places.shape[1]]
    cpu.store_in_pages(k, v, addresses, places.contiguous(), narrow=dtype == torch.bfloat16)
    for token, (block, page, position) in enumerate(places.T.tolist()):
        if block >= 0:
            for half, rows in ((0, k), (1, v)):
                before[block][half, page, :, position] = rows[token].to(dtype)
    for mine, expected in zip(blocks, before, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=0, equal_nan=True)
