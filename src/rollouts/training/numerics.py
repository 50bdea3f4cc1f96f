"""Exactness: which shapes give a row the same bits whatever else is in the batch, and the padding that ensures them.

The invariant, in exact mode: the log-prob of a token has the same bits for any batch composition, packing, padding,
chunking and split between KV cache and current call. So the embedded engine and the trainer agree bit for bit.
Floating-point sums depend on their order, and a matrix product (GEMM) chooses the order by its shape. In fp32 on a CPU
three rules keep the order fixed:

    rows of a product   at least a minimum; fewer use another kernel, such as matrix-vector, with another order.
                        oneDNN needs ONEDNN_MIN_ROWS, `F.linear` min_rows(), attention min_query_rows(), both measured.
                        Packs, chunks and loss rows have at least MIN_TOKENS, whichever product runs.
    softmax over keys   a multiple of KEY_MULTIPLE; a masked key has weight exactly 0
    sum over values     in blocks of KEY_BLOCK, because GEMM splits longer sums at length-dependent positions

Shapes below a minimum are padded, and the results of padding rows are dropped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from jaxtyping import Shaped
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

MIN_TOKENS = 4
"""Minimum tokens of a pack, rows of a chunk of the output head, and rows of loss tokens."""

MIN_RANK = 4
"""Minimum rank of a LoRA product: GEMM also chooses its kernel by the number of outputs."""

ONEDNN_MIN_ROWS = 2
"""Minimum rows of a oneDNN product, measured on two kinds of CPU (see `rollouts.kernels.onednn`)."""

KEY_MULTIPLE = 16
"""Keys are padded to a multiple of the vector width; otherwise the summation order in softmax depends on padding."""

KEY_BLOCK = 128
"""Keys per block of a sum of values."""

TESTED_ROW_COUNTS = (4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 48, 64, 100)
"""Row counts tested to find the minimum for batch invariance on this machine."""


@contextmanager
def using_threads(num: int | None) -> Iterator[None]:
    """Let torch compute with so many threads (None: as before), which changes the bits of sums, not of elements."""
    before = torch.get_num_threads()
    torch.set_num_threads(num or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def measuring() -> Iterator[None]:
    """Compute outside of the dispatch modes of the caller.

    Selective activation checkpointing is such a mode. It would store the products of a cached measurement, and take
    them for those of the layer when it computes the layer again without the measurement.
    """
    with _disable_current_modes():
        yield


def min_rows() -> int:
    """Minimum number of rows from which on fp32 `F.linear` is batch-invariant.

    It depends on the processor and the number of threads: 4 or 16 on CPUs with AVX-512, more with two threads.
    """
    return max(_find_rows(F.linear, inputs, torch.get_num_threads()) for inputs in (32, 128, 384, 1024))


def min_query_rows(dim: int) -> int:
    """The same for the products of `dim`-dimensional queries with keys, and of weights with values."""
    return max(_find_rows(_batched_product, inputs, torch.get_num_threads()) for inputs in (dim, KEY_BLOCK))


@functools.cache
@measuring()
def _find_rows(product: Callable[[Tensor, Tensor], Tensor], inputs: int, threads: int) -> int:
    """Minimum number of rows from which on all tested row counts agree bit for bit; `threads` is the cache key."""
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(TESTED_ROW_COUNTS[-1], inputs, generator=draw), torch.randn(96, inputs, generator=draw)
    expected = product(x, weight)
    good = TESTED_ROW_COUNTS[-1]
    for rows in reversed(TESTED_ROW_COUNTS):
        if not torch.equal(product(x[:rows], weight), expected[:rows]):
            break
        good = rows
    return good


def _batched_product(x: Tensor, weight: Tensor) -> Tensor:
    """Batched product, as in attention."""
    return torch.matmul(x.expand(2, 2, -1, -1).contiguous(), weight.expand(2, 2, -1, -1).transpose(-1, -2))[0, 0]


def round_up(num: int, multiple: int) -> int:
    """`num` rounded up to a multiple."""
    return -(-num // multiple) * multiple


def padded(num_keys: int) -> int:
    """`num_keys` rounded up to KEY_MULTIPLE."""
    return round_up(num_keys, KEY_MULTIPLE)


def count_chunks(num_rows: int, row_size: int, max_size: int) -> int:
    """Number of chunks of at most about `max_size` numbers and at least MIN_TOKENS rows."""
    return max(1, min(-(-num_rows * row_size // max_size), num_rows // MIN_TOKENS))


def pad_rows(x: Shaped[Tensor, "rows ..."], num: int) -> Shaped[Tensor, "padded ..."]:
    """`x` with zero rows at the end, at least `num` rows in all."""
    missing = num - len(x)
    return torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing > 0 else x


def repeat_last(x: Shaped[Tensor, "rows ..."], num: int) -> Shaped[Tensor, "padded ..."]:
    """`x` with its last row repeated at the end, at least `num` rows in all."""
    missing = num - len(x)
    return torch.cat((x, x[-1:].expand(missing, *x.shape[1:]))) if missing > 0 else x
