"""Context parallelism: ranks share the tokens of a pack, and meet where tokens see each other, which is attention.

    ulysses   all-to-all: from some tokens of all heads to all tokens of some heads, and back      (2309.14509)
    ring      keys and values go round; every rank adds up what its queries see of each part       (2310.01889)

Everything else treats tokens one by one. Sequences of a pack may lie across ranks in any way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prime_rl.trainer.collectives import exchange_rows, join_rows
from prime_rl.trainer.models.attention import QUERY_BLOCK, Attend, AttentionMode, PackedAttention
from prime_rl.trainer.models.causal_lm import DecoderConfig
from prime_rl.trainer.parallel_dims import Team
from rollouts.training.batching import MIN_TOKENS, MicroBatch, TensorBatch

Style = Literal["ulysses", "ring"]


def check_heads(config: DecoderConfig, cp: int, tp: int, style: Style) -> None:
    """`ValueError` when the heads of this model cannot be dealt out evenly."""
    heads = config.num_attention_heads // tp
    if style == "ulysses" and heads % cp:
        raise ValueError(f"parallel.cp {cp} does not divide {heads} attention heads: set parallel.cp_style = ring")


def count_slots(micro: MicroBatch, team: Team, style: Style) -> int:
    """Tokens to fill a pack up to, so that every rank has as many, and not too few for its products."""
    unit = team.size * (2 if style == "ring" else 1)
    return max(-(-len(micro.input_ids) // unit) * unit, MIN_TOKENS * team.size)


class ContextShare:
    """This rank's tokens of a pack, how they see those of others, and the way back to the order of the pack."""

    def __init__(self, batch: TensorBatch, team: Team, style: Style) -> None:
        self.batch, self.team, self.style = batch, team, style
        self.places = [find_tokens(len(batch.input_ids), rank, team.size, style) for rank in range(team.size)]
        self.places = [place.to(batch.input_ids.device) for place in self.places]

    @property
    def own(self) -> Int[Tensor, " own"]:
        """Places in the pack of the tokens that this rank computes."""
        return self.places[self.team.rank]

    def attend(self, mode: AttentionMode) -> Attend:
        """Causal attention inside each sequence, over the tokens of all ranks."""
        if self.style == "ring":
            return RingAttention(self)
        return UlyssesAttention(PackedAttention(self.batch.lengths, self.own.device, mode), self.team)

    def join(self, values: Float[Tensor, "own ..."]) -> Float[Tensor, "num ..."]:
        """What ranks have for each of their tokens, in the order of the pack, on all of them."""
        joined = join_rows(values, self.team.group)
        order = torch.cat(self.places)
        back = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
        return joined[back]


def find_tokens(num: int, rank: int, size: int, style: Style) -> Int[Tensor, " own"]:
    """The tokens of a rank: one stretch; for the ring two, an early and a late one, which see as much as any two."""
    if style == "ulysses":
        return torch.arange(num).chunk(size)[rank]
    parts = torch.arange(num).chunk(2 * size)
    return torch.cat((parts[rank], parts[2 * size - 1 - rank]))


class UlyssesAttention:
    """Attention of `inner`, each rank for some heads of all tokens."""

    def __init__(self, inner: Attend, team: Team) -> None:
        self.inner, self.team = inner, team

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (repeat_heads(x, q.shape[1], self.team.size) for x in (k, v))
        out = self.inner(layer, *(self._to_heads(x) for x in (q, k, v)))
        return self._to_tokens(out)

    def _to_heads(self, x: Float[Tensor, "own heads dim"]) -> Float[Tensor, "tokens some_heads dim"]:
        return self._swap(x.unflatten(1, (self.team.size, -1)).transpose(0, 1)).flatten(0, 1)

    def _to_tokens(self, x: Float[Tensor, "tokens some_heads dim"]) -> Float[Tensor, "own heads dim"]:
        return self._swap(x.unflatten(0, (self.team.size, -1))).transpose(0, 1).flatten(1, 2)

    def _swap(self, x: Float[Tensor, "size own some_heads dim"]) -> Float[Tensor, "size own some_heads dim"]:
        each = [1] * self.team.size
        return exchange_rows(x, each, each, self.team.group)


def repeat_heads(x: Float[Tensor, "own kv_heads dim"], heads: int, size: int) -> Float[Tensor, "own more_heads dim"]:
    """Key heads repeated as few times as lets `size` ranks each have those that their query heads look at."""
    kv_heads = x.shape[1]
    group = heads // kv_heads
    times = next(n for n in range(1, group + 1) if group % n == 0 and kv_heads * n % size == 0)
    return x if times == 1 else x.repeat_interleave(times, dim=1)


class RingAttention:
    """Attention of this rank's queries to the keys and values of all ranks, which come by one after another."""

    def __init__(self, share: ContextShare) -> None:
        self.team = share.team
        self.sequence = [share.batch.sequence[place] for place in share.places]
        self.positions = [share.batch.positions[place] for place in share.places]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = _Ring.apply(self, q, k, v)  # type: ignore[no-untyped-call]
        return out

    def turn(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Pass these on to the next rank, and take what the rank before passes on."""
        group, size = self.team.group, self.team.size
        come = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors)
        ops = []
        for gone, new in zip(tensors, come, strict=True):
            after, before = (self.team.rank + 1) % size, (self.team.rank - 1) % size
            ops.append(dist.P2POp(dist.isend, gone.contiguous(), group=group, group_peer=after))
            ops.append(dist.P2POp(dist.irecv, new, group=group, group_peer=before))
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return come

    def blocks(self, step: int) -> Iterator[tuple[slice, slice, Bool[Tensor, "rows keys"]]]:
        """Queries, keys and what they see of each other, of the part that is here after `step` turns, block by block.

        Blocks where no query sees a key are left out, so nothing is computed for the future or for other sequences.
        """
        mine, theirs = self.team.rank, (self.team.rank - step) % self.team.size
        num, half = len(self.sequence[mine]), -(-len(self.sequence[mine]) // 2)
        for first in range(0, num, QUERY_BLOCK):
            rows = slice(first, min(first + QUERY_BLOCK, num))
            for start in range(0, num, half):
                keys = slice(start, min(start + half, num))
                sees = self.sequence[mine][rows, None] == self.sequence[theirs][keys]
                sees &= self.positions[mine][rows, None] >= self.positions[theirs][keys]
                if sees.any():
                    yield rows, keys, sees


class _Ring(torch.autograd.Function):
    """Softmax over keys that come in parts, by the log of the sum so far; backwards the keys go round once more.

    With s the scores, L the log of each row's sum of exp(s) and p = exp(s - L):

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
        for step in range(ring.team.size):
            for rows, cols, sees in ring.blocks(step):
                scores = _scores(queries[:, :, rows], keys[cols], sees)
                before = log_sum[:, :, rows]
                after = torch.logaddexp(before, scores.logsumexp(-1))
                base = torch.where(after.isinf(), 0.0, after)[..., None]
                new = torch.einsum("kgts,skd->kgtd", (scores - base).exp(), values[cols].to(wide))
                out[:, :, rows] = out[:, :, rows] * (before[..., None] - base).exp() + new
                log_sum[:, :, rows] = after
            if step + 1 < ring.team.size:
                keys, values = ring.turn(keys, values)
        ctx.save_for_backward(q, k, v, out, log_sum)
        return _unfold(out).to(q.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, Tensor, Tensor]:
        q, k, v, out, log_sum = ctx.saved_tensors
        ring, group, scale = ctx.ring, q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
        queries, grad = _fold(q, group).to(out.dtype) * scale, _fold(grads[0], group).to(out.dtype)
        of_sum = (grad * out).sum(-1, keepdim=True)
        to_q = torch.zeros_like(queries)
        keys, values, to_k, to_v = k, v, torch.zeros_like(k, dtype=out.dtype), torch.zeros_like(v, dtype=out.dtype)
        for step in range(ring.team.size):
            for rows, cols, sees in ring.blocks(step):
                some = (slice(None), slice(None), rows)
                p = (_scores(queries[some], keys[cols], sees) - log_sum[some][..., None]).exp()
                to_v[cols] += torch.einsum("kgts,kgtd->skd", p, grad[some])
                to_s = p * (torch.einsum("kgtd,skd->kgts", grad[some], values[cols].to(out.dtype)) - of_sum[some])
                to_q[some] += torch.einsum("kgts,skd->kgtd", to_s, keys[cols].to(out.dtype))
                to_k[cols] += torch.einsum("kgts,kgtd->skd", to_s, queries[some])
            keys, values, to_k, to_v = ring.turn(keys, values, to_k, to_v)  # after as many turns all are home
        return None, _unfold(to_q * scale).to(q.dtype), to_k.to(k.dtype), to_v.to(v.dtype)


def _scores(queries: Float[Tensor, "kv group rows dim"], keys: Tensor, sees: Tensor) -> Tensor:
    scores = torch.einsum("kgtd,skd->kgts", queries, keys.to(queries.dtype))
    return scores.masked_fill(~sees, float("-inf"))


def _fold(q: Float[Tensor, "own heads dim"], group: int) -> Float[Tensor, "kv group own dim"]:
    return q.unflatten(1, (-1, group)).permute(1, 2, 0, 3)


def _unfold(out: Float[Tensor, "kv group own dim"]) -> Float[Tensor, "own heads dim"]:
    return out.permute(2, 0, 1, 3).flatten(1, 2)
