"""Linear layers with gradients. On a CPU the bits of a row do not depend on the batch.

In fp32 they are products of oneDNN. `rounded` ones have both factors rounded to bf16 and are summed in fp32, by
AVX512_BF16 or AMX (`cpu.PackedWeight`), as in an engine; their gradients are products of bf16 matrices.
"""

from __future__ import annotations

import threading
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from rollouts.kernels import cpu
from rollouts.kernels.onednn import multiply, packed_linear, prepare_weight, round_rows, uses_onednn
from rollouts.training.numerics import pad_rows

BACKWARD_ROWS = 64
"""Below this many rows oneDNN's copies of its operands cost more than it gains in the backward pass."""


class Linear(nn.Linear):
    """`nn.Linear` through `linear`; without `exact` (no batch invariance needed) through the fastest product."""

    exact = True
    exact_backward = False
    """Whether the gradient of a row of inputs, too, has the same bits for any number of rows."""
    rounds_inputs = False
    """Whether its products are `rounded`."""

    def forward(self, x: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows outputs"]:
        if not self.exact:
            return linear_inexact(x, self.weight, self.bias)
        return linear(x, self.weight, self.bias, self.exact_backward, rounded=self.rounds_inputs)


def linear(
    x: Float[Tensor, "*rows inputs"],
    weight: Float[Tensor, "outputs inputs"],
    bias: Tensor | None = None,
    exact_backward: bool = False,
    *,
    rounded: bool = False,
) -> Float[Tensor, "*rows outputs"]:
    """x weight^T + bias: oneDNN for fp32 on a CPU, else `F.linear` (which is batch-invariant for bf16).

    `exact_backward`: the gradient of x is a oneDNN product for any number of rows. `rounded` (of fp32): see above.
    """
    if rounded:
        return cast(Tensor, _RoundedProduct.apply(x, weight, bias))  # type: ignore[no-untyped-call]
    if torch.compiler.is_compiling() or not uses_onednn(x):
        return F.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        return multiply(x, weight, bias)
    return cast(Tensor, _Product.apply(x, weight, bias, exact_backward))  # type: ignore[no-untyped-call]


def linear_inexact(
    x: Float[Tensor, "*rows inputs"], weight: Float[Tensor, "outputs inputs"], bias: Tensor | None = None
) -> Float[Tensor, "*rows outputs"]:
    """x weight^T + bias by the fastest product, whose bits may depend on the number of rows."""
    is_traced = torch.compiler.is_compiling()  # `has_fast_mkl` is not traceable
    return F.linear(x, weight, bias) if is_traced or has_fast_mkl() else linear(x, weight, bias)


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


def linear_wide(
    x: Float[Tensor, "rows inputs"], weight: Float[Tensor, "outputs inputs"]
) -> Float[Tensor, "rows outputs"]:
    """`multiply_wide` with gradients, which are products of matrices in half precision."""
    return cast(Tensor, _WideProduct.apply(x, weight))  # type: ignore[no-untyped-call]


@cache
def has_fast_mkl() -> bool:
    """Whether `torch.mm` uses MKL on an Intel CPU, where it is fastest and needs no transposed copies.

    Decided by the CPU vendor, not by a measurement: that could differ between runs, and gradients with it.
    """
    cpus = Path("/proc/cpuinfo")
    return torch.backends.mkl.is_available() and cpus.is_file() and "GenuineIntel" in cpus.read_text()


MAX_KEPT_WEIGHTS = 1 << 24
"""Numbers of the largest packed weight whose memory is kept for the next product."""


class _Workspace(threading.local):
    """Memory of a thread for packed weights, which are needed during one product only."""

    def __init__(self) -> None:
        with torch.inference_mode(False):  # else it could not be resized outside of that mode
            self._memory = torch.empty(0, dtype=torch.bfloat16)

    def find(self, weight: Tensor) -> Tensor:
        """Memory for a weight."""
        is_large = weight.numel() > MAX_KEPT_WEIGHTS  # an output head
        return torch.empty(0, dtype=torch.bfloat16) if is_large else self._memory


_workspace = _Workspace()


def multiply_rounded(
    x: Float[Tensor, "*rows inputs"], weight: Float[Tensor, "outputs inputs"], bias: Tensor | None = None
) -> Float[Tensor, "*rows outputs"]:
    """x weight^T + bias of fp32 tensors, without gradients: the factors are rounded to bf16, the sums are in fp32."""
    return cast(Tensor, torch.ops.rollouts.multiply_rounded(x, weight, bias))


def _multiply_in_workspace(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = cpu.multiply_rounded(x.reshape(-1, x.shape[-1]), weight, bias, _workspace.find(weight))
    return y.view(*x.shape[:-1], len(weight))


_operations = torch.library.Library("rollouts", "FRAGMENT")
"""Operations for torch, so that selective checkpointing sees them."""
_operations.define("multiply_rounded(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_operations.impl("multiply_rounded", _multiply_in_workspace, "CPU")


def input_gradient(
    grad: Float[Tensor, "rows outputs"],
    weight: Float[Tensor, "outputs inputs"],
    exact: bool = False,
    *,
    rounded: bool = False,
) -> Float[Tensor, "rows inputs"]:
    """grad weight: gradient of the inputs of `linear`. `exact`: a oneDNN product for any number of rows."""
    if rounded:
        return torch.mm(_narrow(grad), weight.bfloat16())[: len(grad)].to(grad.dtype)
    if not _differentiates_by_onednn(grad, exact):
        return torch.mm(grad, weight)
    return packed_linear(grad, prepare_weight(weight.t()))


def weight_gradient(
    grad: Float[Tensor, "rows outputs"],
    x: Float[Tensor, "rows inputs"],
    exact: bool = False,
    *,
    rounded: bool = False,
) -> Float[Tensor, "outputs inputs"]:
    """grad^T x: gradient of the weight of `linear`."""
    if rounded:
        # oneDNN takes twice as long for a transposed factor.
        return torch.mm(cpu.transpose_rounded(grad, round_rows(len(grad))), _narrow(x)).to(grad.dtype)
    if not _differentiates_by_onednn(grad, exact):
        return torch.mm(grad.t(), x)
    grad, x = (pad_rows(each, round_rows(len(each))) for each in (grad, x))  # zero rows add nothing to the sum
    return packed_linear(grad.t(), prepare_weight(x.t()))


def _narrow(x: Float[Tensor, "rows size"]) -> Float[Tensor, "more_rows size"]:
    """x in bf16, with zero rows up to one of few shapes, see `round_rows`."""
    return pad_rows(x.bfloat16(), round_rows(len(x)))


def _differentiates_by_onednn(grad: Tensor, exact: bool) -> bool:
    return uses_onednn(grad) and (exact or (len(grad) >= BACKWARD_ROWS and not has_fast_mkl()))


class _Product(torch.autograd.Function):
    """`multiply` with gradients; the backward pass uses oneDNN products as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, exact_backward: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.exact_backward = exact_backward
        return multiply(x, weight, bias).detach()  # no view, which callers could not change in place

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad: Tensor = grads[0]
        flat, rows = grad.flatten(0, -2), x.flatten(0, -2)
        exact = ctx.exact_backward
        grad_x = input_gradient(flat, weight, exact).view_as(x) if ctx.needs_input_grad[0] else None
        grad_weight = weight_gradient(flat, rows, exact) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, flat.sum(0) if ctx.needs_input_grad[2] else None, None


class _RoundedProduct(torch.autograd.Function):
    """`multiply_rounded` with gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return multiply_rounded(x, weight, bias).detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        flat, rows = grads[0].flatten(0, -2), x.flatten(0, -2)
        # As fast as oneDNN, and it needs no conversions.
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = cpu.multiply_rounded(flat, weight, None, _workspace.find(weight), turned=True).view_as(x)
        of_weight = weight_gradient(flat, rows, rounded=True) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, flat.sum(0) if ctx.needs_input_grad[2] else None


class _WideProduct(torch.autograd.Function):
    """`multiply_wide` with gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return multiply_wide(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].to(x.dtype)
        grad_x = input_gradient(grad, weight) if ctx.needs_input_grad[0] else None
        return grad_x, weight_gradient(grad, x) if ctx.needs_input_grad[1] else None
