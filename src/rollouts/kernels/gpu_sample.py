"""Sampling on a GPU in Triton: a token of each row of logits and its log-prob, by two kernels that read them once.

Torch takes ten operations, half of them over copies of the vocabulary in fp64. Every row is computed by itself in a
fixed order, so its token does not depend on the batch.

Import this module only where triton is installed (`select.gpu_kernels`).
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


def sample(
    logits: Float[Tensor, "rows vocab"], noise: Float[Tensor, " rows"] | None
) -> tuple[Int[Tensor, " rows"], Float[Tensor, " rows"]]:
    """The first token of each row whose cumulative probability exceeds the noise, and its log-prob.

    The most likely token where the noise, in fp64, is negative, and in all rows without noise. Logits are in fp32.
    """
    logits = logits.contiguous()
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, COLUMNS)
    tops, totals = torch.empty(2, rows, chunks, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    with on_device(logits):
        _sum_chunks[(rows, chunks)](logits, tops, totals, vocab, chunks, COLUMNS, num_warps=WARPS)
        _draw[(rows,)](
            logits, noise, tops, totals, tokens, logprobs, vocab, chunks, COLUMNS, triton.next_power_of_2(chunks),
            num_warps=WARPS,
        )  # fmt: skip
    return tokens, logprobs


@triton.jit
def _load(logits, row, chunk, vocab, COLUMNS: tl.constexpr):
    column = chunk * COLUMNS + tl.arange(0, COLUMNS)
    return tl.load(logits + row.to(tl.int64) * vocab + column, column < vocab, float("-inf"))


@triton.jit
def _weigh(x, top):
    """exp(x - top), 0 for minus infinity; NaN for NaN and infinity, so that a row that has one fails."""
    return tl.where(x == float("-inf"), 0.0, tl.exp(x - top))


@triton.jit
def _sum_chunks(logits, tops, totals, vocab, chunks, COLUMNS: tl.constexpr):
    row, chunk = tl.program_id(0), tl.program_id(1)
    x = _load(logits, row, chunk, vocab, COLUMNS)
    top = tl.max(x, 0)
    tl.store(tops + row * chunks + chunk, top)
    tl.store(totals + row * chunks + chunk, tl.sum(_weigh(x, top), 0))


@triton.jit
def _draw(
    logits, noise, tops, totals, tokens, logprobs, vocab, chunks, COLUMNS: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    row, index, column = tl.program_id(0), tl.arange(0, CHUNKS), tl.arange(0, COLUMNS)
    tops_here = tl.load(tops + row * chunks + index, index < chunks, float("-inf"))
    top = tl.max(tops_here, 0)
    shares = _weigh(tops_here, top).to(tl.float64)
    shares *= tl.load(totals + row * chunks + index, index < chunks, 0.0).to(tl.float64)
    total = tl.sum(shares, 0)
    drawn = (total * 0 - 1).to(tl.float64)
    if noise is not None:
        drawn = tl.load(noise + row)
    if drawn < 0:
        chunk = tl.min(tl.where(tops_here == top, index, CHUNKS - 1), 0)
        x = _load(logits, row, chunk, vocab, COLUMNS)
        place = tl.min(tl.where(x == top, column, COLUMNS - 1), 0)
    else:
        before = tl.cumsum(shares, 0)
        last = tl.max(tl.where(shares > 0, index, 0), 0)
        chunk = tl.minimum(tl.sum((before <= drawn * total).to(tl.int32), 0), last)
        rest = drawn * total - tl.sum(tl.where(index < chunk, shares, 0.0), 0)
        x = _load(logits, row, chunk, vocab, COLUMNS)
        weights = _weigh(x, top)
        # Rounding may leave less of the chunk than is drawn: the last token that has any probability.
        last = tl.max(tl.where(weights > 0, column, 0), 0)
        place = tl.minimum(tl.sum((tl.cumsum(weights.to(tl.float64), 0) <= rest).to(tl.int32), 0), last)
    chosen = tl.sum(tl.where(column == place, x, 0.0), 0)
    # In a row of NaN a masked column may be chosen: its log-prob is NaN, but the token must be one of the vocabulary.
    tl.store(tokens + row, tl.minimum(chunk * COLUMNS + place, vocab - 1).to(tl.int64))
    tl.store(logprobs + row, chosen - top - tl.log(total).to(tl.float32))
