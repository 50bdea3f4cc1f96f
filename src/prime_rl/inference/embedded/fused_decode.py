"""A decode step as one fused CPU kernel (`rollouts/kernels/cpu.c`): embedding, layers, cache update and head.

It computes in fp32; weights and cache may be bf16, and in fast mode also the inputs of products. In fp32 its log-probs
are bitwise equal to the trainer's (verified by `find_block`): products use oneDNN's summation order, and all other
operations call the trainer's functions.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from prime_rl.inference.embedded.kv_cache import BLOCK, KVCache, count_reaching
from prime_rl.trainer.models.causal_lm import CausalLM
from rollouts.kernels import cpu as cpu_kernels
from rollouts.kernels.cpu import LANES, PackedWeight


class FusedDecodeMetadata:
    """Cache addresses of a batch; valid until a sequence reaches a new column or the batch changes."""

    def __init__(self, cache: KVCache, positions: NDArray[np.int64], shared: NDArray[np.int64]) -> None:
        self.cache, self.generation, self.num = cache, cache.generation, len(positions)
        self.reach = count_reaching(positions + 1)
        self.num_columns = len(self.reach)
        layers, slots = cache.columns[0].shape[1], np.arange(self.num)
        # Shared columns are read from the first slot of a run.
        read = [np.maximum.accumulate(np.where(shared > j, 0, slots)) for j in range(self.num_columns)]
        self.source = torch.from_numpy(np.array(read, dtype=np.int32))
        self.shares = any(bool((row != slots).any()) for row in read)
        """Whether slots read the keys of other slots."""
        used = cache.columns[: self.num_columns]
        columns = [[[c[half, i].data_ptr() for c in used] for half in (0, 1)] for i in range(layers)]
        self.columns = torch.tensor(columns, dtype=torch.int64)

    def fits(self, positions: NDArray[np.int64]) -> bool:
        """Whether the metadata is still valid for these positions."""
        if self.generation != self.cache.generation or len(positions) != self.num:
            return False
        return int(positions.max()) < self.num_columns * BLOCK and (
            self.num_columns == 1 or count_reaching(positions + 1) == self.reach
        )


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one layer for the kernel."""

    norms: tuple[Tensor, Tensor | None, Tensor]
    """Attention input norm; query and key norms `[heads + kv_heads, dim]`; feed-forward input norm."""
    products: Sequence[PackedWeight]
    """QKV, attention output, gate and up, down projections."""
    biases: Sequence[Tensor | None]


class FusedDecoder:
    """A model's weights in the kernel's layout; rebuild after every weight update."""

    def __init__(self, model: CausalLM, layers: Sequence[LayerWeights], head: PackedWeight) -> None:
        config, weight = model.config, model.embedding().detach().to(head.data.dtype)
        self._layers = (cpu_kernels.LayerStruct * len(layers))()
        self._kept: list[Tensor] = []  # keeps the tensors alive: the kernel has only their addresses
        for slot, layer in zip(self._layers, layers, strict=True):
            tensors = [*map(_wide, layer.norms), *(p.data for p in layer.products), *map(_wide, layer.biases)]
            for name, tensor in zip(cpu_kernels.LAYER_FIELDS, tensors, strict=True):
                setattr(slot, name, None if tensor is None else tensor.data_ptr())
            self._kept += [tensor for tensor in tensors if tensor is not None]
        self._ends = (weight, _wide(model.model.norm.weight), head.data)
        self.eps, self.vocab, self.hidden = config.rms_norm_eps, config.vocab_size, config.hidden_size
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.widest = max((heads + 2 * kv_heads) * config.head_dim, config.intermediate_size, config.hidden_size)
        self._group = heads // kv_heads
        qkv, out, gated, down = layers[0].products
        self._scratch = [max(each) for each in zip(*(p.scratch for p in (qkv, out, gated, down, head)), strict=True)]
        self._shape = cpu_kernels.ShapeStruct(
            *(len(layers), config.hidden_size, heads, kv_heads, config.head_dim, config.intermediate_size),
            *(config.vocab_size, qkv.block, out.block, down.block, weight.dtype == torch.bfloat16, qkv.format),
        )

    def __call__(
        self,
        plan: FusedDecodeMetadata,
        tokens: Int[Tensor, " rows"],
        positions: NDArray[np.int64],
        cos: Float[Tensor, "length 1 dim"],
        sin: Float[Tensor, "length 1 dim"],
    ) -> Float[Tensor, "rows vocab"]:
        """Decode one step; returns logits and writes the keys and values of `tokens` to the cache."""
        rows, shape = len(positions), self._shape
        shape.threads = torch.get_num_threads()
        scores = (int(positions.max()) + 1 + LANES) * self._group
        shape.scratch_size = _in_lanes(max(scores, self._scratch[0] + self._scratch[1] * rows))
        shape.shared_offset = shape.scratch_size if plan.shares else 0
        if plan.shares:  # a flag for each column, and its keys as transposed by the kernel
            shape.scratch_size += _in_lanes(plan.num_columns) + plan.num_columns * BLOCK * shape.size
        work = torch.empty(rows * 2 * (self.hidden + self.widest))
        scratch, logits = torch.empty(shape.threads * shape.scratch_size), torch.empty(rows, self.vocab)
        cpu_kernels.call(
            "decode",
            *(ctypes.addressof(shape), ctypes.addressof(self._layers), *self._ends, self.eps, cos, sin),
            *(tokens, positions.ctypes.data, plan.columns, plan.num_columns, plan.source),
            *(work, self.widest, scratch, logits, rows),
        )
        return logits


def _in_lanes(numbers: int) -> int:
    return -(-numbers // LANES) * LANES


def _wide(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().float().contiguous()
