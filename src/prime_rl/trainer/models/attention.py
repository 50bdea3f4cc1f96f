"""Attention over sequences of different length, in an exact and a fast form.

Exact means: the result for a token does not depend, in any bit, on which other sequences were computed beside it, on
padding, or on whether its past came from this very call or from a cache. On a CPU in fp32 with one thread this holds
for explicit masked attention with at least `MIN_ROWS` query rows, because GEMM then computes every row the same way;
fused attention blocks over keys and does not have the property.
"""

from __future__ import annotations

import functools
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

MIN_ROWS = 4
"""Below this many rows GEMM takes another path (matrix-vector) whose sums are rounded in another order."""

KEY_MULTIPLE = 16
"""Keys are padded to a multiple of the vector width, or the lanes in which softmax sums them depend on the padding."""

KEY_BLOCK = 128
"""Values are summed in blocks of this many keys: GEMM splits a longer sum at places that depend on its length."""

AttentionMode = Literal["exact", "sdpa"]


class Attend(Protocol):
    """How the tokens of a forward pass see each other and the past; packed batches and caches implement it."""

    def __call__(
        self,
        layer: int,
        q: Float[Tensor, "tokens heads dim"],
        k: Float[Tensor, "tokens kv_heads dim"],
        v: Float[Tensor, "tokens kv_heads dim"],
    ) -> Float[Tensor, "tokens heads dim"]: ...


def padded(length: int) -> int:
    """The number of keys that `length` tokens are laid out in."""
    return -(-length // KEY_MULTIPLE) * KEY_MULTIPLE


def masked_attention(
    q: Float[Tensor, "batch heads rows dim"],
    k: Float[Tensor, "batch heads keys dim"],
    v: Float[Tensor, "batch heads keys dim"],
    mask: Bool[Tensor, "*batch heads rows keys"],
) -> Float[Tensor, "batch heads rows dim"]:
    """softmax(q k^T / sqrt(dim)) v over the keys where `mask` is true; scores and softmax in fp32 at least.

    Every row needs one visible key. Masked keys weigh exactly 0, so a longer, padded cache changes no bit.
    """
    scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2))
    wide = scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores
    weights = torch.softmax(wide.masked_fill(~mask, float("-inf")), dim=-1)
    return weighted_values(weights.to(v.dtype), v)


def weighted_values(
    weights: Float[Tensor, "batch heads rows keys"], v: Float[Tensor, "batch heads keys dim"]
) -> Float[Tensor, "batch heads rows dim"]:
    """weights @ v with the sum over keys taken block by block, so that keys of weight 0 at the end change no bit."""
    blocks = zip(weights.split(KEY_BLOCK, dim=-1), v.split(KEY_BLOCK, dim=-2), strict=True)
    return functools.reduce(torch.add, (torch.matmul(w, values) for w, values in blocks))


def fold_groups(q: Float[Tensor, "batch rows heads dim"], kv_heads: int) -> Float[Tensor, "batch kv_heads rows_x dim"]:
    """Lay the query heads that share a key head out as extra rows (grouped-query attention as one GEMM)."""
    batch, rows, heads, dim = q.shape
    group = heads // kv_heads
    return q.view(batch, rows, kv_heads, group, dim).permute(0, 2, 1, 3, 4).reshape(batch, kv_heads, rows * group, dim)


def unfold_groups(out: Float[Tensor, "batch kv_heads rows_x dim"], rows: int) -> Float[Tensor, "batch rows heads dim"]:
    """The inverse of `fold_groups`."""
    batch, kv_heads, folded, dim = out.shape
    group = folded // rows
    return (
        out.view(batch, kv_heads, rows, group, dim).permute(0, 2, 1, 3, 4).reshape(batch, rows, kv_heads * group, dim)
    )


class PackedAttention:
    """Causal attention inside each sequence of a flat pack: block-diagonal by construction.

    The pack is laid out as one padded row per sequence, so no token can see another sequence whatever the kernel does.
    """

    def __init__(self, lengths: list[int], device: torch.device | str = "cpu", mode: AttentionMode = "exact") -> None:
        if not lengths or min(lengths) < 1:
            raise ValueError(f"a pack needs sequences of at least one token, got lengths {lengths}")
        self.mode = mode
        size = torch.tensor(lengths)
        width = padded(int(size.max()))
        column = torch.arange(width)
        start = torch.cumsum(size, 0) - size
        valid: Bool[Tensor, "seqs width"] = column[None, :] < size[:, None]
        self.rows: Int[Tensor, "seqs width"] = torch.where(valid, start[:, None] + column, 0).to(device)
        self.flat: Int[Tensor, " tokens"] = valid.flatten().nonzero().squeeze(1).to(device)
        self.causal: Bool[Tensor, "width width"] = (column[None, :] <= column[:, None]).to(device)

    def __call__(
        self,
        layer: int,
        q: Float[Tensor, "tokens heads dim"],
        k: Float[Tensor, "tokens kv_heads dim"],
        v: Float[Tensor, "tokens kv_heads dim"],
    ) -> Float[Tensor, "tokens heads dim"]:
        heads, kv_heads = q.shape[1], k.shape[1]
        seqs, width = self.rows.shape
        keys, values = k[self.rows].transpose(1, 2), v[self.rows].transpose(1, 2)
        queries = q[self.rows]
        if self.mode == "exact":
            mask = self.causal.repeat_interleave(heads // kv_heads, dim=0)
            out = unfold_groups(masked_attention(fold_groups(queries, kv_heads), keys, values, mask), width)
        else:
            out = F.scaled_dot_product_attention(
                queries.transpose(1, 2), keys, values, is_causal=True, enable_gqa=heads != kv_heads
            ).transpose(1, 2)
        return out.reshape(seqs * width, heads, -1)[self.flat]
