"""Attention over the KV cache: what a forward pass reads (`AttentionMetadata`), and its backends.

`GatheredAttention` computes chunks of prompts, on a GPU `FlashPrefill`. A decode step, one token per sequence, is
computed by a `DecodeBackend`: a CUDA graph, the fused CPU kernel, or torch operations (`DecodeAttention`). All share
the trainer's masks (`causal_mask`, `add_mask`) and grouping of query heads (`fold_groups`).
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from prime_rl.inference.embedded.kv_cache import BLOCK, KVCache, TokenRows, count_slots, num_blocks
from prime_rl.trainer.models.attention import (
    add_mask,
    causal_mask,
    fold_groups,
    has_flash,
    has_kernel_bits,
    masked_attention,
    softmax,
    take,
    unfold_groups,
)
from prime_rl.trainer.models.decoder_config import DecoderConfig
from prime_rl.trainer.models.flash_attention import flash_attention
from rollouts.kernels import cpu as cpu_kernels
from rollouts.kernels.select import gpu_kernels
from rollouts.training.numerics import min_query_rows, padded


@dataclass(frozen=True)
class Chunk:
    """Tokens `start .. start + length` of a sequence."""

    start: int
    length: int


@dataclass(frozen=True)
class KVView:
    """One layer's view of one cache block: `[slots * kv_heads, width, head_dim]`, keys transposed for the product."""

    keys: Float[Tensor, "batch dim width"]
    values: Float[Tensor, "batch width dim"]


class CascadeKVView:
    """View of one block in which runs of slots with equal tokens share their keys and values (cascade attention).

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

    def take(self, block: Float[Tensor, "slots kv_heads width dim"]) -> KVView:
        """Copy the first slot of every run; its tokens are final."""
        keys, values = (t[self.firsts].flatten(0, 1) for t in block)
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


def find_runs(block_table: NDArray[np.int32]) -> list[tuple[int, int]]:
    """Maximal runs of sequences that read the same slot, from one row of `AttentionMetadata.block_tables`."""
    starts = np.flatnonzero(block_table == np.arange(len(block_table))).tolist()
    return list(zip(starts, [*starts[1:], len(block_table)], strict=True))


@dataclass(frozen=True)
class AttentionMetadata:
    """The queries of a forward pass and the cache blocks that they read.

    Row i has `lengths[i]` queries from position `starts[i]` on, of the sequence in `slots[i]`. Its block j is in page
    `block_tables[j, i]`, to which new keys and values are written, except those before `first_written[i]` (default:
    `starts[i]`), which another sequence has computed.
    """

    slots: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    block_tables: NDArray[np.int32]
    first_written: NDArray[np.int64] | None = None

    @property
    def num_keys(self) -> int:
        """Number of keys that the longest sequence reads."""
        return int((self.starts + self.lengths).max())

    @property
    def next_boundary(self) -> int:
        """The longest position when a row, all of which move by one position per step, reaches its next block."""
        return int(self.starts.max()) + BLOCK - int((self.starts % BLOCK).max())

    @property
    def num_shared_blocks(self) -> int:
        """Number of blocks that a row and the row before it read from the same page."""
        tables, reach = self.block_tables, -(-(self.starts + self.lengths) // BLOCK)
        both = np.minimum(reach[1:], reach[:-1]) > np.arange(len(tables))[:, None]
        return int(((tables[:, 1:] == tables[:, :-1]) & both).sum())


def decode_metadata(
    positions: NDArray[np.int64], shared: NDArray[np.int64], slots: NDArray[np.int64] | None = None
) -> AttentionMetadata:
    """Metadata of a token at `positions[i]` of `slots[i]` (default: i); slot s shares its first `shared[s]` blocks
    with s - 1."""
    own = np.arange(len(shared), dtype=np.int64)
    slots = own if slots is None else slots
    blocks = np.arange(num_blocks(int(positions.max()) + 1))[:, None]
    tables = np.maximum.accumulate(np.where(shared > blocks, 0, own), axis=1).astype(np.int32).take(slots, axis=1)
    return AttentionMetadata(slots, positions, np.ones_like(slots), tables)


class DecodeBackend(ABC):
    """Decode steps of one batch, one token for each of the first slots, from tokens to logits.

    Valid until a sequence reaches key `width`, more slots reach a block (`reach`, None if that does not matter), memory
    is reallocated, or the batch changes.
    """

    is_on_device = False
    """Whether a step copies nothing from the host, so that it may be started while another one is computed."""

    def __init__(self, cache: KVCache, metadata: AttentionMetadata, width: int, reach: list[int] | None) -> None:
        self.cache, self.metadata, self.width, self.reach = cache, metadata, width, reach
        self._num, self._generation = len(metadata.slots), cache.generation

    def fits(self, positions: NDArray[np.int64]) -> bool:
        """Whether the backend is still valid for these positions."""
        if self._generation != self.cache.generation or len(positions) != self._num:
            return False
        if int(positions.max()) >= self.width:
            return False
        return self.reach is None or len(self.reach) == 1 or count_slots(positions + 1) == self.reach

    @abstractmethod
    def __call__(self, tokens: Int[Tensor, " rows"], positions: NDArray[np.int64]) -> Float[Tensor, "rows vocab"]:
        """Write the keys and values of `tokens` to the cache and return next-token logits."""


class DecodeAttention:
    """Decode attention with torch operations: one new token for each of the first slots, whose pages are the slots.

    Reads the cache as views, one per block and layer, created once for several steps; `advance` before each.
    """

    def __init__(self, cache: KVCache, metadata: AttentionMetadata, heads: int, exact: bool) -> None:
        block, positions = cache.blocks[0], metadata.starts
        self.cache, self.metadata, self.device, self.dtype = cache, metadata, block.device, block.dtype
        layers, self.kv_heads, self.dim = block.shape[1], block.shape[3], block.shape[5]
        self.slots, self.num, self.group = metadata.slots, len(positions), heads // self.kv_heads
        # Exact mode repeats queries to reach the minimum number of rows.
        self.repeat = -(-min_query_rows(self.dim) // self.group) if exact else 1
        # Half precision is fast on full blocks only, single precision on partial ones as well.
        wide = metadata.num_keys
        self.width = padded(wide) if self.dtype == torch.float32 else num_blocks(wide) * BLOCK
        self.reach = count_slots(positions + 1)
        self.counts = [reach * self.kv_heads for reach in self.reach]
        self.widths = [min(self.width - j * BLOCK, BLOCK) for j in range(len(self.reach))]
        # Blocks that are still being written cannot be copied.
        done = int(positions.min()) // BLOCK
        tables = metadata.block_tables
        self.shared = [self._share(tables[j]) if j < done else None for j in range(len(self.reach))]
        self.views = [[self._view(layer, j) for j in range(len(self.reach))] for layer in range(layers)]
        at = torch.from_numpy(positions.repeat(self.kv_heads)).to(self.device)
        mask = causal_mask(at, self.width)
        self.positions = at
        self.window_masks: dict[int, Tensor] = {}
        self.mask, self.mask_of_rows = mask[:, None], mask.view(self.num, self.kv_heads, self.width)
        self.rows = torch.arange(self.num, device=self.device)
        self.places: TokenRows = []

    def _share(self, table: NDArray[np.int32]) -> CascadeKVView | None:
        """Share a block only if its runs are similar in length: padding must not cost more than sharing saves."""
        runs = find_runs(table)
        if len(runs) == self.num:
            return None
        longest = max(end - start for start, end in runs)
        return CascadeKVView(runs, self.device) if 2 * self.num >= len(runs) * longest else None

    def _view(self, layer: int, j: int) -> KVView:
        rows, width = self.reach[j], self.widths[j]
        runs = self.shared[j]
        if runs is not None:
            return runs.take(self.cache.blocks[j][:, layer])
        keys, values = self.cache.blocks[j][:, layer, :rows]
        keys, values = (t.reshape(rows * self.kv_heads, BLOCK, self.dim)[:, :width] for t in (keys, values))
        return KVView(keys.transpose(1, 2), values)

    def advance(self, positions: NDArray[np.int64], at: Int[Tensor, " rows"]) -> None:
        """Set the next step's positions, `at` on the device: unmask these keys, and find where they are written."""
        self.mask_of_rows[self.rows, :, at] = 0.0
        self.positions = at.repeat_interleave(self.kv_heads)
        self.window_masks.clear()
        self.places = self.cache.locate(self.slots, positions)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        self.cache.store(layer, self.places, k, v)
        queries = decode_queries(q, self.kv_heads)
        if self.repeat > 1:
            queries = queries.repeat(1, self.repeat, 1)
        views = self.views[layer]
        scores = self._multiply(0, queries, views[0].keys) if len(views) == 1 else self._scores(queries, views)
        weights = softmax(add_mask(scores, self._find_mask(window)))
        if weights.dtype != queries.dtype:
            weights = weights.to(queries.dtype)
        out = self._multiply(0, weights[..., : self.widths[0]] if len(views) > 1 else weights, views[0].values)
        for j in range(1, len(views)):  # block by block, in the summation order of `weighted_values`
            part = weights[: self.counts[j], :, j * BLOCK : j * BLOCK + self.widths[j]]
            product = self._multiply(j, part, views[j].values)
            if self.counts[j] == len(out):
                out = out + product
            else:
                out[: self.counts[j]] += product
        if self.repeat > 1:
            out = out[:, : self.group]
        return out.reshape(self.num, -1, self.dim)

    def _find_mask(self, window: int | None) -> Float[Tensor, "batch 1 keys"]:
        if window is None:
            return self.mask
        if window not in self.window_masks:
            self.window_masks[window] = causal_mask(self.positions, self.width, window)[:, None]
        return self.window_masks[window]

    def _scores(self, queries: Float[Tensor, "batch rows dim"], views: list[KVView]) -> Float[Tensor, "batch rows k"]:
        """Queries times keys of several blocks; 0 in blocks that a slot does not reach, which the mask hides."""
        parts = [self._multiply(j, queries[: self.counts[j]], view.keys) for j, view in enumerate(views)]
        if self.counts[-1] == len(queries):
            return torch.cat(parts, dim=-1)
        scores = queries.new_zeros((*queries.shape[:2], self.width))
        for j, part in enumerate(parts):
            scores[: len(part), :, j * BLOCK : j * BLOCK + self.widths[j]] = part
        return scores

    def _multiply(
        self, j: int, left: Float[Tensor, "batch rows inner"], right: Float[Tensor, "batch_or_runs inner last"]
    ) -> Float[Tensor, "batch rows last"]:
        """Multiply with block j, per run if sequences share it."""
        runs = self.shared[j]
        if right.dtype != left.dtype:
            right = right.to(left.dtype)
        if runs is None:
            return torch.bmm(left, right)
        gathered = runs.gather(left.unflatten(0, (-1, self.kv_heads)))
        return runs.scatter(torch.bmm(gathered, right), self.kv_heads)


def decode_queries(q: Float[Tensor, "rows heads dim"], kv_heads: int) -> Float[Tensor, "rows_x group dim"]:
    """Scaled queries of one token per sequence; those of a key head are the rows of one product (`fold_groups`)."""
    _, heads, dim = q.shape
    scaled: Tensor = q * dim**-0.5
    return scaled.view(-1, heads // kv_heads, dim)


class GatheredAttention:
    """Attention of chunks of several sequences, each to its cached past and to itself, which are gathered from pages.

    Flat tokens are the concatenated chunks; the last token is repeated up to `min_tokens`. `rounded`: queries are
    rounded to the bf16 of the cache, as in the fused decode step. The CPU kernels read and write the pages themselves.
    """

    def __init__(
        self, cache: KVCache, metadata: AttentionMetadata, heads: int, min_tokens: int, rounded: bool = False
    ) -> None:
        self.cache, self.rounded = cache, rounded
        block = cache.blocks[0]
        device, group = block.device, heads // block.shape[3]
        start, length = torch.from_numpy(metadata.starts), torch.from_numpy(metadata.lengths)
        rows = max(int(length.max()), -(-min_query_rows(block.shape[5]) // group))
        self.rows, self.width = rows, padded(metadata.num_keys)
        row = torch.arange(rows)
        valid = row < length[:, None]
        first = torch.cumsum(length, 0) - length
        repeats = max(min_tokens - int(length.sum()), 0)
        flat = valid.flatten().nonzero().squeeze(1)
        flat = torch.cat((flat, flat[-1:].expand(repeats)))
        position = start[:, None] + row
        self.flat = flat.to(device)
        positions = position.flatten()[flat]
        self.positions: Int[Tensor, " tokens"] = positions.to(device)
        self.tables = torch.from_numpy(metadata.block_tables.astype(np.int64)).to(device)
        self.pages = self.tables.int().contiguous()
        self.counts = (start + length).contiguous()
        chunk, at = (flat // rows).numpy(), positions.numpy()
        written = None if metadata.first_written is None else at >= metadata.first_written[chunk]
        places = find_places(metadata.block_tables, chunk, at)
        self._written = (places[1], at, written)
        if written is not None:
            places[0, ~written] = -1
        self.token_places = torch.from_numpy(places)
        self.layout: Int[Tensor, "chunks rows"] | None = None  # None: chunks of equal length need no gather
        if repeats or not valid.all():
            self.layout = torch.where(valid, first[:, None] + row, 0).to(device)
        self.starts = start.contiguous()
        self.row_positions = position.repeat_interleave(group, dim=1).to(device)
        self.masks: dict[int | None, Tensor] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        if can_page(q, k, v):
            return self._attend_in_pages(layer, q, k, v, window)
        self.cache.store(layer, self.places, k, v)
        past, context = (self._gather(layer, i).to(q.dtype) for i in range(2))
        laid_out = q.unflatten(0, (-1, self.rows)) if self.layout is None else take(q, self.layout)
        if window not in self.masks:
            self.masks[window] = causal_mask(self.row_positions, self.width, window)[:, None]
        queries = fold_groups(laid_out, k.shape[1])
        out = unfold_groups(masked_attention(queries, past, context, self.masks[window]), self.rows)
        return out.flatten(0, 1) if self.layout is None else take(out.flatten(0, 1), self.flat)

    @functools.cached_property
    def places(self) -> TokenRows:
        """Where torch's operations store the keys and values of tokens."""
        return self.cache.locate(*self._written)

    def _attend_in_pages(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        blocks, narrow = self.cache.addresses()[layer], self.cache.blocks[0].dtype == torch.bfloat16
        cpu_kernels.store_in_pages(k, v, blocks, self.token_places, narrow=narrow)
        laid_out = q.unflatten(0, (-1, self.rows)) if self.layout is None else take(q, self.layout)
        chunks = (self.pages, self.counts, self.starts, self.width, k.shape[1])
        out = cpu_kernels.paged_attention(
            laid_out, blocks, *chunks, narrow=narrow, window=window, rounded=self.rounded
        ).flatten(0, 1)
        return out if self.layout is None else take(out, self.flat)

    def _gather(self, layer: int, half: int) -> Float[Tensor, "chunks kv_heads width dim"]:
        parts = []
        for j in range(num_blocks(self.width)):
            block = self.cache.blocks[j][half, layer]
            width = min(self.width - j * BLOCK, BLOCK)
            # Rows beyond the end of a block do not reach it; what they read instead is masked.
            pages = self.tables[j].clamp(max=block.shape[0] - 1)
            parts.append(block[:, :, :width].index_select(0, pages))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def can_page(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the CPU kernels attend with the bits of `torch_causal_attention`, in pages of the cache."""
    return cpu_kernels.runs_here(q, k, v) and has_kernel_bits(q.shape[-1])


class FlashPrefill:
    """`GatheredAttention` with the trainer's FlashAttention, in fast mode on a GPU; `kernels` copy keys and values."""

    def __init__(self, cache: KVCache, metadata: AttentionMetadata, kernels: Any) -> None:
        self._kernels, device = kernels, cache.blocks[0].device
        starts, lengths, tables = metadata.starts, metadata.lengths, metadata.block_tables
        chunk, positions = list_positions(starts, lengths)
        places = find_places(tables, chunk, positions)
        if metadata.first_written is not None:
            places[0, positions < metadata.first_written[chunk]] = -1
        self.positions: Int[Tensor, " tokens"] = torch.from_numpy(positions).to(device)
        self._places = torch.from_numpy(places).to(device)
        self._addresses = cache.addresses().to(device)
        self._ends, self._longest = list_ends(lengths, device), int(lengths.max())
        self._keys: Int[Tensor, "3 keys"] | None = None  # None: chunks without earlier tokens
        if starts.any():
            chunk, positions = list_positions(np.zeros_like(starts), starts + lengths)
            self._keys = torch.from_numpy(find_places(tables, chunk, positions)).to(device)
            self._key_ends, self._longest_key = list_ends(starts + lengths, device), metadata.num_keys

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        addresses = self._addresses[layer]
        self._kernels.copy_pages(k, v, addresses, self._places, BLOCK, store=True)
        if self._keys is None:
            return flash_attention(q, k, v, self._ends, self._longest, window)
        shape = (self._keys.shape[1], *k.shape[1:])
        k, v = k.new_empty(shape), v.new_empty(shape)
        self._kernels.copy_pages(k, v, addresses, self._keys, BLOCK, store=False)
        return flash_attention(q, k, v, self._ends, self._longest, window, self._key_ends, self._longest_key)


def list_positions(
    starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Chunk and position of every token of the concatenated chunks."""
    chunk = np.arange(len(lengths)).repeat(lengths)
    return chunk, np.arange(len(chunk)) + (starts - lengths.cumsum() + lengths)[chunk]


def find_places(tables: NDArray[np.int32], chunk: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Block, page and position in the page of every token."""
    blocks = positions // BLOCK
    return np.stack((blocks, tables[blocks, chunk], positions % BLOCK))


def list_ends(lengths: NDArray[np.int64], device: torch.device) -> Int[Tensor, " chunks_and_one"]:
    """Where chunks begin and end when they are concatenated, as FlashAttention takes it."""
    return torch.from_numpy(np.concatenate(([0], lengths.cumsum())).astype(np.int32)).to(device)


def find_prefill_kernels(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> Any:
    """The module `rollouts.kernels.gpu`, if `FlashPrefill` supports this model, cache and device; else None."""
    if dtype != torch.bfloat16 or not has_flash(device):
        return None
    kernels, kv_heads, dim = gpu_kernels(), config.num_key_value_heads, config.head_dim
    return kernels if kernels is not None and kernels.supports_decode(kv_heads, kv_heads, dim, BLOCK) else None
