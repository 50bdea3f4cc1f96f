"""GPU kernels in Triton: label log-probs and entropies from the logits of an output head, and their gradients.

Each kernel reads the logits once; torch operations read or write them, or copies in fp32, ten times. Every row is
computed by itself in a fixed order, so its bits do not depend on the batch.

Import this module only where triton is installed (`select.find_head_kernels`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from rollouts.kernels.gpu import on_device

COLUMNS, WARPS = 4096, 8
"""Logits of a row that a program holds at once, and its warps."""


def head_forward(
    logits: Float[Tensor, "rows vocab"], labels: Int[Tensor, " rows"], temperature: Float[Tensor, " rows"]
) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"], Float[Tensor, " rows"]]:
    """Log-prob of each label under softmax(logits / temperature), entropy and log-sum-exp of each row, all in fp32."""
    assert logits.is_contiguous()
    logprobs, entropy, lse = torch.empty(3, len(logits), dtype=torch.float32, device=logits.device)
    inputs = (labels.contiguous(), temperature.contiguous())
    with on_device(logits):
        _head_forward[(len(logits),)](
            logits, *inputs, logprobs, entropy, lse, logits.shape[1], COLUMNS, num_warps=WARPS
        )
    return logprobs, entropy, lse


def head_backward(
    logits: Float[Tensor, "rows vocab"],
    labels: Int[Tensor, " rows"],
    temperature: Float[Tensor, " rows"],
    lse: Float[Tensor, " rows"],
    entropy: Float[Tensor, " rows"],
    of_logprob: Float[Tensor, " rows"],
    of_entropy: Float[Tensor, " rows"] | None,
    dtype: torch.dtype,
) -> Float[Tensor, "rows vocab"]:
    """The gradient of the logits in a data type, from those of the log-probs and entropies.

    It overwrites the logits if they have this type.
    """
    assert logits.is_contiguous()
    rows, vocab = logits.shape
    grad = logits if logits.dtype == dtype else torch.empty_like(logits, dtype=dtype)
    inputs = [x if x is None else x.contiguous() for x in (labels, temperature, lse, entropy, of_logprob, of_entropy)]
    with on_device(logits):
        _head_backward[(rows, triton.cdiv(vocab, COLUMNS))](logits, *inputs, grad, vocab, COLUMNS, num_warps=WARPS)
    return grad


@triton.jit
def _head_forward(logits, labels, temperature, logprobs, entropy, lse, vocab, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * vocab
    scale = 1.0 / tl.load(temperature + row).to(tl.float32)
    # Finite, so that columns of -inf before all others give a weight of 0, not NaN.
    top = tl.full((), -3e38, tl.float32)
    total = tl.zeros((COLUMNS,), tl.float32)
    moment = tl.zeros((COLUMNS,), tl.float32)
    start = tl.program_id(0) * 0
    while start < vocab:
        column = start + tl.arange(0, COLUMNS)
        scaled = tl.load(source + column, column < vocab, float("-inf")).to(tl.float32) * scale
        new_top = tl.maximum(top, tl.max(scaled, 0))
        if new_top > top:
            shift = top - new_top
            moment = (moment + shift * total) * tl.exp(shift)
            total = total * tl.exp(shift)
            top = new_top
        below = scaled - top
        weights = tl.exp(below)
        total += weights
        moment += weights * tl.where(weights > 0, below, 0.0)
        start += COLUMNS
    # Relative to the maximum: entropies near 0 would lose their digits as differences of the log-sum-exp.
    mass = tl.sum(total, 0)
    log_mass = tl.log(mass)
    label = tl.load(source + tl.load(labels + row)).to(tl.float32) * scale
    tl.store(logprobs + row, label - top - log_mass)
    tl.store(entropy + row, log_mass - tl.sum(moment, 0) / mass)
    tl.store(lse + row, top + log_mass)


@triton.jit
def _head_backward(
    logits, labels, temperature, lse, entropy, of_logprob, of_entropy, out, vocab, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place = row * vocab + column
    scale = 1.0 / tl.load(temperature + row).to(tl.float32)
    logprob = tl.load(logits + place, column < vocab, float("-inf")).to(tl.float32) * scale - tl.load(lse + row)
    prob = tl.exp(logprob)
    slope = tl.load(of_logprob + row).to(tl.float32) * scale
    grad = tl.where(column == tl.load(labels + row), slope, 0.0) - prob * slope
    if of_entropy is not None:
        excess = tl.where(prob > 0, logprob, 0.0) + tl.load(entropy + row)
        grad -= prob * excess * (tl.load(of_entropy + row).to(tl.float32) * scale)
    tl.store(out + place, grad.to(out.dtype.element_ty), column < vocab)
