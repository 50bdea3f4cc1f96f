"""Attention over sequences of different length, in an exact and a fast form.

Exact means: the result for a token does not depend, in any bit, on which other sequences were computed beside it, on
padding, or on whether its past came from this very call or from a cache. On a CPU in fp32 with one thread this holds
for explicit masked attention with at least `min_query_rows` query rows, because GEMM then computes every row the same
way; fused attention blocks over keys and does not have the property.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prime_rl.trainer.prefixes import SharedPrefixes
from rollouts.training import native

ROWS_TRIED = (4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 48, 64, 100)
"""Numbers of rows with which a product is tried, when this machine is asked how many it needs."""

KEY_MULTIPLE = 16
"""Keys are padded to a multiple of the vector width, or the lanes in which softmax sums them depend on the padding."""

KEY_BLOCK = 128
"""Values are summed in blocks of this many keys: GEMM splits a longer sum at places that depend on its length."""

QUERY_BLOCK = 256
"""Queries of a long sequence are taken so many at a time, each block with the keys up to its end."""

LONG = 256
"""From here on padding a sequence costs more than treating it by itself."""

AttentionMode = Literal["exact", "sdpa", "flash"]


class Attend(Protocol):
    """How the tokens of a forward pass see each other and the past; packed batches and caches implement it."""

    def __call__(
        self,
        layer: int,
        q: Float[Tensor, "tokens heads dim"],
        k: Float[Tensor, "tokens kv_heads dim"],
        v: Float[Tensor, "tokens kv_heads dim"],
    ) -> Float[Tensor, "tokens heads dim"]: ...


def min_rows() -> int:
    """Fewest rows of `F.linear` in fp32 from which on a row has the same bits whatever their number.

    Below it GEMM takes other paths, whose sums are rounded in another order; which, depends on the processor and on
    the threads that share the rows. So it is tried: 4 on one CPU with AVX-512, 16 on another, more with two threads.
    """
    return max(_find_rows(F.linear, inputs, torch.get_num_threads()) for inputs in (32, 128, 384, 1024))


def min_query_rows(dim: int) -> int:
    """The same for queries of `dim` numbers that are multiplied with keys and then with values."""
    return max(_find_rows(_many_products, inputs, torch.get_num_threads()) for inputs in (dim, KEY_BLOCK))


@functools.cache
def _find_rows(product: Callable[[Tensor, Tensor], Tensor], inputs: int, threads: int) -> int:
    """The least number of rows from which on all that are tried give the same bits; `threads` is what they hold for."""
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(ROWS_TRIED[-1], inputs, generator=draw), torch.randn(96, inputs, generator=draw)
    expected = product(x, weight)
    good = ROWS_TRIED[-1]
    for rows in reversed(ROWS_TRIED):
        if not torch.equal(product(x[:rows], weight), expected[:rows]):
            break
        good = rows
    return good


def _many_products(x: Tensor, weight: Tensor) -> Tensor:
    """As attention multiplies: several at once."""
    return torch.matmul(x.expand(2, 2, -1, -1).contiguous(), weight.expand(2, 2, -1, -1).transpose(-1, -2))[0, 0]


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
    weights = softmax(masked_scores(q, k, mask))
    return weighted_values(weights.to(v.dtype), v)


def softmax(scores: Float[Tensor, "*rows keys"]) -> Float[Tensor, "*rows keys"]:
    """The weights of scores; masked ones at the end of a row change no bit when there are vectors of them."""
    if native.runs_here(scores) and not (torch.is_grad_enabled() and scores.requires_grad):
        return native.softmax_(scores.clone(memory_format=torch.contiguous_format))
    return torch.softmax(scores, dim=-1)


def masked_scores(
    q: Float[Tensor, "batch heads rows dim"],
    k: Float[Tensor, "batch heads keys dim"],
    mask: Bool[Tensor, "*batch heads rows keys"],
) -> Float[Tensor, "batch heads rows keys"]:
    """q k^T / sqrt(dim) in fp32 at least, minus infinity where `mask` is false."""
    scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2))
    wide = scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores
    return wide.masked_fill_(~mask, float("-inf"))


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


def pad_rows(
    lengths: list[int], tokens: Int[Tensor, " tokens"], width: int
) -> tuple[Int[Tensor, "seqs width"], Bool[Tensor, "seqs width"]]:
    """`tokens`, those of one sequence after the other, as one row per sequence; and where a row holds a token."""
    size = torch.tensor(lengths)
    column = torch.arange(width)
    valid = column[None, :] < size[:, None]
    place = (torch.cumsum(size, 0) - size)[:, None] + column
    return torch.where(valid, tokens[torch.where(valid, place, 0)], 0), valid


def bucket_lengths(lengths: list[int]) -> list[list[int]]:
    """The sequences, by index, that are laid out together: those of nearly the same length.

    Measured on a CPU: up to LONG keys rows may be a tenth shorter than the longest beside them, because every bucket
    costs a fixed time; longer ones are laid out with their equals only, because padding costs its square.
    """
    buckets: list[list[int]] = []
    widest = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        width = padded(lengths[index])
        if not buckets or width < widest * (1.0 if widest > LONG else 0.9):
            buckets.append([])
            widest = width
        buckets[-1].append(index)
    return buckets


class PackedAttention:
    """Causal attention inside each sequence of a flat pack: block-diagonal by construction.

    Sequences of similar length are laid out as padded rows, so no token can see another sequence whatever the kernel
    does. In exact mode it makes no difference to a bit which sequences share a layout. With `shared` (not for flash)
    the tokens that come and go are the different ones.
    """

    def __init__(
        self,
        lengths: list[int],
        device: torch.device | str = "cpu",
        mode: AttentionMode = "exact",
        shared: SharedPrefixes | None = None,
    ) -> None:
        if not lengths or min(lengths) < 1:
            raise ValueError(f"a pack needs sequences of at least one token, got lengths {lengths}")
        self.mode, self.lengths = mode, lengths
        self.longest = max(
            lengths
        )  # a compiler would look at every length, and compile anew for another number of them
        self.ends: Int[Tensor, " seqs_and_one"] = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        if mode == "flash":
            self.ends = self.ends.to(device)
            return
        tokens = torch.arange(sum(lengths)).split(lengths)
        self.rows: list[Int[Tensor, "seqs width"]] = []
        back, laid_out = torch.empty(sum(lengths), dtype=torch.long), 0
        for bucket in bucket_lengths(lengths):
            of_bucket = torch.cat([tokens[i] for i in bucket])
            width = padded(lengths[bucket[0]]) if mode == "exact" else lengths[bucket[0]]
            rows, valid = pad_rows([lengths[i] for i in bucket], of_bucket, width)
            back[of_bucket] = laid_out + valid.flatten().nonzero().squeeze(1)
            laid_out += rows.numel()
            self.rows.append((rows if shared is None else shared.place[rows]).to(device))
        self.back: Int[Tensor, " tokens"] = (back if shared is None else back[shared.first]).to(device)

    def __call__(
        self,
        layer: int,
        q: Float[Tensor, "tokens heads dim"],
        k: Float[Tensor, "tokens kv_heads dim"],
        v: Float[Tensor, "tokens kv_heads dim"],
    ) -> Float[Tensor, "tokens heads dim"]:
        if self.mode == "flash":
            return flash_attention(q, k, v, self.ends, self.longest)
        attend = exact_causal_attention if self.mode == "exact" else sdpa_causal_attention
        outs = [attend(*(take(x, rows) for x in (q, k, v))).flatten(0, 1) for rows in self.rows]
        return take(torch.cat(outs) if len(outs) > 1 else outs[0], self.back)


class RoundedAttention:
    """Attention to keys and values as a cache in a narrower format keeps them."""

    def __init__(self, attend: Attend, dtype: torch.dtype) -> None:
        self.attend, self.dtype = attend, dtype

    def __call__(
        self,
        layer: int,
        q: Float[Tensor, "tokens heads dim"],
        k: Float[Tensor, "tokens kv_heads dim"],
        v: Float[Tensor, "tokens kv_heads dim"],
    ) -> Float[Tensor, "tokens heads dim"]:
        return self.attend(layer, q, k.to(self.dtype).to(k.dtype), v.to(self.dtype).to(v.dtype))


def take(x: Float[Tensor, "tokens heads dim"], rows: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows heads dim"]:
    """x[rows]; on a CPU by the faster way, which on a GPU would add up gradients in any order."""
    if x.device.type != "cpu":
        return x[rows]
    return x.index_select(0, rows.flatten()).view(*rows.shape, *x.shape[1:])


def exact_causal_attention(
    q: Float[Tensor, "seqs width heads dim"],
    k: Float[Tensor, "seqs width kv_heads dim"],
    v: Float[Tensor, "seqs width kv_heads dim"],
) -> Float[Tensor, "seqs width heads dim"]:
    """`masked_attention` of every query to the keys up to its own, queries taken in blocks that skip later keys."""
    if torch.is_grad_enabled() and q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64):
        out: Tensor = ExactCausal.apply(q, k, v)  # type: ignore[no-untyped-call]
        return out
    outs = [
        unfold_groups(masked_attention(queries, keys, values, mask), end - start)
        for start, end, queries, keys, values, mask in query_blocks(q, k, v)
    ]
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)


def query_blocks(q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[int, int, Tensor, Tensor, Tensor, Tensor]]:
    """Start and end of every block of queries, these folded, the keys and values they may see, and the causal mask."""
    width, kv_heads = q.shape[1], k.shape[2]
    keys, values = k.transpose(1, 2), v.transpose(1, 2)
    place = torch.arange(width, device=q.device)
    for start in range(0, width, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, width)
        mask = place[:end] <= place[start:end, None].repeat_interleave(q.shape[2] // kv_heads, dim=0)
        yield start, end, fold_groups(q[:, start:end], kv_heads), keys[:, :, :end], values[:, :, :end], mask


class ExactCausal(torch.autograd.Function):
    """Exact causal attention on a CPU whose gradient the fused kernel computes, without kept weights and future.

    The kernel recomputes the weights from the log of each row's sum, exp(score) / weight of any visible key.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `exact_causal_attention`."""
        seqs, _, heads, _ = q.shape
        kv_heads = k.shape[2]
        outs, log_sums = [], []
        for start, end, queries, keys, values, mask in query_blocks(q, k, v):
            scores = masked_scores(queries, keys, mask)
            weights = softmax(scores)
            largest, where = weights.max(dim=-1, keepdim=True)
            log_sum = (scores.gather(-1, where) - largest.log()).view(seqs, kv_heads, end - start, -1)
            outs.append(unfold_groups(weighted_values(weights, values), end - start))
            log_sums.append(log_sum.transpose(2, 3).reshape(seqs, heads, end - start))
        out = torch.cat(outs, dim=1)
        ctx.save_for_backward(q, k, v, out, torch.cat(log_sums, dim=2))
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, ...]:
        """The gradients of q, k and v."""
        q, k, v, out, log_sum = ctx.saved_tensors
        grad, q, k, v, out = (x.transpose(1, 2) for x in (grad_outputs[0], q, k, v, out))
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return tuple(g.transpose(1, 2) for g in kernel(grad, q, k, v, out, log_sum, 0.0, True))


def sdpa_causal_attention(
    q: Float[Tensor, "seqs width heads dim"],
    k: Float[Tensor, "seqs width kv_heads dim"],
    v: Float[Tensor, "seqs width kv_heads dim"],
) -> Float[Tensor, "seqs width heads dim"]:
    """The same by torch's fused kernel."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


def flash_attention(
    q: Float[Tensor, "tokens heads dim"],
    k: Float[Tensor, "tokens kv_heads dim"],
    v: Float[Tensor, "tokens kv_heads dim"],
    ends: Int[Tensor, " seqs_and_one"],
    longest: int,
) -> Float[Tensor, "tokens heads dim"]:
    """The same over the flat pack, without padding, by torch's FlashAttention: half-precision on a GPU."""
    from torch.nn.attention.varlen import varlen_attn

    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    out = varlen_attn(q, k, v, ends, ends, longest, longest, window_size=(-1, 0))
    assert isinstance(out, Tensor)
    return out


def has_flash(device: torch.device) -> bool:
    """Whether `flash_attention` works on this device in bfloat16: tried on a small pack beside the fused kernel."""
    if device.type != "cuda":
        return False
    lengths = [5, 40, 1]
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = torch.randn(3, sum(lengths), 2, 64, generator=generator, device=device, dtype=torch.bfloat16)
    try:
        found = PackedAttention(lengths, device, "flash")(0, q, k, v)
    except (ImportError, RuntimeError, TypeError, NotImplementedError):  # an older torch, or a GPU it does not know
        return False
    expected = PackedAttention(lengths, device, "sdpa")(0, q, k, v)
    return bool((found - expected).abs().max() < 0.03)
