"""LoRA deltas y += scale B (A x) by the CPU kernel, each row with the adapter of its sequence.

Sums have the order of oneDNN (see `cpu.find_block`), so that rows get the bits of `lora_delta` of the trainer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from rollouts.kernels import cpu, native
from rollouts.training.numerics import MIN_RANK, round_up


class PackedDelta:
    """The matrices A [rank, inputs] and B [outputs, rank] of an adapter by place, all of one rank, for the kernel."""

    def __init__(self, matrices: Mapping[int, tuple[Tensor, Tensor]], scale: float, num_places: int) -> None:
        self.rank = next(iter(matrices.values()))[0].shape[0]
        rank, width = max(self.rank, MIN_RANK), round_up(self.rank, native.LANES)
        self._held: dict[int, tuple[Tensor, Tensor]] = {}
        self._addresses = (ctypes.c_void_p * (2 * num_places))()
        for place, (a, b) in matrices.items():
            down = F.pad(a.detach().t(), (0, width - self.rank)).contiguous()
            up = F.pad(b.detach().t(), (0, -b.shape[0] % native.LANES, 0, rank - self.rank)).contiguous()
            self._held[place] = (down, up)
            self._addresses[2 * place], self._addresses[2 * place + 1] = down.data_ptr(), up.data_ptr()
        self._outputs = {place: b.shape[0] for place, (_, b) in matrices.items()}
        block = cpu.find_block(rank) or rank
        self.struct = native.DeltaStruct(rank, width, block, scale, ctypes.addressof(self._addresses))

    def matrices(self, place: int) -> tuple[Tensor, Tensor]:
        """A and B of a place, as views of the packed ones."""
        down, up = self._held[place]
        return down[:, : self.rank].t(), up[: self.rank, : self._outputs[place]].t()


class DeltaBatch:
    """Which rows of a batch have which adapter."""

    def __init__(self, adapters: Sequence[PackedDelta], rows: Sequence[Sequence[int]]) -> None:
        self._adapters = list(adapters)  # keeps the memory alive: the kernel has only addresses
        self.deltas = (native.DeltaStruct * len(adapters))(*(adapter.struct for adapter in adapters))
        items = []
        for i, mine in enumerate(rows):
            for at in range(0, len(mine), native.DELTA_ROWS):
                part = mine[at : at + native.DELTA_ROWS]
                items.append([i, len(part), *part, *[0] * (native.DELTA_ROWS - len(part))])
        self.items = np.array(items, dtype=np.int64)

    @property
    def arguments(self) -> tuple[int, int, int]:
        """Adapters, rows and the number of groups of rows, for the kernels."""
        return ctypes.addressof(self.deltas), self.items.ctypes.data, len(self.items)

    def add(self, place: int, x: Float[Tensor, "rows inputs"], y: Float[Tensor, "rows outputs"]) -> None:
        """Add the deltas of a place to `y`, columns of a contiguous tensor."""
        x, inputs = x.contiguous(), x.shape[1]
        assert y.stride(1) == 1
        block = cpu.find_block(inputs) or inputs
        shape = (inputs, block, y, y.stride(0), y.shape[1], torch.get_num_threads())
        native.call("add_deltas", *self.arguments, place, x, *shape)
