"""Attention over packed variable-length sequences, batch-invariant ("exact") or fused.

Exact: the result of a token is bit-identical for any batch composition, padding and split between KV cache and current
call, see `rollouts.training.numerics`; fused attention blocks over keys and is not batch-invariant.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prime_rl.trainer.models.decoder_config import AttentionMode
from prime_rl.trainer.models.flash_attention import FLASH_HEAD, FlashPack, find_grouped_options
from rollouts.kernels import cpu as cpu_kernels
from rollouts.kernels import native
from rollouts.training.numerics import KEY_BLOCK, measuring, padded
from rollouts.training.prefix_tree import PrefixTree

QUERY_BLOCK = 256
"""Query block size of long sequences; each block attends to the keys up to its end."""

LONG_SEQUENCE = 256
"""Length from which padding costs more than a separate bucket."""


class AttentionBackend(Protocol):
    """Attention of one forward pass; implemented for packed batches and KV caches."""

    def __call__(
        self,
        layer: int,
        q: Float[Tensor, "tokens heads dim"],
        k: Float[Tensor, "tokens kv_heads dim"],
        v: Float[Tensor, "tokens kv_heads dim"],
        window: int | None = None,
    ) -> Float[Tensor, "tokens heads dim"]:
        """Attend to the last `window` tokens of the sequence, the query's own included; None for all."""


def count_positions(positions: Int[Tensor, " tokens"], attend: AttentionBackend) -> int:
    """A number above all positions: that of `attend` if it has one, because a GPU is waited for to read them."""
    if isinstance(attend, PackedAttention):
        return attend.longest
    return int(positions.max()) + 1


def masked_attention(
    q: Float[Tensor, "batch heads rows dim"],
    k: Float[Tensor, "batch heads keys dim"],
    v: Float[Tensor, "batch heads keys dim"],
    mask: Float[Tensor, "*batch heads rows keys"],
) -> Float[Tensor, "batch heads rows dim"]:
    """softmax(q k^T / sqrt(dim) + mask) v; scores and softmax in at least fp32.

    Every row needs a visible key. Masked keys have weight exactly 0, so padding does not change any bit.
    """
    weights = softmax(masked_scores(q, k, mask))
    return weighted_values(weights.to(v.dtype), v)


def softmax(scores: Float[Tensor, "*rows keys"]) -> Float[Tensor, "*rows keys"]:
    """Softmax over keys; bit-identical when padded with masked keys in multiples of the vector width."""
    if cpu_kernels.runs_here(scores) and not (torch.is_grad_enabled() and scores.requires_grad):
        return cpu_kernels.softmax_(scores.clone(memory_format=torch.contiguous_format))
    return torch.softmax(scores, dim=-1)


def masked_scores(
    q: Float[Tensor, "batch heads rows dim"],
    k: Float[Tensor, "batch heads keys dim"],
    mask: Float[Tensor, "*batch heads rows keys"],
) -> Float[Tensor, "batch heads rows keys"]:
    """q k^T / sqrt(dim) + mask in at least fp32."""
    return add_mask(torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2)), mask)


def causal_mask(
    positions: Int[Tensor, "*rows"], num_keys: int, window: int | None = None
) -> Float[Tensor, "*rows keys"]:
    """Additive mask of queries at `positions`: 0 for keys up to their own (the last `window`), else minus infinity.

    On a CPU an addition takes a tenth of the time of `masked_fill_`.
    """
    keys, ends = torch.arange(num_keys, device=positions.device), positions[..., None]
    hidden = keys > ends
    if window is not None:
        hidden |= keys <= ends - window
    return torch.zeros(hidden.shape, device=positions.device).masked_fill_(hidden, float("-inf"))


def add_mask(scores: Float[Tensor, "*rows keys"], mask: Float[Tensor, "*rows keys"]) -> Float[Tensor, "*rows keys"]:
    """scores + mask in at least fp32, in the memory of `scores` if it has that precision."""
    wide = scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores
    return wide.add_(mask)


def weighted_values(
    weights: Float[Tensor, "batch heads rows keys"], v: Float[Tensor, "batch heads keys dim"]
) -> Float[Tensor, "batch heads rows dim"]:
    """weights @ v summed over key blocks, so that trailing keys of weight 0 do not change any bit."""
    blocks = zip(weights.split(KEY_BLOCK, dim=-1), v.split(KEY_BLOCK, dim=-2), strict=True)
    return functools.reduce(torch.add, (torch.matmul(w, values) for w, values in blocks))


def fold_groups(q: Float[Tensor, "batch rows heads dim"], kv_heads: int) -> Float[Tensor, "batch kv_heads rows_x dim"]:
    """Fold the query heads of a key head into extra rows (grouped-query attention as one GEMM)."""
    batch, rows, heads, dim = q.shape
    group = heads // kv_heads
    return q.view(batch, rows, kv_heads, group, dim).permute(0, 2, 1, 3, 4).reshape(batch, kv_heads, rows * group, dim)


def unfold_groups(out: Float[Tensor, "batch kv_heads rows_x dim"], rows: int) -> Float[Tensor, "batch rows heads dim"]:
    """Inverse of `fold_groups`."""
    batch, kv_heads, folded, dim = out.shape
    group = folded // rows
    return (
        out.view(batch, kv_heads, rows, group, dim).permute(0, 2, 1, 3, 4).reshape(batch, rows, kv_heads * group, dim)
    )


def pad_sequences(
    lengths: list[int], tokens: Int[Tensor, " tokens"], width: int
) -> tuple[Int[Tensor, "seqs width"], Bool[Tensor, "seqs width"]]:
    """Convert packed `tokens` to one padded row per sequence; returns the rows and the validity mask."""
    size = torch.tensor(lengths)
    column = torch.arange(width)
    valid = column[None, :] < size[:, None]
    place = (torch.cumsum(size, 0) - size)[:, None] + column
    return torch.where(valid, tokens[torch.where(valid, place, 0)], 0), valid


def bucket_lengths(lengths: list[int]) -> list[list[int]]:
    """Group sequence indices into buckets of similar length.

    Tuned on a CPU: up to LONG_SEQUENCE keys, lengths in a bucket differ by up to 10 %, because buckets have a fixed
    cost; longer sequences are grouped by equal padded length, because the cost of padding is quadratic.
    """
    buckets: list[list[int]] = []
    widest = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        width = padded(lengths[index])
        if not buckets or width < widest * (1.0 if widest > LONG_SEQUENCE else 0.9):
            buckets.append([])
            widest = width
        buckets[-1].append(index)
    return buckets


def bucket_queries(lengths: list[int], shared: list[int]) -> list[list[int]]:
    """Group the sequences that have own tokens into buckets of similar numbers of own tokens and of all tokens."""
    own = [i for i in range(len(lengths)) if shared[i] < lengths[i]]
    groups = [[own[j] for j in group] for group in bucket_lengths([lengths[i] - shared[i] for i in own])]
    return [[group[j] for j in bucket] for group in groups for bucket in bucket_lengths([lengths[i] for i in group])]


@dataclass(frozen=True)
class QueryBucket:
    """Padded rows of sequences: nodes of their keys, and of the queries, from the positions `starts` on.

    `starts` is None if the queries are all tokens; `mask` is the additive mask of torch's fused kernel otherwise.
    """

    keys: Int[Tensor, "seqs width"]
    queries: Int[Tensor, "seqs rows"]
    starts: Int[Tensor, " seqs"] | None
    mask: Float[Tensor, "seqs one rows width"] | None = None

    def find_positions(self) -> Int[Tensor, "seqs rows"]:
        """Positions of the queries in their sequences."""
        rows = torch.arange(self.queries.shape[1])
        return rows.expand(self.queries.shape) if self.starts is None else self.starts[:, None] + rows

    def to(self, device: torch.device | str, mask_dtype: torch.dtype | None) -> QueryBucket:
        """Move to a device, with a mask of this type unless it is None."""
        if self.starts is None:
            return QueryBucket(keys := self.keys.to(device), keys, None)
        mask = None
        if mask_dtype is not None:
            mask = causal_mask(self.find_positions(), self.keys.shape[1])[:, None].to(device, mask_dtype)
        return QueryBucket(self.keys.to(device), self.queries.to(device), self.starts.to(device), mask)


def build_bucket(sequences: list[Int[Tensor, " tokens"]], num_rows: int, width: int) -> QueryBucket:
    """Bucket of the last `num_rows` tokens of every sequence as queries."""
    lengths = [len(nodes) for nodes in sequences]
    keys, _ = pad_sequences(lengths, torch.cat(sequences), width)
    if num_rows == width:
        return QueryBucket(keys, keys, None)
    starts = (torch.tensor(lengths) - num_rows).clamp(min=0)
    return QueryBucket(keys, keys.gather(1, starts[:, None] + torch.arange(num_rows)), starts)


class PackedAttention:
    """Causal attention within each sequence of a flat pack (block-diagonal).

    Sequences of similar length are computed as padded rows, so tokens cannot attend to other sequences. In exact mode
    results do not depend on the buckets. With `tree` (not for flash), inputs and outputs are its nodes: a sequence
    has its own tokens as queries and all of its tokens as keys. `dtype` is that of the queries. `rounded`: exact
    attention with queries rounded to bf16, as keys and values are already (`CausalLM.rounds_inputs`).
    """

    def __init__(
        self,
        lengths: list[int],
        device: torch.device | str = "cpu",
        mode: AttentionMode = "exact",
        tree: PrefixTree | None = None,
        dtype: torch.dtype = torch.float32,
        *,
        rounded: bool = False,
    ) -> None:
        if not lengths or min(lengths) < 1:
            raise ValueError(f"a pack needs sequences of at least one token, got lengths {lengths}")
        self.mode, self.lengths, self.rounded = mode, lengths, rounded
        self.longest = max(lengths)
        if mode == "flash":
            self.pack = FlashPack(lengths, device)
            self.padded: PackedAttention | None = None
            return
        shared = [0] * len(lengths) if tree is None else tree.shared
        nodes = (torch.arange(sum(lengths)) if tree is None else tree.node).split(lengths)
        inverse = torch.zeros(sum(lengths) if tree is None else len(tree.first), dtype=torch.long)
        self.buckets: list[QueryBucket] = []
        is_on_cpu = torch.device(device).type == "cpu"
        num_slots, width_of = 0, padded if mode == "exact" or is_on_cpu else int
        for indices in bucket_queries(lengths, shared):
            bucket = build_bucket(
                [nodes[i] for i in indices],
                num_rows=width_of(max(lengths[i] - shared[i] for i in indices)),
                width=width_of(max(lengths[i] for i in indices)),
            )
            positions = bucket.find_positions()
            own = (positions >= torch.tensor([[shared[i]] for i in indices])) & (
                positions < torch.tensor([[lengths[i]] for i in indices])
            )
            inverse[bucket.queries[own]] = num_slots + own.flatten().nonzero().squeeze(1)
            num_slots += own.numel()
            self.buckets.append(bucket.to(device, dtype if mode == "sdpa" else None))
        self.inverse: Int[Tensor, " nodes"] = inverse.to(device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        if window is not None and window >= self.longest:
            window = None
        if self.mode == "flash":
            if q.shape[-1] <= FLASH_HEAD:
                return self.pack.attend(q, k, v, window)
            self.padded = self.padded or PackedAttention(self.lengths, q.device, "sdpa", dtype=q.dtype)
            return self.padded(layer, q, k, v, window)
        outs = []
        for bucket in self.buckets:
            rows = take(q, bucket.queries), take(k, bucket.keys), take(v, bucket.keys)
            if self.mode == "exact" or is_faster_by_kernel(q):
                out = exact_causal_attention(*rows, bucket.starts, window, rounded=self.rounded)
            else:
                out = sdpa_causal_attention(*rows, bucket.starts, window, bucket.mask)
            outs.append(out.flatten(0, 1))
        return take(torch.cat(outs) if len(outs) > 1 else outs[0], self.inverse)


class RoundedAttention:
    """Attention with keys and values rounded to the data type of the KV cache."""

    def __init__(self, attend: AttentionBackend, dtype: torch.dtype) -> None:
        self.attend, self.dtype = attend, dtype

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        k, v = (_Rounding.apply(x, self.dtype) for x in (k, v))  # type: ignore[no-untyped-call]
        return self.attend(layer, q, k, v, window)


class _Rounding(torch.autograd.Function):
    """Rounding to a data type; the gradient, a sum over all queries, is not rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0], None


def take(x: Float[Tensor, "tokens heads dim"], rows: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows heads dim"]:
    """x[rows]; index_select on a CPU, which is faster but nondeterministic in the backward pass on a GPU."""
    if x.device.type != "cpu":
        return x[rows]
    return x.index_select(0, rows.flatten()).view(*rows.shape, *x.shape[1:])


def exact_causal_attention(
    q: Float[Tensor, "seqs rows heads dim"],
    k: Float[Tensor, "seqs width kv_heads dim"],
    v: Float[Tensor, "seqs width kv_heads dim"],
    starts: Int[Tensor, " seqs"] | None = None,
    window: int | None = None,
    *,
    rounded: bool = False,
) -> Float[Tensor, "seqs rows heads dim"]:
    """Causal `masked_attention` over query blocks that skip later keys; the CPU kernel has the same bits.

    Row r of sequence s is at position `starts[s] + r`, at most width - rows + r; None: at r. `rounded`: queries are
    rounded to bf16, as keys and values are already; only the kernel computes this.
    """
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        return exact_causal_attention(q.float(), k.float(), v.float(), starts, window, rounded=rounded).bfloat16()
    if torch.is_grad_enabled() and q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64):
        out: Tensor = ExactCausalAttention.apply(q, k, v, starts, window, rounded)  # type: ignore[no-untyped-call]
        return out
    if runs_kernel(q, k, v):
        return cpu_kernels.causal_attention(q, k, v, zeros_if_none(starts, len(q)), window, rounded)[0]
    assert not rounded, "see `CausalLM.round_inputs`"
    return torch_causal_attention(q, k, v, starts, window)


def is_faster_by_kernel(q: Float[Tensor, "tokens heads dim"]) -> bool:
    """Whether exact attention is faster than torch's fused kernel, too: 1.3 to 2 times in fp32, more in bf16."""
    if not q.is_cpu or q.dtype not in (torch.float32, torch.bfloat16) or torch.compiler.is_compiling():
        return False
    return native.library() is not None and has_kernel_bits(q.shape[2])


def zeros_if_none(starts: Int[Tensor, " seqs"] | None, seqs: int) -> Int[Tensor, " seqs"]:
    """`starts`, or zeros."""
    return torch.zeros(seqs, dtype=torch.long) if starts is None else starts


def torch_causal_attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, window: int | None) -> Tensor:
    """`exact_causal_attention` with torch operations."""
    outs = [
        unfold_groups(masked_attention(queries, keys, values, mask), end - start)
        for start, end, queries, keys, values, mask in query_blocks(q, k, v, starts, window)
    ]
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)


def runs_kernel(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the CPU kernel supports these tensors, `[seqs, rows, heads, dim]`, with the bits of torch's products."""
    if k.shape[1] % native.LANES or k.stride() != v.stride() or k.stride(3) != 1:
        return False
    return cpu_kernels.runs_here(q, k, v) and has_kernel_bits(q.shape[3])


@functools.cache
@measuring()
def has_kernel_bits(dim: int) -> bool:
    """Whether torch's products, which some decode steps use, have the bits of the kernel for heads of this size.

    Measured, because the order of summation depends on the CPU.
    """
    if not cpu_kernels.supports_head_dim(dim):
        return False
    draw = torch.Generator().manual_seed(dim)
    q, k, v = (torch.randn(1, 2 * KEY_BLOCK + 16, heads, dim, generator=draw) for heads in (4, 2, 2))
    actual, _ = cpu_kernels.causal_attention(q, k, v, torch.zeros(1, dtype=torch.long))
    return torch.equal(actual, torch_causal_attention(q, k, v, None, None))


def query_blocks(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, window: int | None
) -> Iterator[tuple[int, int, Tensor, Tensor, Tensor, Tensor]]:
    """Yield start, end, folded queries, visible keys and values, and the causal mask of every query block."""
    num_rows, kv_heads = q.shape[1], k.shape[2]
    keys, values = k.transpose(1, 2), v.transpose(1, 2)
    for start in range(0, num_rows, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, num_rows)
        rows = torch.arange(start, end, device=q.device).repeat_interleave(q.shape[2] // kv_heads)
        visible = k.shape[1] - num_rows + end
        mask = causal_mask(rows if starts is None else starts[:, None, None] + rows, visible, window)
        yield start, end, fold_groups(q[:, start:end], kv_heads), keys[:, :, :visible], values[:, :, :visible], mask


class ExactCausalAttention(torch.autograd.Function):
    """Exact causal attention on a CPU with the backward pass of the fused kernel, which stores no attention weights.

    The kernel recomputes the weights from the log-sum-exp of each row: score - log(weight) of any visible key.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, window: int | None, rounded: bool
    ) -> Tensor:
        """See `exact_causal_attention`."""
        seqs, _, heads, _ = q.shape
        kv_heads = k.shape[2]
        ctx.starts, ctx.window, ctx.rounded = starts, window, rounded
        if runs_kernel(q, k, v):
            out, log_sum = cpu_kernels.causal_attention(q, k, v, zeros_if_none(starts, seqs), window, rounded)
            ctx.save_for_backward(q, k, v, out, log_sum)
            return out
        assert not rounded, "see `CausalLM.round_inputs`"
        outs, log_sums = [], []
        for start, end, queries, keys, values, mask in query_blocks(q, k, v, starts, window):
            scores = masked_scores(queries, keys, mask)
            weights = softmax(scores)
            largest, argmax = weights.max(dim=-1, keepdim=True)
            log_sum = (scores.gather(-1, argmax) - largest.log()).view(seqs, kv_heads, end - start, -1)
            outs.append(unfold_groups(weighted_values(weights, values), end - start))
            log_sums.append(log_sum.transpose(2, 3).reshape(seqs, heads, end - start))
        out = torch.cat(outs, dim=1)
        ctx.save_for_backward(q, k, v, out, torch.cat(log_sums, dim=2))
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k and v."""
        q, k, v, out, log_sum = ctx.saved_tensors
        if runs_kernel(q, k, v) and cpu_kernels.runs_here(grad_outputs[0]):
            starts = zeros_if_none(ctx.starts, len(q))
            saved = (q, k, v, out, log_sum, starts, ctx.window, ctx.rounded)
            return *cpu_kernels.causal_attention_backward(grad_outputs[0], *saved), None, None, None
        grad, q, k, v, out = (x.transpose(1, 2) for x in (grad_outputs[0], q, k, v, out))
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        mask = build_mask(q, k, ctx.starts, ctx.window)
        grads = kernel(grad, q, k, v, out, log_sum, 0.0, mask is None, attn_mask=mask)
        return *(g.transpose(1, 2) for g in grads), None, None, None


def build_mask(
    q: Float[Tensor, "seqs heads rows dim"],
    k: Float[Tensor, "seqs kv_heads width dim"],
    starts: Int[Tensor, " seqs"] | None,
    window: int | None,
) -> Float[Tensor, "*seqs rows width"] | None:
    """Additive mask for torch's kernels, which need none for plain causal attention of whole sequences."""
    if starts is None and window is None:
        return None
    rows = torch.arange(q.shape[2], device=q.device)
    return causal_mask(rows if starts is None else starts[:, None, None] + rows, k.shape[2], window).to(q.dtype)


def sdpa_causal_attention(
    q: Float[Tensor, "seqs rows heads dim"],
    k: Float[Tensor, "seqs width kv_heads dim"],
    v: Float[Tensor, "seqs width kv_heads dim"],
    starts: Int[Tensor, " seqs"] | None = None,
    window: int | None = None,
    mask: Float[Tensor, "seqs one rows width"] | None = None,
) -> Float[Tensor, "seqs rows heads dim"]:
    """Causal attention with torch's fused kernel; `mask` is that of `starts` without a window, if known."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    grouped = q.shape[1] != k.shape[1]
    mask = build_mask(q, k, starts, window) if window is not None or mask is None else mask.to(q.dtype)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
    return out.transpose(1, 2)


@functools.cache
def has_flash(device: torch.device) -> bool:
    """Whether `flash_attention` works in bfloat16 on this device; compared with SDPA on a small pack.

    Call it before the first pass: other trials of attention are made here too, so that checkpointing does not see them.
    """
    if device.type != "cuda":
        return False
    lengths = [5, 40, 1]
    find_grouped_options(torch.empty(0, device=device).device)  # with its index, as tensors name it
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = torch.randn(3, sum(lengths), 2, 64, generator=generator, device=device, dtype=torch.bfloat16)
    try:
        out = PackedAttention(lengths, device, "flash")(0, q, k, v)
    except (ImportError, RuntimeError, TypeError, NotImplementedError):  # an older torch, or an unsupported GPU
        return False
    expected = PackedAttention(lengths, device, "sdpa")(0, q, k, v)
    return bool((out - expected).abs().max() < 0.03)
