"""A decode step as one kernel in C (`rollouts/kernels/native/decode.h`): embedding, layers, adapters, cache, and head.

It computes in fp32; weights and cache may be bf16, and then also the inputs of products (`CausalLM.round_inputs`); or
both int8. In fp32 and bf16 its log-probs are bitwise equal to the trainer's: products in fp32 use oneDNN's summation
order (verified by `find_block`), and all other operations call the trainer's functions.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from prime_rl.inference.embedded.attention import AttentionMetadata, DecodeBackend
from prime_rl.inference.embedded.kv_cache import BLOCK, KVCache
from prime_rl.trainer.models.causal_lm import CausalLM
from rollouts.kernels import cpu as cpu_kernels
from rollouts.kernels import native
from rollouts.kernels.cpu import PackedWeight
from rollouts.kernels.deltas import DeltaBatch
from rollouts.kernels.native import LANES

Rope = Callable[[int], tuple[Tensor, Tensor]]
"""Tables of cos and signed sin for positions below a length, in fp32."""


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one layer for the kernel."""

    norms: tuple[Tensor, Tensor | None, Tensor]
    """Attention input norm; query and key norms `[heads + kv_heads, dim]`; feed-forward input norm."""
    products: Sequence[PackedWeight]
    """QKV, attention output, gate and up, down projections."""
    biases: Sequence[Tensor | None]
    has_rope: bool


class FusedDecoder:
    """A model's weights in the kernel's layout; rebuild after every weight update."""

    def __init__(
        self, model: CausalLM, layers: Sequence[LayerWeights], head: PackedWeight, rope: Rope, dtype: torch.dtype
    ) -> None:
        config, weight = model.config, model.embedding().detach().to(dtype)
        self.rope = rope
        self.layers = (native.LayerStruct * len(layers))()
        self._kept: list[Tensor] = []  # keeps the tensors alive: the kernel has only their addresses
        for slot, layer in zip(self.layers, layers, strict=True):
            slot.has_rope = layer.has_rope
            tensors = [*map(_wide, layer.norms), *(p.data for p in layer.products), *map(_wide, layer.biases)]
            for name, tensor in zip(native.LAYER_FIELDS, tensors, strict=True):
                setattr(slot, name, None if tensor is None else tensor.data_ptr())
            self._kept += [tensor for tensor in tensors if tensor is not None]
        self.ends = (weight, _wide(model.model.norm.weight), head.data)
        self.eps, self.vocab, self.hidden = config.rms_norm_eps, config.vocab_size, config.hidden_size
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.inner = config.intermediate_size
        self.widest = max((heads + 2 * kv_heads) * config.head_dim, config.intermediate_size, config.hidden_size)
        self.group = heads // kv_heads
        qkv, out, gated, down = layers[0].products
        self.scratch = [max(each) for each in zip(*(p.scratch for p in (qkv, out, gated, down, head)), strict=True)]
        narrow = weight.dtype == torch.bfloat16
        self.shape = native.ShapeStruct(
            *(len(layers), config.hidden_size, heads, kv_heads, config.head_dim, config.intermediate_size),
            *(config.vocab_size, qkv.block, out.block, down.block, narrow, model.rounds_inputs, qkv.format),
        )
        self._logits, self.memory = torch.empty(0, self.vocab), torch.empty(0)

    def logits(self, rows: int) -> Float[Tensor, "rows vocab"]:
        """Memory for the logits of a step, reused: clearing new pages takes 4 % of a step with a real vocabulary."""
        if len(self._logits) < rows:
            self._logits = torch.empty(rows, self.vocab)
        return self._logits[:rows]


class FusedDecode(DecodeBackend):
    """A batch decoded by the fused kernel, which takes the addresses of the cache blocks and the block tables.

    A step returns the logits of the `wanted` rows, by default of all of them; they are valid until the next step.
    """

    def __init__(
        self,
        decoder: FusedDecoder,
        cache: KVCache,
        metadata: AttentionMetadata,
        changes: DeltaBatch | None = None,
        wanted: NDArray[np.int64] | None = None,
    ) -> None:
        super().__init__(cache, metadata, metadata.next_boundary, reach=None)  # the tables lack the page of that block
        self._decoder, self._num_blocks, self._changes = decoder, int(metadata.starts.max()) // BLOCK + 1, changes
        self._widest = decoder.widest if changes is None else max(decoder.widest, 2 * decoder.inner)
        self._wanted = torch.from_numpy(np.arange(len(metadata.slots)) if wanted is None else wanted)
        self._logits = decoder.logits(len(self._wanted))
        self._work_size = cpu_kernels.decode_work_size(decoder.shape, self._widest, len(metadata.slots))
        self._tables = torch.from_numpy(metadata.block_tables)
        self._shares = metadata.num_shared_blocks > 0
        self._addresses = cache.addresses()[:, :, : self._num_blocks].contiguous()

    def __call__(self, tokens: Int[Tensor, " rows"], positions: NDArray[np.int64]) -> Float[Tensor, "wanted vocab"]:
        """Decode one step, writing keys and values to the cache."""
        decoder, rows = self._decoder, len(positions)
        shape, length = decoder.shape, int(positions.max()) + 1
        shape.threads = torch.get_num_threads()
        scores = (length + 2 * LANES) * decoder.group  # in whole steps of AMX
        shape.scratch_size = _in_lanes(max(scores, decoder.scratch[0] + decoder.scratch[1] * rows))
        shape.shared_offset = shape.scratch_size if self._shares else 0
        if self._shares:  # a flag for each block, and its keys as transposed by the kernel
            shape.scratch_size += _in_lanes(self._num_blocks) + self._num_blocks * BLOCK * shape.size
            shape.scratch_size = max(shape.scratch_size, cpu_kernels.run_scratch_size(shape, self._num_blocks))
        size = self._work_size + shape.threads * shape.scratch_size
        if decoder.memory.numel() < size:
            decoder.memory = torch.empty(size)  # kept, like the logits
        native.call(
            "decode",
            *(ctypes.addressof(shape), ctypes.addressof(decoder.layers), *decoder.ends, decoder.eps),
            *(*decoder.rope(length), tokens, positions.ctypes.data, self._addresses, self._num_blocks, self._tables),
            *(decoder.memory, self._widest, decoder.memory[self._work_size :], self._logits, rows),
            *(self._wanted, self._logits.shape[0]),
            *((None, None, 0) if self._changes is None else self._changes.arguments),
        )
        return self._logits


def _in_lanes(numbers: int) -> int:
    return -(-numbers // LANES) * LANES


def _wide(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().float().contiguous()
