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
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from rollouts.training.numerics import ONEDNN_MIN_ROWS, pad_rows, round_up

BACKWARD_ROWS = 64
"""Below this many rows oneDNN's copies of its operands cost more than it gains in the backward pass."""


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


class Linear(nn.Linear):
    """`nn.Linear` through `linear`; without `exact` (no batch invariance needed) through the fastest product."""

    exact = True
    exact_backward = False
    """Whether the gradient of a row of inputs, too, has the same bits for any number of rows."""

    def forward(self, x: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows outputs"]:
        if not self.exact and (torch.compiler.is_compiling() or has_fast_mkl()):  # not traceable
            return F.linear(x, self.weight, self.bias)
        return linear(x, self.weight, self.bias, self.exact_backward)


def linear(
    x: Float[Tensor, "*rows inputs"],
    weight: Float[Tensor, "outputs inputs"],
    bias: Tensor | None = None,
    exact_backward: bool = False,
) -> Float[Tensor, "*rows outputs"]:
    """x weight^T + bias: oneDNN for fp32 on a CPU, else `F.linear` (which is batch-invariant for bf16).

    `exact_backward`: the gradient of x is a oneDNN product for any number of rows.
    """
    if torch.compiler.is_compiling() or not uses_onednn(x):
        return F.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        return _product(x, weight, bias)
    return cast(Tensor, _Product.apply(x, weight, bias, exact_backward))  # type: ignore[no-untyped-call]


def widens(x: Tensor) -> bool:
    """Whether `multiply_wide` supports tensors like this."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


def multiply_wide(
    x: Float[Tensor, "rows inputs"],
    weight: Float[Tensor, "outputs inputs"],
    out: Float[Tensor, "rows outputs"] | None = None,
) -> Float[Tensor, "rows outputs"]:
    """x weight^T in fp32, of factors in half precision on a GPU, in `out` if it is given; without gradients.

    Rounded to bf16, a logit of 16 is off by up to 1/16, and so is its log-prob.
    """
    if out is not None:
        return cast(Tensor, torch.ops.aten.mm.dtype_out(x, weight.t(), torch.float32, out=out))
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def uses_onednn(x: Tensor) -> bool:
    """Whether oneDNN computes products of this tensor; `torch.backends.mkldnn.enabled = False` disables it."""
    onednn = torch.backends.mkldnn
    return x.device.type == "cpu" and x.dtype == torch.float32 and onednn.is_available() and bool(onednn.enabled)


@cache
def has_fast_mkl() -> bool:
    """Whether `torch.mm` uses MKL on an Intel CPU, where it is fastest and needs no transposed copies.

    Decided by the CPU vendor, not by a measurement: that could differ between runs, and gradients with it.
    """
    cpus = Path("/proc/cpuinfo")
    return torch.backends.mkl.is_available() and cpus.is_file() and "GenuineIntel" in cpus.read_text()


def pack_weight(weight: Float[Tensor, "outputs inputs"]) -> Tensor:
    """The weight in oneDNN's blocked layout, for `packed_linear`; repack it when it changes."""
    return cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()))


@cache
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


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = x.flatten(0, -2) if x.dim() > 1 else x[None]
    if len(rows) == 1:  # duplicate the row
        rows = rows.expand(ONEDNN_MIN_ROWS, -1)
        return packed_linear(rows, prepare_weight(weight), bias)[:1].reshape(*x.shape[:-1], -1)
    return packed_linear(rows, prepare_weight(weight), bias).view(*x.shape[:-1], -1)


def input_gradient(
    grad: Float[Tensor, "rows outputs"], weight: Float[Tensor, "outputs inputs"], exact: bool = False
) -> Float[Tensor, "rows inputs"]:
    """grad weight: gradient of the inputs of `linear`. `exact`: a oneDNN product for any number of rows."""
    if not _differentiates_by_onednn(grad, exact):
        return torch.mm(grad, weight)
    return packed_linear(grad, prepare_weight(weight.t()))


def weight_gradient(
    grad: Float[Tensor, "rows outputs"], x: Float[Tensor, "rows inputs"], exact: bool = False
) -> Float[Tensor, "outputs inputs"]:
    """grad^T x: gradient of the weight of `linear`."""
    if not _differentiates_by_onednn(grad, exact):
        return torch.mm(grad.t(), x)
    grad, x = (pad_rows(each, round_rows(len(each))) for each in (grad, x))  # zero rows add nothing to the sum
    return packed_linear(grad.t(), prepare_weight(x.t()))


def _differentiates_by_onednn(grad: Tensor, exact: bool) -> bool:
    return uses_onednn(grad) and (exact or (len(grad) >= BACKWARD_ROWS and not has_fast_mkl()))


class _Product(torch.autograd.Function):
    """`_product` with gradients; the backward pass uses oneDNN products as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, exact_backward: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.exact_backward = exact_backward
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad: Tensor = grads[0]
        flat, rows = grad.flatten(0, -2), x.flatten(0, -2)
        exact = ctx.exact_backward
        grad_x = input_gradient(flat, weight, exact).view_as(x) if ctx.needs_input_grad[0] else None
        grad_weight = weight_gradient(flat, rows, exact) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, flat.sum(0) if ctx.needs_input_grad[2] else None, None
