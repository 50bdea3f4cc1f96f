"""Keys and values of the running sequences, and how new tokens attend to them.

Sequence i owns slot i and the slots in use are the first ones, so that a decode step reads a view of the cache and
copies nothing. A slot holds garbage beyond its sequence's length; masked keys weigh exactly 0, so it does not show.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prime_rl.trainer.models.attention import MIN_ROWS, fold_groups, masked_attention, padded, unfold_groups
from prime_rl.trainer.models.causal_lm import DecoderConfig

FIRST_WIDTH = 128
FIRST_SLOTS = 16


def min_tokens() -> int:
    """Fewest tokens of an exact forward pass: threads share a matrix product, and each needs its `MIN_ROWS`.

    Measured with MKL: on one thread every count from 4 on gives the same bits, on two or more every count from 12 on.
    """
    return MIN_ROWS if torch.get_num_threads() == 1 else 4 * MIN_ROWS


class KVCache:
    """`keys[layer]` and `values[layer]` are `[slots, kv_heads, width, head_dim]`; both sizes grow when needed."""

    def __init__(
        self, config: DecoderConfig, dtype: torch.dtype, device: torch.device, max_slots: int, max_len: int
    ) -> None:
        self.max_slots = max(max_slots, FIRST_SLOTS)
        self.max_width = padded(max_len)
        width = min(FIRST_WIDTH, self.max_width)
        shape = (config.num_hidden_layers, FIRST_SLOTS, config.num_key_value_heads, width, config.head_dim)
        # Zeros, not empty memory: 0 * NaN would not be 0.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def reserve(self, slots: int, width: int) -> None:
        """Make room for `slots` sequences of `width` tokens, at least doubling what is too small."""
        have_slots, have_width = self.keys.shape[1], self.keys.shape[3]
        if slots <= have_slots and width <= have_width:
            return
        new_slots = min(max(slots, 2 * have_slots), self.max_slots) if slots > have_slots else have_slots
        new_width = min(padded(max(width, 2 * have_width)), self.max_width) if width > have_width else have_width
        self.keys = _grown(self.keys, new_slots, new_width)
        self.values = _grown(self.values, new_slots, new_width)

    def copy_slot(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another."""
        for tensor in (self.keys, self.values):
            tensor[:, target, :, :length] = tensor[:, source, :, :length]

    def clear_slot(self, slot: int) -> None:
        """Wipe a slot whose numbers were not finite, which a mask would not hide from the next owner."""
        for tensor in (self.keys, self.values):
            tensor[:, slot] = 0


def _grown(tensor: Tensor, slots: int, width: int) -> Tensor:
    layers, old_slots, heads, old_width, dim = tensor.shape
    out = tensor.new_zeros((layers, slots, heads, width, dim))
    out[:, :old_slots, :, :old_width] = tensor
    return out


class DecodeAttention:
    """One new token for each of the first slots."""

    def __init__(self, cache: KVCache, positions: Int[Tensor, " slots"], width: int) -> None:
        device = positions.device
        self.cache, self.positions, self.width = cache, positions, width
        self.slots = torch.arange(positions.shape[0], device=device)
        column = torch.arange(width, device=device)
        self.mask: Bool[Tensor, "slots 1 1 width"] = column <= positions[:, None, None, None]

    def __call__(
        self,
        layer: int,
        q: Float[Tensor, "slots heads dim"],
        k: Float[Tensor, "slots kv_heads dim"],
        v: Float[Tensor, "slots kv_heads dim"],
    ) -> Float[Tensor, "slots heads dim"]:
        num, heads, dim = q.shape
        kv_heads = k.shape[1]
        group = heads // kv_heads
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.slots, :, self.positions] = k
        values[self.slots, :, self.positions] = v
        queries = q.view(num, kv_heads, group, dim)
        if group < MIN_ROWS:  # the same query again; only the number of rows matters
            queries = queries.repeat(1, 1, -(-MIN_ROWS // group), 1)
        out = masked_attention(queries, keys[:num, :, : self.width], values[:num, :, : self.width], self.mask)
        return out[:, :, :group].reshape(num, heads, dim)


@dataclass(frozen=True)
class Chunk:
    """Tokens `start .. start + length` of the sequence in `slot`."""

    slot: int
    start: int
    length: int


class PrefillAttention:
    """Chunks of several sequences at once, each attending to its own past in the cache and to itself.

    Flat tokens are the chunks one after another; the last token is repeated until there are `min_tokens`.
    """

    def __init__(
        self, cache: KVCache, chunks: list[Chunk], heads_per_kv: int, min_tokens: int, device: torch.device
    ) -> None:
        self.cache = cache
        length = torch.tensor([c.length for c in chunks])
        start = torch.tensor([c.start for c in chunks])
        rows = max(int(length.max()), -(-MIN_ROWS // heads_per_kv))
        self.rows, self.width = rows, padded(int((start + length).max()))
        row = torch.arange(rows)
        valid: Bool[Tensor, "chunks rows"] = row < length[:, None]
        first = torch.cumsum(length, 0) - length
        repeats = max(min_tokens - int(length.sum()), 0)
        flat = _repeat_last(valid.flatten().nonzero().squeeze(1), repeats)
        position = start[:, None] + row
        self.flat = flat.to(device)
        self.positions: Int[Tensor, " tokens"] = position.flatten()[flat].to(device)
        self.slots = torch.tensor([c.slot for c in chunks], device=device)
        self.token_slots = torch.tensor([c.slot for c in chunks])[flat // rows].to(device)
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
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.token_slots, :, self.positions] = k
        values[self.token_slots, :, self.positions] = v
        queries = fold_groups(q[self.layout], k.shape[1])
        past, context = keys[self.slots, :, : self.width], values[self.slots, :, : self.width]
        out = unfold_groups(masked_attention(queries, past, context, self.mask), self.rows)
        return out.flatten(0, 1)[self.flat]


def _repeat_last(index: Int[Tensor, " n"], times: int) -> Int[Tensor, " m"]:
    return torch.cat((index, index[-1:].expand(times))) if times else index
