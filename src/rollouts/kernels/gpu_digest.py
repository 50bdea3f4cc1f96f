"""xxh3_128 digests of tensors in GPU memory, in Triton: only 64 bytes of each tensor are copied to the host.

XXH3 (Collet, doc/xxhash_spec.md of xxHash) adds to eight 64-bit accumulators, for every block of 1,024 bytes, sums that
depend on this block alone, and mixes the accumulators between blocks. The sums of all blocks are computed in parallel;
only the mixing, 64 bytes a block, is sequential. Tensors are independent.

Import this module only where triton is installed (`select.gpu_kernels`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
import xxhash
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from rollouts.kernels.gpu import on_device

SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
"""The secret of the specification."""

KEYS_LAST, KEYS_LOW, KEYS_HIGH = (np.frombuffer(SECRET[i : i + 64], dtype=np.uint64).tolist() for i in (121, 11, 117))
"""Words of the secret for the last stripe, and for both halves of the digest."""

PRIMES_32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
PRIMES_64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
START = (PRIMES_32[2], *PRIMES_64[:4], PRIMES_32[1], PRIMES_64[4], PRIMES_32[0])
"""The accumulators at the start."""

AVALANCHE = 0x165667919E3779F9
MASK = (1 << 64) - 1

BLOCK = 1024
"""Bytes of a block."""

MIN_SIZE = 241
"""Smaller tensors have digests of another kind, which the CPU computes."""

CHUNK, TILE = 64, 8
"""Blocks of a program, and blocks that it holds at once."""

UNROLL = 64
"""Blocks whose sums are loaded while those before are mixed."""


def digest_on_gpu(tensors: Sequence[Tensor]) -> list[str]:
    """xxh3_128 in hex over the contiguous bytes of each tensor; all are on one GPU.

    Takes a sixteenth of their memory, and as much as tensors that are not contiguous.
    """
    # The largest one last, so that its sums, the longest sequence, are still in the cache when they are mixed.
    order = sorted(range(len(tensors)), key=lambda i: tensors[i].nbytes)
    held = [tensors[i] if tensors[i].is_contiguous() else tensors[i].contiguous() for i in order]
    held = [tensor if tensor.data_ptr() % 8 == 0 else tensor.clone() for tensor in held]
    num_small = sum(tensor.nbytes < MIN_SIZE for tensor in held)
    found = _digest_small(held[:num_small]) + _digest_large(held[num_small:])
    return [digest for _, digest in sorted(zip(order, found, strict=True))]


def _digest_small(tensors: list[Tensor]) -> list[str]:
    if not tensors:
        return []
    data = torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors]).cpu().numpy().tobytes()
    ends = np.cumsum([tensor.nbytes for tensor in tensors]).tolist()
    return [xxhash.xxh3_128_hexdigest(data[i:j]) for i, j in zip([0, *ends], ends, strict=False)]


def _digest_large(tensors: list[Tensor]) -> list[str]:
    if not tensors:
        return []
    accumulators = _accumulate(tensors).cpu().numpy().view(np.uint64).tolist()
    return [_merge(row, tensor.nbytes) for row, tensor in zip(accumulators, tensors, strict=True)]


def _accumulate(tensors: list[Tensor]) -> Int[Tensor, "tensors 8"]:
    """The accumulators of contiguous tensors of at least `MIN_SIZE` bytes after their last stripe."""
    device = tensors[0].device
    sizes = np.array([tensor.nbytes for tensor in tensors], dtype=np.int64)
    addresses = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)
    num = (sizes - 1) // BLOCK
    even = num + num % 2  # the sums of two blocks are beside each other: a thread loads both at once
    first = np.cumsum(even) - even
    chunks = -(-num // CHUNK)
    index = np.arange(int(chunks.sum())) - np.repeat(np.cumsum(chunks) - chunks, chunks)  # of a chunk in its tensor
    starts = index * CHUNK
    programs = np.stack(
        [
            np.repeat(addresses, chunks) + starts * BLOCK,
            np.repeat(first, chunks) + starts,
            np.minimum(np.repeat(num, chunks) - starts, CHUNK),
        ]
    )
    keys = torch.from_numpy(_read_keys()).to(device)
    sums = torch.empty(int(even.sum()), 8, dtype=torch.int64, device=device)
    out = torch.empty(len(tensors), 8, dtype=torch.int64, device=device)
    with on_device(out):
        if len(index):
            _sum_blocks[(len(index),)](*torch.from_numpy(programs).to(device), keys, sums, CHUNK, TILE)
        rows = torch.from_numpy(np.stack([addresses, sizes, first, num])).to(device)
        _mix_blocks[(len(tensors),)](*rows, keys, sums, out, PRIMES_32[0], UNROLL, num_warps=1)
    return out


def _read_keys() -> NDArray[np.int64]:
    """The secret in words, then the eight of the last stripe, then the first accumulators."""
    words = np.frombuffer(SECRET, dtype=np.uint64)
    return np.concatenate([words, np.array([*KEYS_LAST, *START], dtype=np.uint64)]).view(np.int64)


def _merge(accumulators: list[int], size: int) -> str:
    low = _fold(accumulators, KEYS_LOW, size * PRIMES_64[0] & MASK)
    high = _fold(accumulators, KEYS_HIGH, ~(size * PRIMES_64[1]) & MASK)
    return f"{high:016x}{low:016x}"


def _fold(accumulators: list[int], keys: list[int], total: int) -> int:
    for i in range(0, 8, 2):
        product = (accumulators[i] ^ keys[i]) * (accumulators[i + 1] ^ keys[i + 1])
        total += (product & MASK) ^ (product >> 64)
    total &= MASK
    total = (total ^ (total >> 37)) * AVALANCHE & MASK
    return total ^ (total >> 32)


@triton.jit
def _product(mixed):
    return (mixed & 0xFFFFFFFF) * (mixed >> 32)


@triton.jit
def _join(byte, index):
    """Words of which axis -1 has the bytes."""
    return tl.sum(byte.to(tl.uint64) << (index * 8).to(tl.uint64), -1)


@triton.jit
def _sum_blocks(addresses, firsts, counts, keys, sums, CHUNK: tl.constexpr, TILE: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    first, count = tl.load(firsts + program), tl.load(counts + program)
    data = tl.multiple_of(tl.load(addresses + program).to(tl.pointer_type(tl.uint64)), 8)
    stripe, lane = tl.arange(0, 16)[None, :, None], tl.arange(0, 8)[None, None, :]
    key = tl.load(keys + stripe + lane).to(tl.uint64, bitcast=True)
    for start in tl.range(0, CHUNK, TILE):
        block = start + tl.arange(0, TILE)[:, None, None]
        at = data + block * 128 + stripe * 8
        words = tl.load(at + lane, block < count, 0)
        parts = _product(words ^ key) + tl.load(at + (lane ^ 1), block < count, 0)
        total = tl.sum(parts, 1).to(tl.int64, bitcast=True)
        row, column = start + tl.arange(0, TILE)[:, None], tl.arange(0, 8)[None, :]
        tl.store(sums + (first + row) // 2 * 16 + column * 2 + row % 2, total, row < count)


@triton.jit
def _mix(total, added, key, PRIME: tl.constexpr):
    total += added.to(tl.uint64, bitcast=True)
    return ((total ^ (total >> 47)) ^ key) * PRIME


@triton.jit
def _mix_blocks(addresses, sizes, firsts, counts, keys, sums, out, PRIME: tl.constexpr, UNROLL: tl.constexpr):
    tensor, lane = tl.program_id(0).to(tl.int64), tl.arange(0, 8)
    count, size = tl.load(counts + tensor), tl.load(sizes + tensor)
    total = tl.load(keys + 32 + lane).to(tl.uint64, bitcast=True)
    key = tl.load(keys + 16 + lane).to(tl.uint64, bitcast=True)
    here = sums + tl.load(firsts + tensor) * 8 + lane * 2
    pair = tl.multiple_of(here, 16)[:, None] + tl.arange(0, 2)[None, :]
    block = count * 0
    while block < count // UNROLL * UNROLL:
        for i in tl.static_range(0, UNROLL, 2):
            even, odd = tl.split(tl.load(pair + (block + i) * 8))
            total = _mix(_mix(total, even, key, PRIME), odd, key, PRIME)
        block += UNROLL
    while block < count:
        total = _mix(total, tl.load(here + block // 2 * 16 + block % 2), key, PRIME)
        block += 1
    # The stripes after the last whole block, and the last 64 bytes, which begin anywhere.
    data = tl.load(addresses + tensor).to(tl.pointer_type(tl.uint8))
    stripe, byte = tl.arange(0, 16)[:, None, None], tl.arange(0, 8)[None, None, :]
    rest = data + count * 1024 + stripe * 64 + byte
    mask = stripe < (size - 1 - count * 1024) // 64
    words = _join(tl.load(rest + lane[None, :, None] * 8, mask, 0), byte)
    swapped = _join(tl.load(rest + (lane ^ 1)[None, :, None] * 8, mask, 0), byte)
    mixed = words ^ tl.load(keys + tl.arange(0, 16)[:, None] + lane[None, :]).to(tl.uint64, bitcast=True)
    parts = tl.where(tl.arange(0, 16)[:, None] < (size - 1 - count * 1024) // 64, _product(mixed) + swapped, 0)
    total += tl.sum(parts, 0)
    last, byte = data + size - 64, tl.arange(0, 8)[None, :]
    mixed = _join(tl.load(last + lane[:, None] * 8 + byte), byte)
    mixed ^= tl.load(keys + 24 + lane).to(tl.uint64, bitcast=True)
    total += _product(mixed) + _join(tl.load(last + (lane ^ 1)[:, None] * 8 + byte), byte)
    tl.store(out + tensor * 8 + lane, total.to(tl.int64, bitcast=True))
