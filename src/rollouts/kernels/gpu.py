"""GPU kernels in Triton: RMSNorm, RoPE and SwiGLU with gradients, and the attention of a decode step.

They have the signatures of `rollouts.kernels.cpu`. Each fuses what takes torch five to ten operations that read and
write memory. Every row is computed by itself in a fixed order, so its bits do not depend on the batch.

Import this module only where triton is installed (`select.find_kernels`).
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton import cdiv, next_power_of_2

from rollouts.kernels.cpu import flatten_rows

TILE = 2048
"""Numbers that a program holds of a matrix with short rows."""

COLUMNS = 1024
"""Columns of a program of SwiGLU."""

PROGRAMS = 528
"""Programs of the backward pass of RMSNorm, each with its own sum of weight gradients: four for each of an H100's
multiprocessors."""

FEW, MANY = (64, 64, 4, 2), (512, 32, 2, 7)
"""Decode attention of few and of many keys: keys of a program, keys that it holds at once, warps, stages of loads.

Measured on an H200 for 16 heads of 128 and 8 key heads. One row of 256 keys: the best of 7, 5.5 us. 256 rows of 1,024
keys: 254 us, what a copy of as many bytes takes, and within 2 % of the best of 13. A loop whose loads have addresses
from memory prefetches half as many tiles as it has stages. GPUs with less shared memory take smaller numbers for large
heads: see `_fit_config`."""

MANY_BLOCKS = 1024
"""From so many blocks of keys (rows times key heads times blocks) on, they are many."""

ROW_OUTPUTS, ROW_INPUTS = 4, 1024
"""Outputs of a program of `multiply_row`, and inputs that it holds at once."""

SPLITS, SPLIT_OUTPUTS, SPLIT_INPUTS, SPLIT_STAGES = 2, 16, 256, 4
"""`multiply_split`: parts of the sums, outputs of a program, inputs that it holds at once, stages of loads."""

MAX_SPLIT_ROWS, MAX_SPLIT_OUTPUTS = 64, 2048
"""Products for which `multiply_split` is faster than cuBLAS, whose programs for few outputs do not occupy a GPU."""

MIN_HEAD_DIM, MIN_QUERIES, MIN_TILE = 16, 16, 16
"""Smallest sizes of a product in Triton."""


def rms_norm(
    x: Float[Tensor, "*rows size"], weight: Float[Tensor, "*heads size"], eps: float, added: Tensor | None = None
) -> tuple[Float[Tensor, "*rows size"], Float[Tensor, "*rows 1"]]:
    """weight x / rms(x), and 1 / rms(x) in fp32. `weight` may have a row per head.

    `added` is added to `x` in place: one tensor like it, or parts of it in fp32, `[parts, *rows, size]`.
    """
    assert added is None or (added.is_contiguous() and x.is_contiguous())
    x, stride, inner = flatten_rows(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    scales = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    num, size, weight = scales.numel(), x.shape[-1], weight.contiguous()
    heads = weight.shape[0] if weight.dim() > 1 else 1
    parts = len(added) if added is not None and added.dim() > x.dim() else 1
    rows, width = _choose_tile(size)
    with on_device(x):
        _rms_norm[(cdiv(num, rows),)](
            x, added, weight, out, scales, stride, inner, num, heads, size, eps, parts, rows, width,
            num_warps=_warps(width),
        )  # fmt: skip
    return out, scales


def rms_norm_backward(
    grad: Float[Tensor, "*rows size"],
    x: Float[Tensor, "*rows size"],
    weight: Float[Tensor, " size"],
    scales: Float[Tensor, "*rows 1"],
) -> tuple[Float[Tensor, "*rows size"], Float[Tensor, " size"]]:
    """The gradients of x and weight."""
    x, stride, inner = flatten_rows(x)
    grad, grad_x = grad.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num, size = scales.numel(), x.shape[-1]
    rows, width = _choose_tile(size)
    programs = max(1, min(PROGRAMS, cdiv(num, rows)))
    grad_weight = torch.empty(programs, size, dtype=torch.float32, device=x.device)
    with on_device(x):
        _rms_norm_backward[(programs,)](
            grad, x, weight, scales, grad_x, grad_weight, stride, inner, num, size, rows, width, num_warps=_warps(width)
        )
    return grad_x, grad_weight.sum(0).to(weight.dtype)


def rotate(
    x: Float[Tensor, "tokens heads dim"],
    cos: Float[Tensor, "tokens 1 dim"],
    sin: Float[Tensor, "tokens 1 dim"],
    back: bool = False,
) -> Float[Tensor, "tokens heads dim"]:
    """RoPE of every head by the angles of its token; `back` is the inverse."""
    x, stride, heads = flatten_rows(x)
    out, cos, sin = torch.empty(x.shape, dtype=x.dtype, device=x.device), cos.contiguous(), sin.contiguous()
    sizes = (next_power_of_2(heads), next_power_of_2(x.shape[2] // 2))
    with on_device(x):
        _rotate[(x.shape[0],)](x, cos, sin, out, stride, heads, x.shape[2] // 2, -1.0 if back else 1.0, *sizes)
    return out


def swiglu(gate: Float[Tensor, "rows size"], up: Float[Tensor, "rows size"]) -> Float[Tensor, "rows size"]:
    """silu(gate) up; the inputs may be column slices of a wider matrix."""
    gate, up = (x if x.stride(1) == 1 else x.contiguous() for x in (gate, up))
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    rows, size = gate.shape
    with on_device(gate):
        _swiglu[(rows, cdiv(size, COLUMNS))](gate, up, out, gate.stride(0), up.stride(0), size, COLUMNS)
    return out


def swiglu_backward(
    grad: Float[Tensor, "rows size"], gate: Float[Tensor, "rows size"], up: Float[Tensor, "rows size"]
) -> tuple[Float[Tensor, "rows size"], Float[Tensor, "rows size"]]:
    """The gradients of gate and up."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(gate)
    rows, size = gate.shape
    with on_device(gate):
        _swiglu_backward[(rows, cdiv(size, COLUMNS))](grad, gate, up, grad_gate, grad_up, size, COLUMNS)
    return grad_gate, grad_up


def norm_and_rotate_(
    qk: Float[Tensor, "tokens heads dim"],
    weight: Float[Tensor, "heads dim"] | None,
    eps: float,
    cos: Float[Tensor, "tokens 1 dim"] | None,
    sin: Float[Tensor, "tokens 1 dim"] | None,
) -> None:
    """RMSNorm of every head, if there is a weight, then RoPE, if there are angles, in place; heads are contiguous."""
    tokens, heads, dim = qk.shape
    assert qk.stride(2) == 1 and qk.stride(1) == dim
    sizes = (next_power_of_2(heads), next_power_of_2(dim // 2))
    with on_device(qk):
        _norm_and_rotate[(tokens,)](
            qk, weight, cos, sin, qk.stride(0), heads, dim // 2, eps, weight is not None, cos is not None, *sizes
        )


def supports_decode(heads: int, kv_heads: int, dim: int, keys: int) -> bool:
    """Whether `attend_step` supports these sizes."""
    fits = dim >= MIN_HEAD_DIM and dim == next_power_of_2(dim) and keys == next_power_of_2(keys)
    return fits and heads % kv_heads == 0


def attend_step(
    q: Float[Tensor, "rows heads dim"],
    k: Float[Tensor, "rows kv_heads dim"],
    v: Float[Tensor, "rows kv_heads dim"],
    addresses: Int[Tensor, "2 blocks"],
    tables: Int[Tensor, "blocks rows"],
    positions: Int[Tensor, " rows"],
    keys: int,
) -> Float[Tensor, "rows heads dim"]:
    """Attention of one token for each row to the keys of its earlier positions and to its own, which is stored.

    Block j, of `keys` positions, of row i is page `tables[j, i]` of the pages `[pages, kv_heads, keys, dim]` at
    `addresses[:, j]`: keys, then values (PagedAttention, 2309.06180). Parts of the blocks are computed separately, then
    combined with their maxima (Flash-Decoding, Dao et al. 2023). A row at position -1 reads and stores nothing.
    """
    rows, heads, dim = q.shape
    kv_heads, blocks = k.shape[1], addresses.shape[1]
    group = heads // kv_heads
    queries = max(next_power_of_2(group), MIN_QUERIES)
    config = MANY if rows * kv_heads * blocks >= MANY_BLOCKS else FEW
    split, tile, warps, stages = _fit_config(config, queries, dim, q.element_size(), _shared_memory(q.device))
    splits = cdiv(blocks * keys, split)
    parts = torch.empty(rows, kv_heads, splits, group, dim, dtype=torch.float32, device=q.device)
    stats = torch.empty(2, rows, kv_heads, splits, group, dtype=torch.float32, device=q.device)
    out = torch.empty(rows, heads, dim, dtype=q.dtype, device=q.device)
    sizes: tuple[Any, ...] = (kv_heads, addresses.stride(0), tables.stride(0), splits, group, dim**-0.5)
    with on_device(q):
        _attend_split[(rows, kv_heads, splits)](
            q, addresses, tables, positions, parts, *stats, q.stride(0), *sizes,
            queries, dim, keys, split, tile, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        _combine[(rows, kv_heads)](
            q, k, v, addresses, tables, positions, parts, *stats, out, q.stride(0), k.stride(0), v.stride(0), *sizes,
            next_power_of_2(group), dim, keys, split, num_warps=2,
        )  # fmt: skip
    return out


def _fit_config(
    config: tuple[int, int, int, int], queries: int, dim: int, itemsize: int, memory: int
) -> tuple[int, int, int, int]:
    """FEW or MANY with as many stages, and then as many keys at once, as fit into `memory` bytes.

    A program holds its queries, their scores of a tile of keys, and the tiles of keys and values that are being loaded;
    Triton 3.7 adds up to 140 bytes.
    """
    split, tile, warps, stages = config
    while tile > MIN_TILE:
        loads = max((stages - 1) // 2, 1)
        if itemsize * (queries * (dim + tile) + 2 * tile * dim * loads) + 256 <= memory:
            break
        stages, tile = (stages - 2, tile) if stages > 3 else (stages, tile // 2)
    return split, tile, warps, stages


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program can have."""
    if device.type != "cuda":
        return sys.maxsize  # Triton's interpreter
    of_amd = 1 << 16  # which torch does not report
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", of_amd)


def copy_pages(
    k: Float[Tensor, "tokens kv_heads dim"],
    v: Float[Tensor, "tokens kv_heads dim"],
    addresses: Int[Tensor, "2 blocks"],
    places: Int[Tensor, "3 tokens"],
    keys: int,
    *,
    store: bool,
) -> None:
    """Store keys and values in pages, `[pages, kv_heads, keys, dim]` at `addresses`, or load them into `k` and `v`.

    `places` has block, page and position in the page of every token; tokens of block -1 are left out. `k` and `v` must
    be contiguous to be loaded.
    """
    tokens, heads, dim = k.shape
    assert store or (k.is_contiguous() and v.is_contiguous())
    k, v = k.contiguous(), v.contiguous()
    with on_device(k):
        _copy_pages[(tokens,)](
            k, v, addresses, *places, addresses.stride(0), heads, next_power_of_2(heads), dim, keys, store
        )


def multiply_row(x: Float[Tensor, "1 inputs"], weight: Float[Tensor, "outputs inputs"]) -> Float[Tensor, "1 outputs"]:
    """x weight^T for a single row: 1.1 to 3 times as fast as cuBLAS, which computes eight (measured on an H200)."""
    outputs, inputs = weight.shape
    out = torch.empty(1, outputs, dtype=x.dtype, device=x.device)
    with on_device(x):
        _multiply_row[(cdiv(outputs, ROW_OUTPUTS),)](
            x, weight, out, outputs, inputs, ROW_OUTPUTS, min(ROW_INPUTS, next_power_of_2(inputs)), num_warps=4
        )
    return out


def supports_split(x: Float[Tensor, "rows inputs"], weight: Float[Tensor, "outputs inputs"]) -> bool:
    """Whether `multiply_split` supports this product, and is faster than cuBLAS."""
    outputs, inputs = weight.shape
    fits = outputs % SPLIT_OUTPUTS == 0 and inputs % (SPLITS * SPLIT_INPUTS) == 0
    return fits and outputs <= MAX_SPLIT_OUTPUTS and 1 < len(x) <= _max_split_rows(x.device)


def _max_split_rows(device: torch.device) -> int:
    """Rows for which the stages of loads fit into the shared memory of a program."""
    needed = SPLIT_STAGES * 2 * SPLIT_INPUTS * (SPLIT_OUTPUTS + MAX_SPLIT_ROWS)
    return MAX_SPLIT_ROWS if needed <= _shared_memory(device) else 32


def multiply_split(
    x: Float[Tensor, "rows inputs"], weight: Float[Tensor, "outputs inputs"]
) -> Float[Tensor, "parts rows outputs"]:
    """x weight^T in two parts, in fp32, for `rms_norm` to add.

    On an H100, of 32 rows: 1024 x 2048 in 4.9 us, 1024 x 3072 in 5.9 us; cuBLAS 6.1 and 8.1 us.
    """
    (rows, inputs), outputs = x.shape, len(weight)
    x, parts = x.contiguous(), torch.empty(SPLITS, rows, outputs, dtype=torch.float32, device=x.device)
    with on_device(x):
        _multiply_split[(outputs // SPLIT_OUTPUTS, SPLITS)](
            x, weight, parts, rows, outputs, inputs, max(next_power_of_2(rows), MIN_QUERIES), SPLIT_OUTPUTS,
            SPLIT_INPUTS, SPLITS, num_warps=4, num_stages=SPLIT_STAGES,
        )  # fmt: skip
    return parts


def _choose_tile(size: int) -> tuple[int, int]:
    """Rows of a program, and columns including padding."""
    width = next_power_of_2(size)
    return max(1, TILE // width), width


def _warps(width: int) -> int:
    return 4 if width <= TILE else 8


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Launch kernels on the tensor's device."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()  # the CPU: Triton's interpreter


@triton.jit
def _rms_norm(
    x, added, weight, out, scales, stride, inner, num, heads, size, eps, PARTS: tl.constexpr, ROWS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, SIZE)[None, :]
    mask = (row < num)[:, None] & (column < size)
    at = (row // inner * stride + row % inner * size)[:, None] + column
    flat = row[:, None] * size + column
    values = tl.load(x + at, mask, 0.0)
    if added is not None:
        change = tl.load(added + flat, mask, 0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            change += tl.load(added + part * num * size + flat, mask, 0.0)
        values = (values.to(tl.float32) + change).to(x.dtype.element_ty)
        tl.store(x + at, values, mask)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / size + eps)
    tl.store(scales + row, scale, row < num)
    factor = tl.load(weight + (row % heads)[:, None] * size + column, mask, 0.0).to(tl.float32)
    unit = (wide * scale[:, None]).to(x.dtype.element_ty).to(tl.float32)
    tl.store(out + flat, (factor * unit).to(x.dtype.element_ty), mask)


@triton.jit
def _rms_norm_backward(
    grad, x, weight, scales, grad_x, grad_weight, stride, inner, num, size, ROWS: tl.constexpr, SIZE: tl.constexpr
):
    program = tl.program_id(0)
    column = tl.arange(0, SIZE)
    factor = tl.load(weight + column, column < size, 0.0).to(tl.float32)[None, :]
    total = tl.zeros((ROWS, SIZE), tl.float32)
    first = program.to(tl.int64) * ROWS
    while first < num:
        row = first + tl.arange(0, ROWS)
        mask = (row < num)[:, None] & (column < size)[None, :]
        at = (row // inner * stride + row % inner * size)[:, None] + column[None, :]
        flat = row[:, None] * size + column[None, :]
        scale = tl.load(scales + row, row < num, 0.0)[:, None]
        unit = tl.load(x + at, mask, 0.0).to(tl.float32) * scale
        slope = tl.load(grad + flat, mask, 0.0).to(tl.float32)
        total += slope * unit
        inward = slope * factor
        mean = tl.sum(inward * unit, 1)[:, None] / size
        tl.store(grad_x + flat, ((inward - unit * mean) * scale).to(x.dtype.element_ty), mask)
        first += tl.num_programs(0) * ROWS
    tl.store(grad_weight + program * size + column, tl.sum(total, 0), column < size)


@triton.jit
def _rotate(x, cos, sin, out, stride, heads, half, sign, HEADS: tl.constexpr, HALF: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    mask = (head < heads) & (column < half)
    at = head * 2 * half + column
    left = tl.load(x + token * stride + at, mask, 0.0).to(tl.float32)
    right = tl.load(x + token * stride + at + half, mask, 0.0).to(tl.float32)
    # The second half: a table may have the sign of the first one changed.
    angle = token * 2 * half + half + column
    c = tl.load(cos + angle, column < half, 0.0).to(tl.float32)
    s = tl.load(sin + angle, column < half, 0.0).to(tl.float32) * sign
    target = out + token * heads * 2 * half + at
    tl.store(target, (left * c - right * s).to(x.dtype.element_ty), mask)
    tl.store(target + half, (right * c + left * s).to(x.dtype.element_ty), mask)


@triton.jit
def _norm_and_rotate(
    qk, weight, cos, sin, stride, heads, half, eps, NORM: tl.constexpr, ROTATE: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    mask = (head < heads) & (column < half)
    at = head * 2 * half + column
    source = qk + token * stride + at
    left = tl.load(source, mask, 0.0).to(tl.float32)
    right = tl.load(source + half, mask, 0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / (2 * half) + eps)[:, None]
        left = (left * scale).to(qk.dtype.element_ty).to(tl.float32) * tl.load(weight + at, mask, 0.0).to(tl.float32)
        right = (right * scale).to(qk.dtype.element_ty).to(tl.float32)
        right = right * tl.load(weight + at + half, mask, 0.0).to(tl.float32)
        left = left.to(qk.dtype.element_ty).to(tl.float32)
        right = right.to(qk.dtype.element_ty).to(tl.float32)
    if ROTATE:
        angle = token * 2 * half + half + column
        c = tl.load(cos + angle, column < half, 0.0).to(tl.float32)
        s = tl.load(sin + angle, column < half, 0.0).to(tl.float32)
        rotated = left * c - right * s
        right = right * c + left * s
        left = rotated
    tl.store(source, left.to(qk.dtype.element_ty), mask)
    tl.store(source + half, right.to(qk.dtype.element_ty), mask)


@triton.jit
def _swiglu(gate, up, out, gate_stride, up_stride, size, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < size
    g = tl.load(gate + row * gate_stride + column, mask, 0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask, 0.0).to(tl.float32)
    tl.store(out + row * size + column, (g * tl.sigmoid(g) * u).to(gate.dtype.element_ty), mask)


@triton.jit
def _swiglu_backward(grad, gate, up, grad_gate, grad_up, size, COLUMNS: tl.constexpr):
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at, mask = tl.program_id(0).to(tl.int64) * size + column, column < size
    slope = tl.load(grad + at, mask, 0.0).to(tl.float32)
    g = tl.load(gate + at, mask, 0.0).to(tl.float32)
    u = tl.load(up + at, mask, 0.0).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(grad_gate + at, (slope * u * s * (1 + g * (1 - s))).to(gate.dtype.element_ty), mask)
    tl.store(grad_up + at, (slope * g * s).to(gate.dtype.element_ty), mask)


@triton.jit
def _multiply_row(x, weight, out, outputs, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, TILE: tl.constexpr):
    output, column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, TILE)
    rows = weight + output[:, None].to(tl.int64) * INPUTS
    total = tl.zeros((OUTPUTS, TILE), tl.float32)
    for start in tl.range(0, INPUTS, TILE):
        here = start + column[None, :]
        factor = tl.load(x + here, here < INPUTS, 0.0).to(tl.float32)
        total += factor * tl.load(rows + here, (output < outputs)[:, None] & (here < INPUTS), 0.0).to(tl.float32)
    tl.store(out + output, tl.sum(total, 1).to(out.dtype.element_ty), output < outputs)


@triton.jit
def _multiply_split(
    x, weight, parts, rows, outputs, inputs, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, TILE: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    output, part = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(1)
    row, column = tl.arange(0, ROWS), tl.arange(0, TILE)
    first = part * (inputs // SPLITS)
    weights = weight + output[:, None].to(tl.int64) * inputs + first + column[None, :]
    factors = x + row[None, :] * inputs + first + column[:, None]
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in tl.range(0, inputs // SPLITS, TILE):
        factor = tl.load(factors + start, (row < rows)[None, :], 0.0)
        total += tl.dot(tl.load(weights + start), factor, input_precision="ieee")
    tl.store(parts + (part * rows + row[None, :]) * outputs + output[:, None], total, (row < rows)[None, :])


@triton.jit
def _attend_split(
    q, addresses, tables, positions, parts, maxima, sums, q_stride, kv_heads, stride, table_stride, splits, group,
    factor,
    QUERIES: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(positions + row) - split * SPLIT
    if length > 0:
        query, column = tl.arange(0, QUERIES), tl.arange(0, DIM)
        at = q + row * q_stride + (head * group + query[:, None]) * DIM + column[None, :]
        queries = tl.load(at, (query < group)[:, None], 0.0)
        top = tl.full((QUERIES,), float("-inf"), tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        result = tl.zeros((QUERIES, DIM), tl.float32)
        for start in tl.range(0, SPLIT, TILE):
            # Tiles beyond the last key, whose block may not exist, read its block and are masked.
            index = (split * SPLIT + tl.minimum(start, length - 1)) // KEYS
            page = tl.load(tables + index * table_stride + row).to(tl.int64)
            page = ((page * kv_heads + head) * KEYS + (split * SPLIT + start) % KEYS) * DIM
            block = addresses + index
            # Without the hint, an address from memory is read two bytes at a time.
            keys = tl.multiple_of(tl.load(block).to(tl.pointer_type(q.dtype.element_ty)) + page, 16)
            values = tl.multiple_of(tl.load(block + stride).to(tl.pointer_type(q.dtype.element_ty)) + page, 16)
            key = start + tl.arange(0, TILE)
            k = tl.load(keys + tl.arange(0, TILE)[None, :] * DIM + column[:, None], (key < length)[None, :], 0.0)
            v = tl.load(values + tl.arange(0, TILE)[:, None] * DIM + column[None, :], (key < length)[:, None], 0.0)
            scores = tl.dot(queries, k, input_precision="ieee") * factor
            scores = tl.where((key < length)[None, :], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            old, weights = tl.exp(top - new_top), tl.exp(scores - new_top[:, None])
            total = total * old + tl.sum(weights, 1)
            result = result * old[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            top = new_top
        place = ((row * kv_heads + head) * splits + split) * group + query
        tl.store(maxima + place, top, query < group)
        tl.store(sums + place, total, query < group)
        tl.store(parts + place[:, None] * DIM + column[None, :], result, (query < group)[:, None])


@triton.jit
def _combine(
    q, k, v, addresses, tables, positions, parts, maxima, sums, out, q_stride, k_stride, v_stride, kv_heads, stride,
    table_stride, splits, group, factor, GROUP: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    query, column = tl.arange(0, GROUP), tl.arange(0, DIM)
    own_k = tl.load(k + row * k_stride + head * DIM + column)
    own_v = tl.load(v + row * v_stride + head * DIM + column)
    position = tl.load(positions + row)
    if position >= 0:
        page = tl.load(tables + position // KEYS * table_stride + row).to(tl.int64)
        own = ((page * kv_heads + head) * KEYS + position % KEYS) * DIM
        block = addresses + position // KEYS
        keys = tl.multiple_of(tl.load(block).to(tl.pointer_type(q.dtype.element_ty)) + own, 16)
        values = tl.multiple_of(tl.load(block + stride).to(tl.pointer_type(q.dtype.element_ty)) + own, 16)
        tl.store(keys + column, own_k)
        tl.store(values + column, own_v)
    mask = (query < group)[:, None]
    at = (head * group + query[:, None]) * DIM + column[None, :]
    queries = tl.load(q + row * q_stride + at, mask, 0.0).to(tl.float32)
    top = tl.sum(queries * own_k.to(tl.float32)[None, :], 1) * factor
    total = tl.full((GROUP,), 1.0, tl.float32)
    result = tl.broadcast_to(own_v.to(tl.float32)[None, :], (GROUP, DIM))
    split = tl.program_id(0) * 0
    while split * SPLIT < position:
        place = ((row * kv_heads + head) * splits + split) * group + query
        top_here = tl.load(maxima + place, query < group, 0.0)
        new_top = tl.maximum(top, top_here)
        old, here = tl.exp(top - new_top), tl.exp(top_here - new_top)
        part = tl.load(parts + place[:, None] * DIM + column[None, :], mask, 0.0)
        total = total * old + tl.load(sums + place, query < group, 0.0) * here
        result = result * old[:, None] + part * here[:, None]
        top = new_top
        split += 1
    tl.store(out + row * kv_heads * group * DIM + at, (result / total[:, None]).to(out.dtype.element_ty), mask)


@triton.jit
def _copy_pages(
    k, v, addresses, blocks, pages, offsets, stride, heads, HEADS: tl.constexpr, DIM: tl.constexpr,
    KEYS: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    block = tl.load(blocks + token)
    if block >= 0:
        head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, DIM)[None, :]
        flat = (token * heads + head) * DIM + column
        place = ((tl.load(pages + token) * heads + head) * KEYS + tl.load(offsets + token)) * DIM + column
        keys = tl.multiple_of(tl.load(addresses + block).to(tl.pointer_type(k.dtype.element_ty)), 16) + place
        values = tl.multiple_of(tl.load(addresses + stride + block).to(tl.pointer_type(k.dtype.element_ty)), 16) + place
        if STORE:
            tl.store(keys, tl.load(k + flat, head < heads), head < heads)
            tl.store(values, tl.load(v + flat, head < heads), head < heads)
        else:
            tl.store(k + flat, tl.load(keys, head < heads), head < heads)
            tl.store(v + flat, tl.load(values, head < heads), head < heads)
