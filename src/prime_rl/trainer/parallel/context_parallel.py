"""Context parallelism: ranks split the tokens of a pack and communicate in attention only.

    ulysses   all-to-all between token shards and head shards, before and after attention       (2309.14509)
    ring      keys and values rotate over the ranks; partial results are merged by log-sum-exp  (2310.01889)

Sequences may span ranks arbitrarily.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prime_rl.trainer.models.attention import QUERY_BLOCK, AttentionBackend, PackedAttention
from prime_rl.trainer.models.decoder_config import AttentionMode, DecoderConfig
from prime_rl.trainer.parallel.collectives import all_gather_rows, all_to_all_rows
from prime_rl.trainer.parallel_dims import MeshAxisGroup
from rollouts.training.batching import MicroBatch, TensorBatch
from rollouts.training.numerics import MIN_TOKENS, round_up

Style = Literal["ulysses", "ring"]


def check_heads(config: DecoderConfig, cp: int, tp: int, style: Style) -> None:
    """`ValueError` when cp does not divide the attention heads."""
    heads = config.num_attention_heads // tp
    if style == "ulysses" and heads % cp:
        raise ValueError(f"parallel.cp {cp} does not divide {heads} attention heads: set parallel.cp_style = ring")


def count_slots(micro: MicroBatch, axis: MeshAxisGroup, style: Style) -> int:
    """Padded number of tokens: a multiple of the ranks' chunks, and at least MIN_TOKENS per rank."""
    unit = axis.size * (2 if style == "ring" else 1)
    return max(round_up(len(micro.input_ids), unit), MIN_TOKENS * axis.size)


class ContextShare:
    """Token shards of a pack, their attention, and the gather into pack order."""

    def __init__(self, batch: TensorBatch, axis: MeshAxisGroup, style: Style) -> None:
        self.batch, self.axis, self.style = batch, axis, style
        self.indices = [find_token_indices(len(batch.input_ids), rank, axis.size, style) for rank in range(axis.size)]
        self.indices = [indices.to(batch.input_ids.device) for indices in self.indices]

    @property
    def local_indices(self) -> Int[Tensor, " local"]:
        """Indices in the pack of this rank's tokens."""
        return self.indices[self.axis.rank]

    def attend(self, mode: AttentionMode) -> AttentionBackend:
        """Causal attention within each sequence over the tokens of all ranks."""
        if self.style == "ring":
            return RingAttention(self)
        return UlyssesAttention(PackedAttention(self.batch.lengths, self.local_indices.device, mode), self.axis)

    def gather(self, values: Float[Tensor, "local ..."]) -> Float[Tensor, "num ..."]:
        """All-gather per-token values into pack order, on every rank."""
        gathered = all_gather_rows(values, self.axis.group)
        order = torch.cat(self.indices)
        inverse = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
        return gathered[inverse]


def find_token_indices(num: int, rank: int, size: int, style: Style) -> Int[Tensor, " local"]:
    """Token indices of a rank: one chunk, or for the ring an early and a late chunk to balance causal attention."""
    if style == "ulysses":
        return torch.arange(num).chunk(size)[rank]
    parts = torch.arange(num).chunk(2 * size)
    return torch.cat((parts[rank], parts[2 * size - 1 - rank]))


class UlyssesAttention:
    """Ulysses attention: each rank computes `inner` for a subset of heads over all tokens."""

    def __init__(self, inner: AttentionBackend, axis: MeshAxisGroup) -> None:
        self.inner, self.axis = inner, axis

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        k, v = (repeat_heads(x, q.shape[1], self.axis.size) for x in (k, v))
        out = self.inner(layer, self._to_heads(q), self._to_heads(k), self._to_heads(v), window)
        return self._to_tokens(out)

    def _to_heads(self, x: Float[Tensor, "local heads dim"]) -> Float[Tensor, "tokens some_heads dim"]:
        return self._swap(x.unflatten(1, (self.axis.size, -1)).transpose(0, 1)).flatten(0, 1)

    def _to_tokens(self, x: Float[Tensor, "tokens some_heads dim"]) -> Float[Tensor, "local heads dim"]:
        return self._swap(x.unflatten(0, (self.axis.size, -1))).transpose(0, 1).flatten(1, 2)

    def _swap(self, x: Float[Tensor, "size local some_heads dim"]) -> Float[Tensor, "size local some_heads dim"]:
        each = [1] * self.axis.size
        return all_to_all_rows(x, each, each, self.axis.group)


def repeat_heads(
    x: Float[Tensor, "local kv_heads dim"], heads: int, size: int
) -> Float[Tensor, "local more_heads dim"]:
    """Repeat key heads the minimum number of times so that `size` ranks each get those of their query heads."""
    kv_heads = x.shape[1]
    group = heads // kv_heads
    times = next(n for n in range(1, group + 1) if group % n == 0 and kv_heads * n % size == 0)
    return x if times == 1 else x.repeat_interleave(times, dim=1)


class RingAttention:
    """Ring attention: this rank's queries attend to the keys and values of all ranks, one shard at a time."""

    def __init__(self, share: ContextShare) -> None:
        self.axis = share.axis
        self.sequence = [share.batch.sequence[indices] for indices in share.indices]
        self.positions = [share.batch.positions[indices] for indices in share.indices]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        assert window is None, "split_model rejects models with sliding windows"
        out: Tensor = _Ring.apply(self, q, k, v)  # type: ignore[no-untyped-call]
        return out

    def rotate(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Send these to the next rank and return those of the previous rank."""
        group, size = self.axis.group, self.axis.size
        received = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors)
        ops = []
        for tensor, new in zip(tensors, received, strict=True):
            after, before = (self.axis.rank + 1) % size, (self.axis.rank - 1) % size
            ops.append(dist.P2POp(dist.isend, tensor.contiguous(), group=group, group_peer=after))
            ops.append(dist.P2POp(dist.irecv, new, group=group, group_peer=before))
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return received

    def blocks(self, step: int) -> Iterator[tuple[slice, slice, Bool[Tensor, "rows keys"]]]:
        """Query slice, key slice and mask of each block, for the key shard present after `step` rotations.

        Fully masked blocks are skipped.
        """
        rank, source = self.axis.rank, (self.axis.rank - step) % self.axis.size
        num, half = len(self.sequence[rank]), -(-len(self.sequence[rank]) // 2)
        for first in range(0, num, QUERY_BLOCK):
            rows = slice(first, min(first + QUERY_BLOCK, num))
            for start in range(0, num, half):
                keys = slice(start, min(start + half, num))
                mask = self.sequence[rank][rows, None] == self.sequence[source][keys]
                mask &= self.positions[rank][rows, None] >= self.positions[source][keys]
                if mask.any():
                    yield rows, keys, mask


class _Ring(torch.autograd.Function):
    """Online softmax over key shards with a running log-sum-exp; the backward pass rotates the keys again.

    With s the scores, L the log-sum-exp of each row and p = exp(s - L):

        out = p v      d v = p^T d out      d s = p (d out v^T - sum(d out * out))
    """

    @staticmethod
    def forward(ctx: Any, ring: RingAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.ring, group = ring, q.shape[1] // k.shape[1]
        wide = torch.promote_types(q.dtype, torch.float32)
        queries = _fold(q, group).to(wide) * q.shape[-1] ** -0.5
        out = torch.zeros_like(queries)
        log_sum = queries.new_full(queries.shape[:-1], float("-inf"))
        keys, values = k, v
        for step in range(ring.axis.size):
            for rows, cols, mask in ring.blocks(step):
                scores = _scores(queries[:, :, rows], keys[cols], mask)
                before = log_sum[:, :, rows]
                after = torch.logaddexp(before, scores.logsumexp(-1))
                base = torch.where(after.isinf(), 0.0, after)[..., None]
                new = torch.einsum("kgts,skd->kgtd", (scores - base).exp(), values[cols].to(wide))
                out[:, :, rows] = out[:, :, rows] * (before[..., None] - base).exp() + new
                log_sum[:, :, rows] = after
            if step + 1 < ring.axis.size:
                keys, values = ring.rotate(keys, values)
        ctx.save_for_backward(q, k, v, out, log_sum)
        return _unfold(out).to(q.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, Tensor, Tensor]:
        q, k, v, out, log_sum = ctx.saved_tensors
        ring, group, scale = ctx.ring, q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
        queries, grad = _fold(q, group).to(out.dtype) * scale, _fold(grads[0], group).to(out.dtype)
        of_sum = (grad * out).sum(-1, keepdim=True)
        grad_q = torch.zeros_like(queries)
        keys, values, grad_k, grad_v = k, v, torch.zeros_like(k, dtype=out.dtype), torch.zeros_like(v, dtype=out.dtype)
        for step in range(ring.axis.size):
            for rows, cols, mask in ring.blocks(step):
                some = (slice(None), slice(None), rows)
                p = (_scores(queries[some], keys[cols], mask) - log_sum[some][..., None]).exp()
                grad_v[cols] += torch.einsum("kgts,kgtd->skd", p, grad[some])
                grad_s = p * (torch.einsum("kgtd,skd->kgts", grad[some], values[cols].to(out.dtype)) - of_sum[some])
                grad_q[some] += torch.einsum("kgts,skd->kgtd", grad_s, keys[cols].to(out.dtype))
                grad_k[cols] += torch.einsum("kgts,kgtd->skd", grad_s, queries[some])
            # The last rotation returns all shards to their ranks.
            keys, values, grad_k, grad_v = ring.rotate(keys, values, grad_k, grad_v)
        return None, _unfold(grad_q * scale).to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


def _scores(queries: Float[Tensor, "kv group rows dim"], keys: Tensor, mask: Tensor) -> Tensor:
    scores = torch.einsum("kgtd,skd->kgts", queries, keys.to(queries.dtype))
    return scores.masked_fill(~mask, float("-inf"))


def _fold(q: Float[Tensor, "local heads dim"], group: int) -> Float[Tensor, "kv group local dim"]:
    return q.unflatten(1, (-1, group)).permute(1, 2, 0, 3)


def _unfold(out: Float[Tensor, "kv group local dim"]) -> Float[Tensor, "local heads dim"]:
    return out.permute(2, 0, 1, 3).flatten(1, 2)
