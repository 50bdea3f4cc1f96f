"""KV cache: memory for the keys and values of sequences, in blocks of `BLOCK` positions that grow with them.

Block j stores positions `j * BLOCK ...`, in one page for each sequence that reaches them. A block manager decides which
page a sequence has (`block_manager.py`), and block tables (`AttentionMetadata`) hold the page of each block and row. A
page contains garbage beyond its sequence's length, which has no effect: masked keys have weight exactly 0.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from prime_rl.trainer.models.decoder_config import DecoderConfig
from rollouts.kernels.huge_pages import map_memory
from rollouts.training.numerics import KEY_BLOCK

BLOCK = KEY_BLOCK
FIRST_PAGES = 16
GROWTH = (2, 1.5, 1.25, 1.125)
"""A block grows to so many times its needs, the first of which fits into `max_tokens`, or else to its needs."""


TokenRows = list[tuple[int, Tensor | None, Tensor]]
"""Blocks, the tokens that are stored in each (None for all), and the rows of their heads in it."""


class KVCache:
    """`blocks[j]` is `[2, layers, pages, kv_heads, BLOCK, head_dim]`: keys, then values.

    All blocks together hold at most `max_tokens` positions, unless more are required.
    """

    def __init__(
        self, config: DecoderConfig, dtype: torch.dtype, device: torch.device, max_slots: int, max_tokens: int
    ) -> None:
        self.max_slots, self.max_tokens = max_slots, max_tokens
        self.generation = 0
        """Incremented whenever memory is reallocated."""
        self.has_whole_pages = device.type != "cpu"
        """Whether a page takes memory for all of its positions, not only for those in use (`zeros`)."""
        self.blocks: list[Tensor] = []
        self._addresses: Tensor | None = None
        self._rows: list[list[tuple[Tensor, Tensor]]] = []  # views: of every block and layer, keys and values as rows
        self._dtype, self._device = dtype, device
        self._layers, self._heads, self._dim = config.num_hidden_layers, config.num_key_value_heads, config.head_dim

    @property
    def num_pages(self) -> list[int]:
        """Number of pages of every block."""
        return [block.shape[2] for block in self.blocks]

    def reserve(self, need: list[int], longest: int, required: bool = False) -> bool:
        """Allocate `need[j]` pages of each block, if the longest sequence has `longest` positions.

        False without changes if `max_tokens` is exceeded, unless they are `required`. If memory is short, pages beyond
        `need` are freed.
        """
        have = self.num_pages
        if len(need) <= len(have) and all(n <= h for n, h in zip(need, have, strict=False)):
            return True
        if sum(need) * BLOCK > self.max_tokens and not required:
            return False
        have += [0] * (len(need) - len(have))
        targets = [self._grown(need, have, factor) + have[len(need) :] for factor in GROWTH]
        fitting = (target for target in targets if sum(target) * BLOCK <= self.max_tokens)
        self._resize(next(fitting, need), need, longest)
        return True

    def _grown(self, need: list[int], have: list[int], factor: float) -> list[int]:
        """The pages of the blocks in `need`, where one that must grow gets `factor` times what it needs."""
        room = [max(n, min(int(factor * n), self.max_slots), FIRST_PAGES) for n in need]
        return [h if n <= h else r for n, h, r in zip(need, have, room)]  # noqa: B905

    def read(self, page: int, length: int) -> Tensor:
        """A copy of the first `length` positions in this page of every block, `[2, layers, kv_heads, length, dim]`."""
        parts = [
            block[:, :, page, :, : min(length - j * BLOCK, BLOCK)]
            for j, block in enumerate(self.blocks[: num_blocks(length)])
        ]
        return parts[0].clone() if len(parts) == 1 else torch.cat(parts, dim=3)

    def write(self, page: int, kept: Tensor, length: int) -> None:
        """Restore the first `length` positions returned by `read`."""
        for j, block in enumerate(self.blocks[: num_blocks(length)]):
            width = min(length - j * BLOCK, BLOCK)
            block[:, :, page, :, :width] = kept[:, :, :, j * BLOCK : j * BLOCK + width]

    def copy_page(self, block: int, source: int, target: int, width: int) -> None:
        """Copy the first `width` positions of a page."""
        memory = self.blocks[block]
        memory[:, :, target, :, :width] = memory[:, :, source, :, :width]

    def clear_page(self, block: int, page: int, start: int = 0) -> None:
        """Zero a page from a position on: a mask would not hide non-finite values from its next sequence."""
        self.blocks[block][:, :, page, :, start:] = 0

    def addresses(self) -> Int[Tensor, "layers 2 blocks"]:
        """Addresses of the keys and values of every layer and block; valid for this `generation`."""
        if self._addresses is None:
            table = [[[c[half, i].data_ptr() for c in self.blocks] for half in (0, 1)] for i in range(self._layers)]
            self._addresses = torch.tensor(table, dtype=torch.int64)
        return self._addresses

    def locate(
        self, pages: NDArray[np.integer], positions: NDArray[np.int64], written: NDArray[np.bool_] | None = None
    ) -> TokenRows:
        """Where the keys and values of tokens are stored, at these positions and in these pages of their blocks.

        Tokens that are not `written` (default: all are) are left out.
        """
        pages = pages.astype(np.int64)
        rows = (pages[:, None] * self._heads + np.arange(self._heads)) * BLOCK + (positions % BLOCK)[:, None]
        blocks, found = positions // BLOCK, []
        if written is not None:
            blocks = np.where(written, blocks, -1)
        for j in sorted(set(blocks.tolist()) - {-1}):
            here = blocks == j
            tokens = None if here.all() else torch.from_numpy(here.nonzero()[0]).to(self._device)
            found.append((j, tokens, torch.from_numpy(rows[here].reshape(-1)).to(self._device)))
        return found

    def store(
        self,
        layer: int,
        places: TokenRows,
        k: Float[Tensor, "tokens kv_heads dim"],
        v: Float[Tensor, "tokens kv_heads dim"],
    ) -> None:
        """Write the keys and values of tokens, which `locate` has placed."""
        if k.dtype != self._dtype:
            k, v = k.to(self._dtype), v.to(self._dtype)
        for j, tokens, rows in places:
            keys, values = self._rows[j][layer]
            new_k, new_v = (k, v) if tokens is None else (k[tokens], v[tokens])
            keys.index_copy_(0, rows, new_k.reshape(-1, self._dim))
            values.index_copy_(0, rows, new_v.reshape(-1, self._dim))

    def store_all(self, places: TokenRows, new: Float[Tensor, "2 layers tokens kv_heads dim"]) -> None:
        """Write the keys and values of tokens in every layer."""
        for j, tokens, rows in places:
            chosen = new if tokens is None else new[:, :, tokens]
            self.blocks[j].flatten(2, 4).index_copy_(2, rows, chosen.flatten(2, 3))

    def _resize(self, target: list[int], used: list[int], longest: int) -> None:
        """Replace the blocks one after the other, the smaller ones first, so that old and new ones do not add up."""
        self._rows.clear()
        self.blocks += [self._allocate(j, 0) for j in range(len(self.blocks), len(target))]
        growth = [pages - block.shape[2] for pages, block in zip(target, self.blocks, strict=False)]
        for j in sorted((j for j, more in enumerate(growth) if more), key=growth.__getitem__):
            kept = min(target[j], self.blocks[j].shape[2], used[j] if j < len(used) else 0)
            width = min(longest - j * BLOCK, BLOCK)  # further positions are unused: leave their pages untouched
            self._replace(j, target[j], kept, width)
        del self.blocks[len(target) :]
        while self.blocks and self.blocks[-1].shape[2] == 0:
            self.blocks.pop()
        self._rows = [
            [(c[0, i].view(-1, self._dim), c[1, i].view(-1, self._dim)) for i in range(self._layers)]
            for c in self.blocks
        ]
        self._addresses = None
        self.generation += 1

    def _replace(self, j: int, pages: int, kept: int, width: int) -> None:
        """Give block j another number of pages, of which the first `width` positions of `kept` pages are copied."""
        held = self.blocks[j][:, :, :kept, :, :width]
        try:
            new = self._allocate(j, pages)
        except torch.OutOfMemoryError:  # of a GPU, where old and new pages do not fit together
            held = held.cpu()
            self.blocks[j] = self._allocate(j, 0)
            new = self._allocate(j, pages)
        if kept and width > 0:
            new[:, :, :kept, :, :width] = held
        self.blocks[j] = new

    def _allocate(self, j: int, pages: int) -> Tensor:
        shape = (2, self._layers, pages, self._heads, BLOCK, self._dim)
        # Zeros, not empty memory: 0 * NaN would not be 0. Short sequences do not fill the first block; sequences with
        # further blocks are long, and mostly fill them.
        return zeros(shape, self._dtype, self._device, huge_pages=j > 0)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, huge_pages: bool = True) -> Tensor:
    """`torch.zeros`; on a CPU with lazily zeroed pages, which take memory when they are first written.

    Writing zeros to a new block would block the engine: half a second for 256 MB. Huge pages are read faster; small
    ones take memory only for the positions in use.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    return map_memory(size, huge_pages).view(dtype).view(shape)


def num_blocks(length: int) -> int:
    """Number of blocks for `length` positions."""
    return -(-length // BLOCK)


def count_slots(lengths: NDArray[np.int64]) -> list[int]:
    """Number of rows per block: one more than the last row that reaches it."""
    blocks = -(-lengths // BLOCK)
    return [int(np.flatnonzero(blocks > j)[-1]) + 1 for j in range(int(blocks.max(initial=0)))]
