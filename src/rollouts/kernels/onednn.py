"""Batch-invariant matrix products on a CPU with oneDNN.

Measured for fp32 (torch 2.13, two kinds of CPU with AVX-512): 2.3 times the speed of `F.linear`, and a row has the same
bits for every number of rows from `ONEDNN_MIN_ROWS` on (see `rollouts.training.numerics`), for one or two threads, for
plain, packed and concatenated weights. `F.linear` itself needs 4 rows on one of the CPUs and, for long sums, 16 on the
other.

oneDNN compiles a kernel for every new shape (about 0.5 ms and 400 kB each) and torch caches the last thousand.
`round_rows` limits the number of shapes, so that a server's memory stays flat and most products hit the cache.
"""

from __future__ import annotations

from functools import cache
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from rollouts.training.numerics import ONEDNN_MIN_ROWS, measuring, pad_rows, round_up

EXACT_SIZES = 16
"""Up to here rows are not rounded."""

GRAIN = 8
"""Beyond that rows are rounded up to a multiple of this; of more from sixteen times this on."""


def round_rows(rows: int) -> int:
    """Round up to one of eight sizes per power of two; the padding is below 1/8."""
    if rows <= EXACT_SIZES:
        return rows
    grain = max(1 << (rows.bit_length() - 4), GRAIN)
    return round_up(rows, grain)


def uses_onednn(x: Tensor) -> bool:
    """Whether oneDNN computes products of this tensor; `torch.backends.mkldnn.enabled = False` disables it."""
    onednn = torch.backends.mkldnn
    return x.device.type == "cpu" and x.dtype == torch.float32 and onednn.is_available() and bool(onednn.enabled)


def pack_weight(weight: Float[Tensor, "outputs inputs"]) -> Tensor:
    """The weight in oneDNN's blocked layout, for `packed_linear`; repack it when it changes."""
    return cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()))


@cache
@measuring()
def plain_weights_are_exact() -> bool:
    """Whether oneDNN computes the same bits with a plain weight as with a packed one; in torch 2.11 it does not."""
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(4, 64, generator=draw), torch.randn(320, 64, generator=draw)
    return torch.equal(packed_linear(x, weight), packed_linear(x, pack_weight(weight)))


def prepare_weight(weight: Float[Tensor, "outputs inputs"]) -> Tensor:
    """The weight as `packed_linear` takes it for a single product: packed only where the bits depend on it."""
    return weight if plain_weights_are_exact() else pack_weight(weight)


def packed_linear(x: Float[Tensor, "rows inputs"], packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """The bits of `linear` for at least `ONEDNN_MIN_ROWS` rows, with a packed weight."""
    rows = x.shape[0]
    fits = rows <= EXACT_SIZES or (rows < 16 * GRAIN and rows % GRAIN == 0)  # `round_rows` inlined
    whole = x if fits else pad_rows(x, round_rows(rows))
    y = cast(Tensor, torch.ops.mkldnn._linear_pointwise(whole, packed, bias, "none", [], ""))
    return y if whole is x else y[:rows]


def multiply(
    x: Float[Tensor, "*rows inputs"], weight: Float[Tensor, "outputs inputs"], bias: Tensor | None = None
) -> Float[Tensor, "*rows outputs"]:
    """x weight^T + bias in fp32, for any number of rows."""
    rows = x.flatten(0, -2) if x.dim() > 1 else x[None]
    if len(rows) == 1:  # duplicate the row
        rows = rows.expand(ONEDNN_MIN_ROWS, -1)
        return packed_linear(rows, prepare_weight(weight), bias)[:1].reshape(*x.shape[:-1], -1)
    return packed_linear(rows, prepare_weight(weight), bias).view(*x.shape[:-1], -1)
