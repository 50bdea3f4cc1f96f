"""Decode steps of fixed shape, captured as CUDA graphs: a replay is one launch instead of about a thousand.

A captured step works on static memory: it reads tokens, positions, weights and the cache, and writes logits and the
new keys and values, of real rows only, so padding rows have no effect: with the kernel of `rollouts.kernels.gpu` to the
cache, without it to a buffer that is copied to the cache afterwards. A step has no device-to-host synchronization, and
all shapes follow from (rows, blocks). A shape is captured after a few uses, and recaptured when its memory has moved.

Fast mode only: padded shapes may select kernels that differ in the last bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from prime_rl.inference.embedded.adapters import BatchDelta
from prime_rl.inference.embedded.attention import AttentionMetadata, DecodeBackend, KVView, decode_queries
from prime_rl.inference.embedded.kv_cache import BLOCK, KVCache, num_blocks
from prime_rl.inference.embedded.prepared_decoder import PreparedDecoder
from prime_rl.trainer.models.attention import AttentionBackend, add_mask, causal_mask, softmax
from prime_rl.trainer.models.decoder_config import DecoderConfig
from rollouts.kernels.select import gpu_kernels
from rollouts.training.numerics import KEY_MULTIPLE

Step = Callable[[], Tensor]

WARM_UPS = 2
"""Eager runs of a shape before it is captured: libraries load kernels on first use, and rare shapes stay eager."""

MAX_GRAPHS = 64
"""Maximum number of graphs, evicted oldest first; each takes some megabytes of GPU memory."""

MAX_BLOCKS = 32
"""Without kernels longer sequences (4096 keys) are decoded eagerly: a step reads the keys of the longest for each."""

MAX_SHARED = 1024
"""Without kernels batches that share more key blocks than this are decoded eagerly, which reads these once."""


class GraphCapturer(Protocol):
    """Runs and captures steps; `CudaRecorder`, or a test double."""

    def warm_up(self, step: Step) -> Tensor:
        """Run the step eagerly, on the capture stream."""

    def record(self, step: Step) -> Step:
        """Capture the step; returns its replay function, which reuses the same memory."""


class CudaRecorder:
    """Captures on a separate stream. All graphs share one memory pool, since only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._last: torch.cuda.CUDAGraph | None = None  # keeps the memory pool alive

    def warm_up(self, step: Step) -> Tensor:
        """As `GraphCapturer`."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            out = step()
        current.wait_stream(self._stream)
        return out

    def record(self, step: Step) -> Step:
        """As `GraphCapturer`."""
        graph = torch.cuda.CUDAGraph()
        pool = None if self._last is None else self._last.pool()
        # "thread_local": GPU calls of other server threads are neither captured nor errors.
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            out = step()
        self._last = graph

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


def build_recorder(device: torch.device, *, exact: bool, eager: bool) -> GraphCapturer | None:
    """CUDA graphs are used on CUDA in fast mode, unless `eager`."""
    return CudaRecorder(device) if device.type == "cuda" and not exact and not eager else None


def find_decode_kernels(config: DecoderConfig, device: torch.device) -> Any:
    """The module `rollouts.kernels.gpu`, if the device has it and it supports the heads; None for torch operations."""
    kernels = gpu_kernels() if device.type == "cuda" else None
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    takes = kernels is not None and kernels.supports_decode(heads, kv_heads, config.head_dim, BLOCK)
    return kernels if takes else None


def round_up(num: int) -> int:
    """The next power of two."""
    return 1 << (num - 1).bit_length()


class Buffers:
    """Static input and output buffers shared by the steps of all shapes."""

    def __init__(self, decoder: PreparedDecoder, cache: KVCache, max_length: int) -> None:
        config, weight = decoder.model.config, decoder.model.embedding()
        rows = round_up(max(cache.max_slots, decoder.min_rows))
        self.tokens: Int[Tensor, " rows"] = torch.zeros(rows, dtype=torch.long, device=weight.device)
        self.positions: Int[Tensor, " rows"] = torch.zeros_like(self.tokens)
        shape = (2, config.num_hidden_layers, rows, config.num_key_value_heads, config.head_dim)
        self.logits: Float[Tensor, "rows vocab"] = weight.new_zeros(rows, config.vocab_size, dtype=decoder.logits_dtype)
        self.kernels = find_decode_kernels(config, weight.device)
        self._positions: NDArray[np.int64] | None = None  # of the last step
        if self.kernels is None:
            self.new: Float[Tensor, "2 layers rows kv_heads dim"] = weight.new_zeros(shape, dtype=decoder.dtype)
            return
        most = round_up(num_blocks(max_length))
        self.addresses: Int[Tensor, "layers 2 blocks"] = self.tokens.new_zeros(config.num_hidden_layers, 2, most)
        self.tables: Int[Tensor, "blocks rows"] = self.tokens.new_zeros(most, rows, dtype=torch.int32)
        self._generation = -1

    def set_inputs(self, tokens: Int[Tensor, " num"], positions: NDArray[np.int64]) -> None:
        """Set the inputs of the real rows; rows behind them are at position -1, without kernels at 0."""
        num = len(positions)
        self.tokens[:num].copy_(tokens)
        if self._positions is not None and np.array_equal(self._positions + 1, positions):
            self.positions[:num] += 1  # a copy from the host would wait for the step before
        else:
            at = np.full(len(self.positions), 0 if self.kernels is None else -1, dtype=np.int64)
            at[:num] = positions
            self.positions.copy_(torch.from_numpy(at))
        self._positions = positions.copy()

    def update(self, cache: KVCache, metadata: AttentionMetadata) -> None:
        """Copy what kernels read: the pages of the rows, and the addresses of the cache if its memory has moved."""
        num, rows = metadata.block_tables.shape
        self.tables[:num, :rows].copy_(torch.from_numpy(metadata.block_tables))
        if self._generation != cache.generation:
            # Further blocks are those of prompts longer than `max_length`, which are only scored.
            found = cache.addresses()[:, :, : self.addresses.shape[2]]
            self.addresses[:, :, : found.shape[2]].copy_(found)
            self._generation = cache.generation


class CapturedStep:
    """A decode step of one shape: one token for each of the first `rows` slots, with keys in `num_blocks` blocks.

    `delta` is the adapter of all rows. Valid while weights and cache stay at the addresses in `memory`; kernels read
    those of the cache in each step.
    """

    def __init__(
        self,
        decoder: PreparedDecoder,
        cache: KVCache,
        buffers: Buffers,
        rows: int,
        num_blocks: int,
        max_length: int,
        delta: BatchDelta | None = None,
    ) -> None:
        self._decoder, self._max_length, self.delta = decoder, max_length, delta
        config = decoder.model.config
        self.replay: Step | None = None
        self._uses = 0
        self._tokens, self._positions = buffers.tokens[:rows], buffers.positions[:rows]
        self._logits, self._width = buffers.logits[:rows], num_blocks * BLOCK
        self.kernels = buffers.kernels
        if self.kernels is not None:
            self.memory = find_memory(decoder, cache, 0, max_length)
            self._addresses, self._tables = buffers.addresses[:, :, :num_blocks], buffers.tables[:num_blocks, :rows]
            return
        self.memory = find_memory(decoder, cache, num_blocks, max_length)
        self._new = buffers.new[:, :, :rows]
        # Views, not copies: replays must see the current cache contents.
        used = [c[:, :, :rows].view(2, c.shape[1], -1, BLOCK, c.shape[5]) for c in cache.blocks[:num_blocks]]
        self._views = [
            [KVView(c[0, i].transpose(1, 2), c[1, i]) for c in used] for i in range(config.num_hidden_layers)
        ]
        # Padding after a token's own key, which keeps rows of attention weights aligned.
        shape = (rows * config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads)
        self._rest = decoder.model.embedding().new_zeros(*shape, KEY_MULTIPLE - 1)

    def run(self, capturer: GraphCapturer) -> Float[Tensor, "rows vocab"]:
        """Compute the step: eagerly a few times, then by replay of its graph."""
        if self.replay is None and self._uses == WARM_UPS:
            self.replay = capturer.record(self)
        self._uses += 1
        return capturer.warm_up(self) if self.replay is None else self.replay()

    def __call__(self) -> Float[Tensor, "rows vocab"]:
        attend: AttentionBackend = self._attend_by_kernel
        if self.kernels is None:
            mask = causal_mask(self._positions - 1, self._width + KEY_MULTIPLE)
            mask[:, self._width].zero_()  # the token's own key comes after the blocks
            attend = partial(self._attend, mask[:, None, None])
        out = self._decoder(self._tokens, self._positions, attend, self._max_length, self.delta)
        # To a shared buffer, so that graphs do not allocate their own.
        return self._decoder.logits(out, self.delta, self._logits)

    def _attend_by_kernel(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        """As `_attend`; reads the pages that a row has, and stores its own keys and values in the last one."""
        assert window is None and self.kernels is not None
        out: Tensor = self.kernels.attend_step(q, k, v, self._addresses[layer], self._tables, self._positions, BLOCK)
        return out

    def _attend(
        self,
        mask: Float[Tensor, "rows 1 1 keys"],
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int | None = None,
    ) -> Tensor:
        """Attend each row to its cached past and to itself."""
        assert window is None, "models with sliding windows are not captured"
        rows, kv_heads, dim = k.shape
        own = (buffer.copy_(x).view(-1, dim) for buffer, x in zip(self._new[:, layer], (k, v), strict=True))
        own_k, own_v = (x.to(q.dtype) for x in own)
        queries = decode_queries(q, kv_heads)
        parts = [torch.bmm(queries, view.keys.to(q.dtype)) for view in self._views[layer]]
        scores = torch.cat((*parts, torch.bmm(queries, own_k[:, :, None]), self._rest), dim=-1)
        scores = add_mask(scores.unflatten(0, (rows, kv_heads)), mask)
        weights = softmax(scores).to(q.dtype).flatten(0, 1)
        out: Tensor = weights[:, :, self._width, None] * own_v[:, None]
        for j, view in enumerate(self._views[layer]):
            out.baddbmm_(weights[:, :, j * BLOCK : (j + 1) * BLOCK], view.values.to(q.dtype))
        return out.view(rows, -1, dim)


class GraphDecoder:
    """The CUDA graphs of an engine and their selection per batch."""

    def __init__(self, decoder: PreparedDecoder, cache: KVCache, recorder: GraphCapturer, max_length: int) -> None:
        self.decoder, self.cache, self.recorder = decoder, cache, recorder
        self.buffers, self._max_length = Buffers(decoder, cache, max_length), max_length
        self.steps: dict[tuple[int, int, str | None], CapturedStep] = {}

    def build(self, metadata: AttentionMetadata, num: int, delta: BatchDelta | None = None) -> GraphDecode | None:
        """Select the graph of a batch, of which `num` rows are real; None for eager decoding. `delta` is the adapter of
        all rows.

        Without kernels, for slots, it reserves cache for every row in every block, unless that takes more than three
        quarters of the cache; kernels read and write the pages that the rows have.
        """
        rows, num_blocks = round_up(len(metadata.slots)), len(metadata.block_tables)
        if self.buffers.kernels is not None:
            num_blocks = round_up(num_blocks)
            self.buffers.update(self.cache, metadata)
            fits = True
        else:
            fits = self._reserve(rows, num_blocks, metadata.num_shared_blocks)
        weights, blocks = find_memory(self.decoder, self.cache, len(self.cache.blocks), self._max_length)
        self.steps = {
            shape: step
            for shape, step in self.steps.items()
            if step.memory == (weights, [] if self.buffers.kernels is not None else blocks[: shape[1]])
        }
        if not fits:
            return None
        name = None if delta is None else delta.name
        step = self.steps.get((rows, num_blocks, name))
        if step is None:
            step = CapturedStep(self.decoder, self.cache, self.buffers, rows, num_blocks, self._max_length, delta)
            self.steps[rows, num_blocks, name] = step
            if len(self.steps) > MAX_GRAPHS:
                del self.steps[next(iter(self.steps))]
        return GraphDecode(self, step, metadata, num)

    def forget_adapter(self, name: str) -> None:
        """Free the graphs of an adapter, and with them its weights, which have changed or are not needed any more."""
        self.steps = {key: step for key, step in self.steps.items() if key[2] != name}

    def _reserve(self, rows: int, num_blocks: int, num_shared: int) -> bool:
        """Whether torch operations should decode such a batch; then every row has cache in every block."""
        assert self.cache.max_tokens is not None
        fits = num_blocks <= MAX_BLOCKS and rows * num_blocks * BLOCK <= self.cache.max_tokens * 3 // 4
        return fits and num_shared <= MAX_SHARED and self.cache.reserve([rows] * num_blocks, num_blocks * BLOCK)


def find_memory(
    decoder: PreparedDecoder, cache: KVCache, num_blocks: int, max_length: int
) -> tuple[list[int], list[tuple[int, int]]]:
    """Addresses of all weights, and address and slots of the first cache blocks."""
    return decoder.addresses(max_length), [(c.data_ptr(), c.shape[2]) for c in cache.blocks[:num_blocks]]


class GraphDecode(DecodeBackend):
    """A batch decoded by a CUDA graph; its `num` real rows are the first ones."""

    def __init__(self, decoder: GraphDecoder, step: CapturedStep, metadata: AttentionMetadata, num: int) -> None:
        width = len(metadata.block_tables) * BLOCK if step.kernels is None else metadata.next_boundary
        super().__init__(decoder.cache, metadata, width, reach=None)
        self._buffers, self._step, self._recorder, self._num_real = decoder.buffers, step, decoder.recorder, num
        self.is_on_device = step.kernels is not None  # without them the host places the new keys and values
        self._buffers.tokens.zero_()

    def __call__(self, tokens: Int[Tensor, " rows"], positions: NDArray[np.int64]) -> Float[Tensor, "rows vocab"]:
        """Decode one step; the logits are valid until the next call."""
        buffers, num = self._buffers, self._num_real
        buffers.set_inputs(tokens[:num], positions[:num])
        logits = self._step.run(self._recorder)[:num]
        if buffers.kernels is None:  # they have stored the keys and values, except those of rows at position -1
            places = self.cache.locate(self.metadata.slots[:num], positions[:num])
            self.cache.store_all(places, buffers.new[:, :, :num])
        return logits
