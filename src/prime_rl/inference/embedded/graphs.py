"""Decoding steps of fixed shape, recorded as CUDA graphs: replaying one costs one launch instead of a thousand.

A recorded step is a function of memory that never moves: it reads tokens, positions, weights and the cache, and gives
logits and the new keys and values. These enter the cache after it, for real rows only, so the rows that fill a shape
up disturb nobody. Nothing in a step asks the device for a number, and all shapes follow from (rows,
columns). A shape that has been met a few times is recorded, and recorded anew when what it reads has moved.

Only fast mode decodes so: other shapes may be other kernels, with other last bits.
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

from prime_rl.inference.embedded.attend import View
from prime_rl.inference.embedded.cache import BLOCK, KVCache, num_columns
from prime_rl.inference.embedded.runner import Runner
from prime_rl.trainer.models.attention import KEY_MULTIPLE, softmax

Step = Callable[[], Tensor]

WARM_UPS = 2
"""A shape is computed so often before it is recorded: libraries load kernels on first use, and rare shapes pass by."""

MAX_GRAPHS = 64
"""The oldest recording goes when there are more; each takes some megabytes of the device."""

MAX_COLUMNS = 32
"""Longer sequences (4096 keys) are decoded eagerly: reading their keys costs more than launching kernels."""

MAX_SHARED = 1024
"""So are batches that share more blocks of keys than this, since a recorded step reads every row's own.

Estimated, not measured: reading a block (128 keys, 8 heads of 128, bf16) takes .16 us of an H100 per layer, launching
a layer's kernels some 150."""


class Recorder(Protocol):
    """Runs steps and records them; `CudaRecorder`, or what a test puts in its place."""

    def warm_up(self, step: Step) -> Tensor:
        """The result of the step, computed where it will be recorded."""

    def record(self, step: Step) -> Step:
        """What computes the step from now on, in the same memory every time."""


class CudaRecorder:
    """Records on a stream of its own. All graphs take their memory from one pool, for only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._last: torch.cuda.CUDAGraph | None = None  # kept: a pool whose graphs are all gone cannot be opened again

    def warm_up(self, step: Step) -> Tensor:
        """As `Recorder`."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            out = step()
        current.wait_stream(self._stream)
        return out

    def record(self, step: Step) -> Step:
        """As `Recorder`."""
        graph = torch.cuda.CUDAGraph()
        pool = None if self._last is None else self._last.pool()
        # What other threads of a server do with the device meanwhile is no part of it, and no error.
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            out = step()
        self._last = graph

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


def build_recorder(device: torch.device, *, exact: bool, eager: bool) -> Recorder | None:
    """The rule: graphs on CUDA in fast mode, unless `eager` operations are asked for."""
    return CudaRecorder(device) if device.type == "cuda" and not exact and not eager else None


def round_up(num: int) -> int:
    """The next power of two."""
    return 1 << (num - 1).bit_length()


class Buffers:
    """What steps of all shapes read and write, in memory that does not move."""

    def __init__(self, runner: Runner, cache: KVCache) -> None:
        config, weight = runner.model.config, runner.model.embedding()
        rows = round_up(max(cache.max_slots, runner.min_rows))
        self.tokens: Int[Tensor, " rows"] = torch.zeros(rows, dtype=torch.long, device=weight.device)
        self.positions: Int[Tensor, " rows"] = torch.zeros_like(self.tokens)
        shape = (2, config.num_hidden_layers, rows, config.num_key_value_heads, config.head_dim)
        self.new: Float[Tensor, "2 layers rows kv_heads dim"] = weight.new_zeros(shape, dtype=runner.dtype)
        self.logits: Float[Tensor, "rows vocab"] = weight.new_zeros(rows, config.vocab_size)


class StaticStep:
    """The step of one shape: the token after each of the first `rows` slots, whose keys lie in `columns` columns."""

    def __init__(
        self, runner: Runner, cache: KVCache, buffers: Buffers, rows: int, columns: int, max_length: int
    ) -> None:
        self._runner, self._max_length = runner, max_length
        self._tokens, self._positions = buffers.tokens[:rows], buffers.positions[:rows]
        self._new, self._logits, self._width = buffers.new[:, :, :rows], buffers.logits[:rows], columns * BLOCK
        # A view, never a copy: later steps must see what the cache holds then.
        used = [c[:, :, :rows].view(2, c.shape[1], -1, BLOCK, c.shape[5]) for c in cache.columns[:columns]]
        config = runner.model.config
        self._views = [[View(c[0, i].transpose(1, 2), c[1, i]) for c in used] for i in range(config.num_hidden_layers)]
        # Beside a token's own key, so that rows of weights stay aligned.
        shape = (rows * config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads)
        self._rest = runner.model.embedding().new_zeros(*shape, KEY_MULTIPLE - 1)

    def __call__(self) -> Float[Tensor, "rows vocab"]:
        place = torch.arange(self._width + KEY_MULTIPLE, device=self._positions.device)
        unseen = (place >= self._positions[:, None]) & (place != self._width)  # its own key stands there
        attend = partial(self._attend, unseen[:, None, None])
        out = self._runner(self._tokens, self._positions, attend, self._max_length)
        # A copy, or every recording would keep memory for its own.
        return self._logits.copy_(self._runner.logits(out))

    def _attend(
        self,
        unseen: Bool[Tensor, "rows 1 1 keys"],
        layer: int,
        q: Float[Tensor, "rows heads dim"],
        k: Float[Tensor, "rows kv_heads dim"],
        v: Float[Tensor, "rows kv_heads dim"],
    ) -> Float[Tensor, "rows heads dim"]:
        """Each row to its own past in the cache, and to itself."""
        rows, kv_heads, dim = k.shape
        own = (kept.copy_(x).view(-1, dim) for kept, x in zip(self._new[:, layer], (k, v), strict=True))
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
class Recording:
    """A step and, once it has been met often enough, what replays it.

    It is good as long as weights, and slots of the columns it reads, lie at these addresses.
    """

    step: StaticStep
    weights: list[int]
    columns: list[tuple[int, int]]
    uses: int = 0
    replay: Step | None = None

    def run(self, recorder: Recorder) -> Tensor:
        """Compute the step once."""
        if self.replay is None and self.uses == WARM_UPS:
            self.replay = recorder.record(self.step)
        self.uses += 1
        return recorder.warm_up(self.step) if self.replay is None else self.replay()


class GraphDecoder:
    """The recordings of an engine, and which batches they decode."""

    def __init__(self, runner: Runner, cache: KVCache, recorder: Recorder, max_length: int) -> None:
        self.runner, self.cache, self.recorder = runner, cache, recorder
        self.buffers, self._max_length = Buffers(runner, cache), max_length
        self._recordings: dict[tuple[int, int], Recording] = {}

    def plan(self, positions: NDArray[np.int64], shared: NDArray[np.int64], plain: bool) -> GraphPlan | None:
        """How to decode rows at these positions; None: eagerly.

        `shared` as for `DecodePlan`; `plain`: no row belongs to an adapter. Room is made for every row in every column,
        unless that takes more than three quarters of the memory.
        """
        rows, columns = round_up(len(positions)), num_columns(int(positions.max()) + 1)
        fits = columns <= MAX_COLUMNS and rows * columns * BLOCK <= self.cache.max_tokens * 3 // 4
        fits = fits and plain and int(np.minimum(shared, columns).sum()) <= MAX_SHARED
        fits = fits and self.cache.reserve(np.full(rows, columns * BLOCK))
        weights = self.runner.addresses(self._max_length)
        places = [(column.data_ptr(), column.shape[2]) for column in self.cache.columns]
        self._recordings = {
            shape: held
            for shape, held in self._recordings.items()
            if held.weights == weights and held.columns == places[: shape[1]]
        }
        if not fits:
            return None
        recording = self._recordings.get((rows, columns))
        if recording is None:
            step = StaticStep(self.runner, self.cache, self.buffers, rows, columns, self._max_length)
            recording = self._recordings[rows, columns] = Recording(step, weights, places[:columns])
            if len(self._recordings) > MAX_GRAPHS:
                del self._recordings[next(iter(self._recordings))]
        return GraphPlan(self, recording, len(positions), columns)


class GraphPlan:
    """A batch that is decoded by a recording, until a sequence reaches a new column, or comes or goes."""

    def __init__(self, decoder: GraphDecoder, recording: Recording, num: int, columns: int) -> None:
        self._decoder, self._recording, self.num, self.columns = decoder, recording, num, columns
        self._generation = decoder.cache.generation
        decoder.buffers.tokens.zero_()

    def fits(self, positions: NDArray[np.int64]) -> bool:
        """Whether it still holds for these positions, a step later."""
        if self._generation != self._decoder.cache.generation or len(positions) != self.num:
            return False
        return int(positions.max()) < self.columns * BLOCK

    def __call__(self, tokens: Int[Tensor, " num"], positions: NDArray[np.int64]) -> Float[Tensor, "num vocab"]:
        """Scores of the next token, valid until the next call; keys and values of `tokens` are in the cache then."""
        buffers, num = self._decoder.buffers, len(positions)
        at = np.zeros(len(buffers.positions), dtype=np.int64)
        at[:num] = positions
        buffers.tokens[:num].copy_(tokens)
        buffers.positions.copy_(torch.from_numpy(at))
        logits = self._recording.run(self._decoder.recorder)[:num]
        self._decoder.cache.put(positions, buffers.new[:, :, :num])
        return logits
