"""Decode steps of fixed shape, captured as CUDA graphs: a replay is one launch instead of about a thousand.

A captured step works on static memory: it reads tokens, positions, weights and the cache, and writes logits and the
new keys and values. These are copied to the cache afterwards, for real rows only, so padding rows have no effect. A
step has no device-to-host synchronization, and all shapes follow from (rows, columns). A shape is captured after a few
uses, and recaptured when its memory has moved.

Fast mode only: padded shapes may select kernels that differ in the last bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from prime_rl.inference.embedded.attention import KVView
from prime_rl.inference.embedded.kv_cache import BLOCK, KVCache, num_columns
from prime_rl.inference.embedded.model_runner import ModelRunner
from prime_rl.trainer.models.attention import softmax
from rollouts.training.numerics import KEY_MULTIPLE

Step = Callable[[], Tensor]

WARM_UPS = 2
"""Eager runs of a shape before it is captured: libraries load kernels on first use, and rare shapes stay eager."""

MAX_GRAPHS = 64
"""Maximum number of graphs, evicted oldest first; each takes some megabytes of GPU memory."""

MAX_COLUMNS = 32
"""Longer sequences (4096 keys) are decoded eagerly: reading their keys takes longer than launching kernels."""

MAX_SHARED = 1024
"""Batches that share more key blocks than this are decoded eagerly too, since a captured step reads each row's own.

Estimated, not measured: reading a block (128 keys, 8 heads of 128, bf16) takes .16 us of an H100 per layer, launching
a layer's kernels some 150."""


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


def round_up(num: int) -> int:
    """The next power of two."""
    return 1 << (num - 1).bit_length()


class Buffers:
    """Static input and output buffers shared by the steps of all shapes."""

    def __init__(self, runner: ModelRunner, cache: KVCache) -> None:
        config, weight = runner.model.config, runner.model.embedding()
        rows = round_up(max(cache.max_slots, runner.min_rows))
        self.tokens: Int[Tensor, " rows"] = torch.zeros(rows, dtype=torch.long, device=weight.device)
        self.positions: Int[Tensor, " rows"] = torch.zeros_like(self.tokens)
        shape = (2, config.num_hidden_layers, rows, config.num_key_value_heads, config.head_dim)
        self.new: Float[Tensor, "2 layers rows kv_heads dim"] = weight.new_zeros(shape, dtype=runner.dtype)
        self.logits: Float[Tensor, "rows vocab"] = weight.new_zeros(rows, config.vocab_size)


class CapturedStep:
    """A decode step of one shape: one token for each of the first `rows` slots, with keys in `columns` columns."""

    def __init__(
        self, runner: ModelRunner, cache: KVCache, buffers: Buffers, rows: int, columns: int, max_length: int
    ) -> None:
        self._runner, self._max_length = runner, max_length
        self._tokens, self._positions = buffers.tokens[:rows], buffers.positions[:rows]
        self._new, self._logits, self._width = buffers.new[:, :, :rows], buffers.logits[:rows], columns * BLOCK
        # Views, not copies: replays must see the current cache contents.
        used = [c[:, :, :rows].view(2, c.shape[1], -1, BLOCK, c.shape[5]) for c in cache.columns[:columns]]
        config = runner.model.config
        self._views = [
            [KVView(c[0, i].transpose(1, 2), c[1, i]) for c in used] for i in range(config.num_hidden_layers)
        ]
        # Padding after a token's own key, which keeps rows of attention weights aligned.
        shape = (rows * config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads)
        self._rest = runner.model.embedding().new_zeros(*shape, KEY_MULTIPLE - 1)

    def __call__(self) -> Float[Tensor, "rows vocab"]:
        place = torch.arange(self._width + KEY_MULTIPLE, device=self._positions.device)
        unseen = (place >= self._positions[:, None]) & (place != self._width)  # position of the token's own key
        attend = partial(self._attend, unseen[:, None, None])
        out = self._runner(self._tokens, self._positions, attend, self._max_length)
        # Copied to a shared buffer, so that graphs do not allocate their own.
        return self._logits.copy_(self._runner.logits(out))

    def _attend(
        self,
        unseen: Bool[Tensor, "rows 1 1 keys"],
        layer: int,
        q: Float[Tensor, "rows heads dim"],
        k: Float[Tensor, "rows kv_heads dim"],
        v: Float[Tensor, "rows kv_heads dim"],
    ) -> Float[Tensor, "rows heads dim"]:
        """Attend each row to its cached past and to itself."""
        rows, kv_heads, dim = k.shape
        own = (buffer.copy_(x).view(-1, dim) for buffer, x in zip(self._new[:, layer], (k, v), strict=True))
        own_k, own_v = (x.to(q.dtype) for x in own)
        queries = (q * dim**-0.5).view(rows * kv_heads, -1, dim)
        parts = [torch.bmm(queries, view.keys.to(q.dtype)) for view in self._views[layer]]
        scores = torch.cat((*parts, torch.bmm(queries, own_k[:, :, None]), self._rest), dim=-1)
        if scores.dtype in (torch.bfloat16, torch.float16):
            scores = scores.float()
        scores.view(rows, kv_heads, -1, scores.shape[-1]).masked_fill_(unseen, float("-inf"))
        weights = softmax(scores).to(q.dtype)
        out = weights[:, :, self._width, None] * own_v[:, None]
        for j, view in enumerate(self._views[layer]):
            out.baddbmm_(weights[:, :, j * BLOCK : (j + 1) * BLOCK], view.values.to(q.dtype))
        return out.view(rows, -1, dim)


@dataclass
class CudaGraph:
    """A step and, after enough uses, its captured graph.

    Valid while weights and cache columns stay at the recorded addresses.
    """

    step: CapturedStep
    weights: list[int]
    columns: list[tuple[int, int]]
    uses: int = 0
    replay: Step | None = None

    def run(self, recorder: GraphCapturer) -> Tensor:
        """Run the step: eagerly, then by replay."""
        if self.replay is None and self.uses == WARM_UPS:
            self.replay = recorder.record(self.step)
        self.uses += 1
        return recorder.warm_up(self.step) if self.replay is None else self.replay()


class GraphDecoder:
    """The CUDA graphs of an engine and their selection per batch."""

    def __init__(self, runner: ModelRunner, cache: KVCache, recorder: GraphCapturer, max_length: int) -> None:
        self.runner, self.cache, self.recorder = runner, cache, recorder
        self.buffers, self._max_length = Buffers(runner, cache), max_length
        self._recordings: dict[tuple[int, int], CudaGraph] = {}

    def plan(self, positions: NDArray[np.int64], shared: NDArray[np.int64], plain: bool) -> GraphDecodeMetadata | None:
        """Select the graph for rows at these positions; None for eager decoding.

        `shared` as for `DecodeMetadata`; `plain`: no row has an adapter. Reserves cache for every row in every column,
        unless that takes more than three quarters of the cache.
        """
        rows, columns = round_up(len(positions)), num_columns(int(positions.max()) + 1)
        fits = columns <= MAX_COLUMNS and rows * columns * BLOCK <= self.cache.max_tokens * 3 // 4
        fits = fits and plain and int(np.minimum(shared, columns).sum()) <= MAX_SHARED
        fits = fits and self.cache.reserve(np.full(rows, columns * BLOCK))
        weights = self.runner.addresses(self._max_length)
        places = [(column.data_ptr(), column.shape[2]) for column in self.cache.columns]
        self._recordings = {
            shape: graph
            for shape, graph in self._recordings.items()
            if graph.weights == weights and graph.columns == places[: shape[1]]
        }
        if not fits:
            return None
        recording = self._recordings.get((rows, columns))
        if recording is None:
            step = CapturedStep(self.runner, self.cache, self.buffers, rows, columns, self._max_length)
            recording = self._recordings[rows, columns] = CudaGraph(step, weights, places[:columns])
            if len(self._recordings) > MAX_GRAPHS:
                del self._recordings[next(iter(self._recordings))]
        return GraphDecodeMetadata(self, recording, len(positions), columns)


class GraphDecodeMetadata:
    """A batch decoded by a CUDA graph; valid until a sequence reaches a new column or the batch changes."""

    def __init__(self, decoder: GraphDecoder, recording: CudaGraph, num: int, columns: int) -> None:
        self._decoder, self._recording, self.num, self.columns = decoder, recording, num, columns
        self._generation = decoder.cache.generation
        decoder.buffers.tokens.zero_()

    def fits(self, positions: NDArray[np.int64]) -> bool:
        """Whether the metadata is still valid for these positions."""
        if self._generation != self._decoder.cache.generation or len(positions) != self.num:
            return False
        return int(positions.max()) < self.columns * BLOCK

    def __call__(self, tokens: Int[Tensor, " num"], positions: NDArray[np.int64]) -> Float[Tensor, "num vocab"]:
        """Decode one step; returns logits (valid until the next call) and writes keys and values to the cache."""
        buffers, num = self._decoder.buffers, len(positions)
        at = np.zeros(len(buffers.positions), dtype=np.int64)
        at[:num] = positions
        buffers.tokens[:num].copy_(tokens)
        buffers.positions.copy_(torch.from_numpy(at))
        logits = self._recording.run(self._decoder.recorder)[:num]
        self._decoder.cache.put(positions, buffers.new[:, :, :num])
        return logits
