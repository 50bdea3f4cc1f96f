"""Attention over the KV cache: decode (one token per sequence) and chunked prefill."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from prime_rl.inference.embedded.kv_cache import BLOCK, KVCache, count_reaching, num_columns
from prime_rl.trainer.models.attention import (
    fold_groups,
    masked_attention,
    softmax,
    take,
    unfold_groups,
)
from rollouts.training.numerics import min_query_rows, padded


@dataclass(frozen=True)
class KVView:
    """One layer's view of one cache column: `[slots * kv_heads, width, head_dim]`, keys transposed for the product."""

    keys: Float[Tensor, "batch dim width"]
    values: Float[Tensor, "batch width dim"]


class CascadeKVView:
    """View of one column in which runs of slots with equal tokens share their keys and values (cascade attention).

    The queries of a run form the rows of one product; runs are padded to the longest with unused rows.
    """

    def __init__(self, runs: list[tuple[int, int]], device: torch.device) -> None:
        longest = max(end - start for start, end in runs)
        index = torch.tensor([[min(start + i, end - 1) for i in range(longest)] for start, end in runs])
        real = torch.tensor([[start + i < end for i in range(longest)] for start, end in runs])
        self.firsts = torch.tensor([start for start, _ in runs], device=device)
        self.index = index.flatten().to(device)
        self.real = real.flatten().nonzero().squeeze(1).to(device)
        self.runs, self.longest = len(runs), longest

    def take(self, column: Float[Tensor, "slots kv_heads width dim"]) -> KVView:
        """Copy the first slot of every run; its tokens are final."""
        keys, values = (t[self.firsts].flatten(0, 1) for t in column)
        return KVView(keys.transpose(1, 2), values)

    def gather(self, rows: Float[Tensor, "slots kv_heads rows last"]) -> Float[Tensor, "batch rows_x last"]:
        """Rearrange slot rows into run rows."""
        _, kv_heads, num, last = rows.shape
        picked = rows[self.index].view(self.runs, self.longest, kv_heads, num, last)
        return picked.transpose(1, 2).reshape(self.runs * kv_heads, self.longest * num, last)

    def scatter(self, out: Float[Tensor, "batch rows_x last"], kv_heads: int) -> Float[Tensor, "batch rows last"]:
        """Inverse of `gather`."""
        last = out.shape[-1]
        spread = out.view(self.runs, kv_heads, self.longest, -1, last).transpose(1, 2)
        return spread.flatten(0, 1)[self.real].flatten(0, 1)


def find_runs(shared: NDArray[np.int64], column: int) -> list[tuple[int, int]]:
    """Maximal runs of slots with equal tokens in a column; `shared[i]`: number of columns slot i shares with i - 1."""
    starts = np.flatnonzero(np.append(True, shared[1:] <= column)).tolist()
    return list(zip(starts, [*starts[1:], len(shared)], strict=True))


class DecodeMetadata:
    """State shared by several decode steps: the part of the cache that is read, and its mask.

    Valid until a sequence reaches the next multiple of `KEY_MULTIPLE` keys, or the batch changes. `shared` is the
    number of full columns that each slot shares with the previous slot (`find_runs`).
    """

    def __init__(
        self, cache: KVCache, positions: NDArray[np.int64], heads: int, exact: bool, shared: NDArray[np.int64]
    ) -> None:
        self.cache, self.generation = cache, cache.generation
        self.kv_heads, self.dim = cache.columns[0].shape[3], cache.columns[0].shape[5]
        self.num, self.rows_device = len(positions), cache.columns[0].device
        self.group = heads // self.kv_heads
        # Exact mode repeats queries to reach the minimum number of rows.
        self.repeat = -(-min_query_rows(self.dim) // self.group) if exact else 1
        column = cache.columns[0]
        self.dtype = column.dtype
        wide = int(positions.max()) + 1
        # Half precision is fast on full columns only, single precision on partial ones as well.
        self.width = padded(wide) if column.dtype == torch.float32 else num_columns(wide) * BLOCK
        self.reach = count_reaching(positions + 1)
        self.widths = [min(self.width - j * BLOCK, BLOCK) for j in range(len(self.reach))]
        layers = column.shape[1]
        # Columns that are still being written cannot be copied.
        done = int(positions.min()) // BLOCK
        self.shared = [self._share(shared, j) if j < done else None for j in range(len(self.reach))]
        self.views = [[self._view(layer, j) for j in range(len(self.reach))] for layer in range(layers)]
        self.writes = [
            [(c[0, i].view(-1, self.dim), c[1, i].view(-1, self.dim)) for c in cache.columns[: len(self.reach)]]
            for i in range(layers)
        ]
        places = torch.arange(self.width)
        visible = places <= torch.from_numpy(positions)[:, None]
        mask = torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))
        self.mask: Float[Tensor, "rows width"] = mask.to(column.device)
        self.rows = torch.arange(self.num, device=column.device)

    @property
    def shares(self) -> bool:
        """Whether slots read the keys of other slots."""
        return any(self.shared)

    def fits(self, positions: NDArray[np.int64]) -> bool:
        """Whether the metadata is still valid for these positions."""
        if self.generation != self.cache.generation or len(positions) != self.num:
            return False
        return int(positions.max()) < self.width and (
            len(self.reach) == 1 or count_reaching(positions + 1) == self.reach
        )

    def _share(self, shared: NDArray[np.int64], j: int) -> CascadeKVView | None:
        """Share a column only if its runs are similar in length: padding must not cost more than sharing saves."""
        if not (shared > j).any():
            return None
        runs = find_runs(shared, j)
        longest = max(end - start for start, end in runs)
        return CascadeKVView(runs, self.rows_device) if 2 * self.num >= len(runs) * longest else None

    def _view(self, layer: int, j: int) -> KVView:
        rows, width = self.reach[j], self.widths[j]
        runs = self.shared[j]
        if runs is not None:
            return runs.take(self.cache.columns[j][:, layer])
        keys, values = self.cache.columns[j][:, layer, :rows]
        keys, values = (t.reshape(rows * self.kv_heads, BLOCK, self.dim)[:, :width] for t in (keys, values))
        return KVView(keys.transpose(1, 2), values)


class DecodeAttention:
    """Decode attention: one new token for each of the first slots."""

    def __init__(self, plan: DecodeMetadata, positions: NDArray[np.int64], at: Int[Tensor, " rows"]) -> None:
        self.plan = plan
        plan.mask[plan.rows, at] = 0.0
        self.mask = plan.mask[:, None, None, :]
        kv_heads = plan.kv_heads
        flat = (plan.rows[:, None] * kv_heads + torch.arange(kv_heads, device=at.device)) * BLOCK
        flat = flat + (at % BLOCK)[:, None]
        self.places: list[tuple[int, Tensor | None, Tensor]] = []
        columns = positions // BLOCK
        for j in np.unique(columns).tolist():
            rows = np.flatnonzero(columns == j)
            chosen = None if len(rows) == plan.num else torch.from_numpy(rows).to(at.device)
            self.places.append((j, chosen, (flat if chosen is None else flat[chosen]).flatten()))

    def __call__(
        self,
        layer: int,
        q: Float[Tensor, "rows heads dim"],
        k: Float[Tensor, "rows kv_heads dim"],
        v: Float[Tensor, "rows kv_heads dim"],
    ) -> Float[Tensor, "rows heads dim"]:
        plan = self.plan
        num, kv_heads, dim = plan.num, plan.kv_heads, plan.dim
        if k.dtype != plan.dtype:
            k, v = k.to(plan.dtype), v.to(plan.dtype)
        for j, rows, index in self.places:
            keys, values = plan.writes[layer][j]
            new_k, new_v = (k, v) if rows is None else (k[rows], v[rows])
            keys.index_copy_(0, index, new_k.reshape(-1, dim))
            values.index_copy_(0, index, new_v.reshape(-1, dim))
        queries = (q * dim**-0.5).view(num * kv_heads, plan.group, dim)
        if plan.repeat > 1:
            queries = queries.repeat(1, plan.repeat, 1)
        out = self._attend(plan.views[layer], queries)
        if plan.repeat > 1:
            out = out[:, : plan.group]
        return out.reshape(num, -1, dim)

    def _attend(self, views: list[KVView], queries: Float[Tensor, "batch rows dim"]) -> Float[Tensor, "batch rows dim"]:
        plan, rows = self.plan, queries.shape[1]
        narrow = queries.dtype in (torch.bfloat16, torch.float16)  # scores are fp32 at least
        counts = [reach * plan.kv_heads for reach in plan.reach]
        parts = [self._multiply(j, queries[: counts[j]], views[j].keys) for j in range(len(views))]
        if len(parts) == 1:
            scores = parts[0]
        elif len(set(counts)) == 1:
            scores = torch.cat(parts, dim=-1)
        else:
            scores = queries.new_zeros((len(queries), rows, plan.width))
            for j, (count, part) in enumerate(zip(counts, parts, strict=True)):
                scores[:count, :, j * BLOCK : j * BLOCK + plan.widths[j]] = part
        if narrow:
            scores = scores.float()
        scores.view(plan.num, plan.kv_heads, rows, plan.width).add_(self.mask)
        weights = softmax(scores)
        if narrow:
            weights = weights.to(queries.dtype)
        out = self._multiply(0, weights[..., : plan.widths[0]] if len(views) > 1 else weights, views[0].values)
        for j in range(1, len(views)):  # block by block, in the summation order of `weighted_values`
            part = weights[: counts[j], :, j * BLOCK : j * BLOCK + plan.widths[j]]
            product = self._multiply(j, part, views[j].values)
            if counts[j] == len(out):
                out = out + product
            else:
                out[: counts[j]] += product
        return out

    def _multiply(
        self, j: int, left: Float[Tensor, "batch rows inner"], right: Float[Tensor, "batch_or_runs inner last"]
    ) -> Float[Tensor, "batch rows last"]:
        """Multiply with column j, per run if slots share it."""
        runs = self.plan.shared[j]
        if right.dtype != left.dtype:
            right = right.to(left.dtype)
        if runs is None:
            return torch.bmm(left, right)
        kv_heads = self.plan.kv_heads
        gathered = runs.gather(left.unflatten(0, (-1, kv_heads)))
        return runs.scatter(torch.bmm(gathered, right), kv_heads)


@dataclass(frozen=True)
class Chunk:
    """Tokens `start .. start + length` of the sequence in `slot`."""

    slot: int
    start: int
    length: int


class PrefillAttention:
    """Prefill attention: chunks of several sequences, each attending to its cached past and to itself.

    Flat tokens are the concatenated chunks; the last token is repeated up to `min_tokens`.
    """

    def __init__(
        self, cache: KVCache, chunks: list[Chunk], heads_per_kv: int, min_tokens: int, device: torch.device
    ) -> None:
        self.cache = cache
        length = torch.tensor([c.length for c in chunks])
        start = torch.tensor([c.start for c in chunks])
        rows = max(int(length.max()), -(-min_query_rows(cache.columns[0].shape[5]) // heads_per_kv))
        self.rows, self.width = rows, padded(int((start + length).max()))
        row = torch.arange(rows)
        valid = row < length[:, None]
        first = torch.cumsum(length, 0) - length
        repeats = max(min_tokens - int(length.sum()), 0)
        flat = _repeat_last(valid.flatten().nonzero().squeeze(1), repeats)
        position = start[:, None] + row
        self.flat = flat.to(device)
        places = position.flatten()[flat]
        self.positions: Int[Tensor, " tokens"] = places.to(device)
        self.slots = torch.tensor([c.slot for c in chunks], device=device)
        slots = torch.tensor([c.slot for c in chunks])[flat // rows]
        self.writes: list[tuple[int, Tensor | None, Tensor, Tensor]] = []
        for j in torch.unique(places // BLOCK).tolist():
            chosen = (places // BLOCK == j).nonzero().squeeze(1)
            index = None if len(chosen) == len(places) else chosen.to(device)
            self.writes.append((j, index, slots[chosen].to(device), (places[chosen] % BLOCK).to(device)))
        self.layout: Int[Tensor, "chunks rows"] | None = None  # None: chunks of equal length need no gather
        if repeats or not valid.all():
            self.layout = torch.where(valid, first[:, None] + row, 0).to(device)
        mask = torch.arange(self.width) <= position[:, :, None]
        self.mask = mask.repeat_interleave(heads_per_kv, dim=1)[:, None].to(device)

    def __call__(
        self,
        layer: int,
        q: Float[Tensor, "tokens heads dim"],
        k: Float[Tensor, "tokens kv_heads dim"],
        v: Float[Tensor, "tokens kv_heads dim"],
    ) -> Float[Tensor, "tokens heads dim"]:
        dtype = self.cache.columns[0].dtype
        for j, index, slots, places in self.writes:
            keys, values = self.cache.columns[j][:, layer]
            keys[slots, :, places] = (k if index is None else k[index]).to(dtype)
            values[slots, :, places] = (v if index is None else v[index]).to(dtype)
        past, context = (self._gather(layer, i).to(q.dtype) for i in range(2))
        laid_out = q.unflatten(0, (-1, self.rows)) if self.layout is None else take(q, self.layout)
        out = unfold_groups(masked_attention(fold_groups(laid_out, k.shape[1]), past, context, self.mask), self.rows)
        return out.flatten(0, 1) if self.layout is None else take(out.flatten(0, 1), self.flat)

    def _gather(self, layer: int, half: int) -> Float[Tensor, "chunks kv_heads width dim"]:
        parts = []
        for j in range(num_columns(self.width)):
            column = self.cache.columns[j][half, layer]
            width = min(self.width - j * BLOCK, BLOCK)
            # Slots beyond the end of a column do not reach it; what they read instead is masked.
            slots = self.slots.clamp(max=column.shape[0] - 1)
            parts.append(column[:, :, :width].index_select(0, slots))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _repeat_last(index: Int[Tensor, " n"], times: int) -> Int[Tensor, " m"]:
    return torch.cat((index, index[-1:].expand(times))) if times else index
