"""Matrix products on a CPU by oneDNN: faster than the default, and every row is the same whatever its neighbours.

Measured for fp32 (torch 2.13, two kinds of CPU with AVX-512): 2.3 times the speed of `F.linear`, and a row has the same
bits for every number of rows from `MIN_ROWS` on, for one thread or two, for weights as they are, packed, or joined with
others. `F.linear` itself needs 4 rows on one of the CPUs and, for long sums, 16 on the other.

oneDNN compiles a kernel for every shape it meets (some .5 ms and 400 kB each) and torch keeps the last thousand. So
products come in few numbers of rows (`round_rows`): a server's memory stays flat, and most products find their kernel.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

MIN_ROWS = 2
"""A single row takes another path (matrix-vector), whose sums are rounded in another order."""

BACKWARD_ROWS = 64
"""Below this many rows the copies that oneDNN makes of its operands cost more than it gains in the backward pass."""


EXACT_SIZES = 16
"""Up to here every number of rows is its own shape."""

GRAIN = 8
"""Beyond it they are multiples of this, and from sixteen times this on of more."""


def round_rows(rows: int) -> int:
    """The next number of rows that products are computed for: eight of them to each power of two, waste below 1/8."""
    if rows <= EXACT_SIZES:
        return rows
    grain = max(1 << (rows.bit_length() - 4), GRAIN)
    return -(-rows // grain) * grain


def pad_rows(x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rounded inputs"]:
    """The rows, and zeros up to `round_rows`."""
    missing = round_rows(x.shape[0]) - x.shape[0]
    return F.pad(x, (0, 0, 0, missing)) if missing else x


class Linear(nn.Linear):
    """`nn.Linear` through `linear`, or where a row's bits need not repeat (`exact` off) by what is fastest here."""

    exact = True

    def forward(self, x: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows outputs"]:
        if not self.exact and (torch.compiler.is_compiling() or has_fast_mkl()):  # a compiler cannot ask for the maker
            return F.linear(x, self.weight, self.bias)
        return linear(x, self.weight, self.bias)


def linear(
    x: Float[Tensor, "*rows inputs"], weight: Float[Tensor, "outputs inputs"], bias: Tensor | None = None
) -> Float[Tensor, "*rows outputs"]:
    """x weight^T + bias: by oneDNN for fp32 on a CPU, else as `F.linear` (which for bf16 has the same properties)."""
    if torch.compiler.is_compiling() or not uses_onednn(x):  # a compiler chooses its own products
        return F.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        return _product(x, weight, bias)
    return cast(Tensor, _Product.apply(x, weight, bias))  # type: ignore[no-untyped-call]


def uses_onednn(x: Tensor) -> bool:
    """Whether oneDNN computes products of this tensor here; `torch.backends.mkldnn.enabled = False` forbids it."""
    onednn = torch.backends.mkldnn
    return x.device.type == "cpu" and x.dtype == torch.float32 and onednn.is_available() and bool(onednn.enabled)


@cache
def has_fast_mkl() -> bool:
    """Whether MKL, behind `torch.mm`, is at its best: on an Intel processor, where it needs no transposed copies.

    Asked by the maker and not by a trial, whose outcome might differ from run to run, and gradients with it.
    """
    cpus = Path("/proc/cpuinfo")
    return torch.backends.mkl.is_available() and cpus.is_file() and "GenuineIntel" in cpus.read_text()


def pack_weight(weight: Float[Tensor, "outputs inputs"]) -> Tensor:
    """The weight in the layout oneDNN likes best, for `packed_linear`; it must be packed anew when it changes."""
    return cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()))


def packed_linear(x: Float[Tensor, "rows inputs"], packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """The bits of `linear` for at least `MIN_ROWS` rows, without laying the weight out again."""
    rows = x.shape[0]
    fits = rows <= EXACT_SIZES or (rows < 16 * GRAIN and rows % GRAIN == 0)  # as `pad_rows` finds, without its calls
    whole = x if fits else pad_rows(x)
    y = cast(Tensor, torch.ops.mkldnn._linear_pointwise(whole, packed, bias, "none", [], ""))
    return y if whole is x else y[:rows]


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = x.flatten(0, -2) if x.dim() > 1 else x[None]
    if len(rows) == 1:  # the same row again
        return packed_linear(rows.expand(MIN_ROWS, -1), weight, bias)[:1].reshape(*x.shape[:-1], -1)
    return packed_linear(rows, weight, bias).view(*x.shape[:-1], -1)


class _Product(torch.autograd.Function):
    """The same forwards; backwards `grad weight` and `grad^T x`, which are such products too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad: Tensor = grads[0]
        flat, rows = grad.flatten(0, -2), x.flatten(0, -2)
        to_bias = flat.sum(0) if ctx.needs_input_grad[2] else None
        if len(rows) < BACKWARD_ROWS or has_fast_mkl():
            to_x = torch.mm(flat, weight).view_as(x) if ctx.needs_input_grad[0] else None
            return to_x, torch.mm(flat.t(), rows) if ctx.needs_input_grad[1] else None, to_bias
        to_x = packed_linear(flat, weight.t().contiguous()).view_as(x) if ctx.needs_input_grad[0] else None
        flat, rows = pad_rows(flat), pad_rows(rows)  # the sum is over them, and zeros add nothing
        to_weight = packed_linear(flat.t().contiguous(), rows.t().contiguous()) if ctx.needs_input_grad[1] else None
        return to_x, to_weight, to_bias
