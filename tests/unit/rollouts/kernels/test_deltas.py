"""LoRA deltas of the CPU kernel: the bits of the products of `linear`, for every rank and mix of rows."""

from __future__ import annotations

import pytest
import torch

from rollouts.kernels import native
from rollouts.kernels.deltas import DeltaBatch, PackedDelta
from rollouts.kernels.linear import linear

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(native.library() is None, reason="no C compiler"),
]
INPUTS, OUTPUTS = 72, 40


def build(rank: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rank, INPUTS, generator=draw), torch.randn(OUTPUTS, rank, generator=draw)


@pytest.mark.parametrize("ranks", [(4, 8, 33), (16,), (64, 5)])
def test_rows_get_the_bits_of_their_adapter(ranks: tuple[int, ...]) -> None:
    matrices = [build(rank, i) for i, rank in enumerate(ranks)]
    adapters = [PackedDelta({1: pair}, 0.3, 2) for pair in matrices]
    draw = torch.Generator().manual_seed(9)
    x, y = torch.randn(50, INPUTS, generator=draw), torch.randn(50, 64, generator=draw)
    owner = torch.randint(-1, len(ranks), (50,), generator=draw)
    batch = DeltaBatch(adapters, [(owner == i).nonzero().squeeze(1).tolist() for i in range(len(ranks))])
    expected = y.clone()
    for i, (a, b) in enumerate(matrices):
        delta = linear(linear(x, a), b) * 0.3
        expected[owner == i, 7 : 7 + OUTPUTS] += delta[owner == i]
    batch.add(0, x, y[:, :5])  # adapted by none
    batch.add(1, x, y[:, 7 : 7 + OUTPUTS])
    assert torch.equal(y, expected)


def test_views_are_the_packed_matrices() -> None:
    a, b = build(5, 0)
    views = PackedDelta({0: (a, b)}, 1.0, 1).matrices(0)
    assert torch.equal(views[0], a) and torch.equal(views[1], b)
