"""Captured decode steps: equal to eager ones, no host decision inside, captured again when memory moves.

Without a GPU a tape takes the place of a CUDA graph: it notes every operation of a step and replays these very ones,
so what a graph would freeze (addresses, shapes, numbers the host computed) is frozen here too.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from prime_rl.inference.embedded import cuda_graphs as graphs
from prime_rl.inference.embedded import engine as engine_module
from prime_rl.inference.embedded import prepared_decoder
from prime_rl.inference.embedded.adapters import BatchDelta
from prime_rl.inference.embedded.attention import decode_metadata
from prime_rl.inference.embedded.cuda_graphs import (
    Buffers,
    CapturedStep,
    CudaRecorder,
    GraphDecode,
    Step,
    build_recorder,
)
from prime_rl.inference.embedded.engine import EmbeddedEngine
from prime_rl.inference.embedded.kv_cache import BLOCK, KVCache, num_blocks
from prime_rl.inference.embedded.model_runner import EagerDecode
from prime_rl.inference.embedded.prepared_decoder import PreparedDecoder, fuses_norms
from prime_rl.inference.engine import AdapterSpec, GenerationRequest, Output, SamplingParams
from prime_rl.trainer.models.causal_lm import CausalLM, init_weights, tensor_names
from prime_rl.trainer.models.decoder_config import DecoderConfig
from prime_rl.trainer.models.multi_lora import LoraDelta
from rollouts.kernels import native
from rollouts.training.numerics import min_rows

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
}
SMALL = {"head_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
"""Changes for tests of the order of steps, whose kernels are interpreted."""
FORBIDDEN = ("item", "_local_scalar_dense", "nonzero", "is_nonzero", "unique", "masked_select", "bincount", "equal")


@pytest.fixture(autouse=True)
def as_on_a_gpu(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither kernels nor packed weights, which a CPU alone has."""
    monkeypatch.setattr(native, "library", lambda: None)
    before, torch.backends.mkldnn.enabled = torch.backends.mkldnn.enabled, False
    yield
    torch.backends.mkldnn.enabled = before


class Tape(TorchDispatchMode):
    """Records operations; rejects those that a CUDA graph cannot contain."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch imports its compiler for it, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        assert name not in FORBIDDEN, f"{name} synchronizes with the device"
        assert not (name.startswith("index") and any(t.dtype == torch.bool for t in tensors[1:])), "masked indexing"
        out = func(*args, **kwargs)
        tensors += [leaf for leaf in tree_iter(out) if isinstance(leaf, Tensor)]
        assert len({t.device for t in tensors}) <= 1, f"{name} moves data between devices"
        self.calls.append((func, args, kwargs, out))
        return out

    def replay(self) -> dict[int, Tensor]:
        """The noted operations on what memory holds now; results by the identity of those of the recording."""
        found: dict[int, Tensor] = {}

        def now(x: Any) -> Any:
            if isinstance(x, Tensor):
                return found.get(id(x), x)
            return [now(one) for one in x] if isinstance(x, (list, tuple)) else x

        for func, args, kwargs, out in self.calls:
            new = func(*now(args), **{name: now(x) for name, x in kwargs.items()})
            for one, again in [(out, new)] if isinstance(out, Tensor) else zip(out, new, strict=True):
                found[id(one)] = again
        return found


class TapeRecorder:
    """What `CudaRecorder` is on a GPU; the result of a replay is overwritten by the next one, as there."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def warm_up(self, step: Step) -> Tensor:
        return step()

    def record(self, step: Step) -> Step:
        tape = Tape()
        with tape:
            out = step()
        self.recorded += 1

        def replay() -> Tensor:
            self.replayed += 1
            return out.copy_(tape.replay()[id(out)])

        return replay


def build_model(seed: int, **changes: Any) -> CausalLM:
    """Random weights; norms and biases too, so that none can be left out."""
    model = CausalLM(DecoderConfig.from_hf(CONFIG | changes))
    init_weights(model, seed)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter.add_(torch.randn(parameter.shape, generator=noise) * 0.3)
    return model.requires_grad_(False)


def build_engine(model: CausalLM, recorder: Any, **options: Any) -> EmbeddedEngine:
    return EmbeddedEngine(model, exact=False, recorder=recorder, **options)


def request(prompt: list[int], **params: Any) -> GenerationRequest:
    adapter = params.pop("adapter", None)
    return GenerationRequest(prompt, SamplingParams(**{"max_tokens": 12, **params}), adapter=adapter)


def draw_prompt(length: int) -> list[int]:
    return random.Random(length).choices(range(97), k=length)


def run(engine: EmbeddedEngine, *requests: GenerationRequest) -> list[Output]:
    """Outputs in the order of the requests."""
    for one in requests:
        engine.add(one)
    outputs: dict[GenerationRequest, Output] = {}
    while engine.has_work():
        outputs |= {event.request: event for event in engine.step() if isinstance(event, Output)}
    return [outputs[one] for one in requests]


def drive(engine: EmbeddedEngine, seed: int, longest: int, versions: list[dict[str, Tensor]]) -> list[Output | None]:
    """Random arrivals, shared prompts, cancellations and two updates in flight; None for what was cancelled."""
    rng = random.Random(seed)
    shared = [rng.choices(range(97), k=rng.randint(1, longest)) for _ in range(2)]
    todo = [
        request(
            rng.choice(shared) if rng.random() < 0.4 else rng.choices(range(97), k=rng.randint(1, longest)),
            max_tokens=rng.randint(1, 24),
            temperature=rng.choice([0.0, 1.0, 0.7]),
            top_p=rng.choice([1.0, 0.9]),
            seed=i,
        )
        for i in range(16)
    ]
    alive: list[GenerationRequest] = []
    outputs: dict[GenerationRequest, Output] = {}
    waiting = list(todo)
    while waiting or engine.has_work():
        while waiting and rng.random() < 0.3:
            alive.append(waiting.pop())
            engine.add(alive[-1])
        if alive and rng.random() < 0.03:
            engine.cancel(alive.pop(rng.randrange(len(alive))))
        if len(outputs) >= 4 * (engine.version + 1) and engine.version < len(versions):
            engine.load_weights(versions[engine.version], engine.version + 1)
        new = [event for event in engine.step() if isinstance(event, Output)] if engine.has_work() else []
        outputs |= {output.request: output for output in new}
        alive = [one for one in alive if one not in outputs]
    return [outputs.get(one) for one in todo]


def check_alike(found: list[Output | None], expected: list[Output | None], atol: float = 1e-5) -> int:
    """Equal tokens, versions and endings, log-probs within `atol`; returns the number of tokens."""
    count = 0
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is None or theirs is None:
            continue
        assert mine.token_ids == theirs.token_ids
        assert (mine.versions, mine.finish_reason) == (theirs.versions, theirs.finish_reason)
        torch.testing.assert_close(torch.tensor(mine.logprobs), torch.tensor(theirs.logprobs), rtol=0, atol=atol)
        count += len(mine.token_ids)
    return count


@pytest.mark.parametrize(
    ("seed", "longest", "options"),
    [
        (0, 40, {"max_running": 6}),
        (1, 300, {"max_running": 20, "max_num_batched_tokens": 100}),
        (4, 390, {"max_running": 16, "max_model_len": 420}),
    ],
)
def test_captured_steps_equal_eager_steps(
    seed: int, longest: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "WARM_UPS", 0 if seed else 2)
    if seed == 4:  # room for one sequence and two blocks; a step's least number of rows depends on the processor
        options = options | {"max_cache_tokens": (num_blocks(420 + 1) + min_rows() + 2) * BLOCK}
    versions = [tensor_names(build_model(version)) for version in (1, 2)]
    recorder = TapeRecorder()
    model = build_model(0).double()  # errors by the number of rows of a product are too small to change a token
    engine, eager = build_engine(deepcopy(model), recorder, **options), build_engine(model, None, **options)
    found, expected = drive(engine, seed, longest, versions), drive(eager, seed, longest, versions)
    assert check_alike(found, expected) > 100
    assert recorder.replayed > (0 if seed == 4 else 10)
    assert sum(len(output.versions) > 1 for output in found if output) > 0
    assert engine.stats() == eager.stats()
    assert engine.stats().shared_prompt_tokens > 0 and (seed < 4 or engine.stats().preempted > 0)


def test_prompts_of_one_token_whose_queries_all_share_a_key() -> None:
    """They are chunks of one length, but fewer rows than a product takes: the last is repeated."""
    model = build_model(0, num_attention_heads=64, num_key_value_heads=1)
    prompts = [request([token]) for token in (7, 9, 11)]
    together = run(build_engine(model, None), *prompts)
    alone = [run(build_engine(model, None), one)[0] for one in prompts]
    assert check_alike(list(together), list(alone)) == 36


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "qwen2", "num_key_value_heads": 4},
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
        {"tie_word_embeddings": True, "head_dim": 64},
    ],
)
def test_models_of_every_kind(changes: dict[str, Any]) -> None:
    requests = [request(list(range(n, n + 9)), seed=n, temperature=n % 2) for n in range(5)]
    recorder = TapeRecorder()
    found = run(build_engine(build_model(3, **changes), recorder), *requests)
    check_alike(list(found), list(run(build_engine(build_model(3, **changes), None), *requests)))
    assert recorder.replayed > 5


@pytest.mark.parametrize("arithmetic", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_bf16_is_as_near_to_fp32_as_eagerly(arithmetic: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log-probs of tokens decoded over two columns of keys, computed in bf16 as on a GPU, or as on a CPU."""
    requests = [request([(n * i) % 97 for i in range(150)], temperature=0.0, max_tokens=2) for n in range(1, 17)]
    fp32 = run(build_engine(build_model(0), None), *requests)
    monkeypatch.setattr("prime_rl.inference.embedded.prepared_decoder.arithmetic_dtype", lambda *_: arithmetic)
    errors = []
    for recorder in (TapeRecorder(), None):
        outputs = run(build_engine(build_model(0).bfloat16(), recorder), *requests)
        pairs = [(a, b) for a, b in zip(outputs, fp32, strict=True) if a.token_ids == b.token_ids]
        assert len(pairs) > 8
        errors.append(float(np.mean([abs(a.logprobs[1] - b.logprobs[1]) for a, b in pairs])))
    assert errors[0] < 2 * errors[1] and errors[1] > 0


def decode_until_replayed(engine: EmbeddedEngine, recorder: TapeRecorder) -> None:
    before = recorder.replayed
    while recorder.replayed == before:
        engine.step()


def test_rows_that_fill_a_shape_up_touch_nothing() -> None:
    """A step changes one position of each running slot; other slots have no influence on results."""
    recorder = TapeRecorder()
    engine = build_engine(build_model(0), recorder, max_model_len=256)
    requests = [request(draw_prompt(120 + n), seed=n, max_tokens=30) for n in range(3)]
    for one in requests:
        engine.add(one)
    decode_until_replayed(engine, recorder)
    cache = engine._blocks.cache
    outputs = []
    for _ in range(12):
        with torch.inference_mode():
            for column in cache.blocks:
                column[:, :, 3:] = float("nan")
        lengths = [seq.num_cached for seq in engine._scheduler.running]
        before, generation = [column.clone() for column in cache.blocks], cache.generation
        outputs += engine.step()
        if generation != cache.generation:
            continue
        for j, (old, new) in enumerate(zip(before, cache.blocks, strict=True)):
            places = (old != new).any(dim=5).any(dim=3).any(dim=1).any(dim=0)[:3].nonzero().tolist()
            assert places == [[i, n % BLOCK] for i, n in enumerate(lengths) if n // BLOCK == j]
            assert bool(new[:, :, 3:].isnan().all())
    while engine.has_work():
        outputs += engine.step()
    expected = run(build_engine(build_model(0), None, max_model_len=256), *requests)
    by_request = {output.request: output for output in outputs}
    check_alike([by_request[one] for one in requests], list(expected))


def test_new_weights_leave_recordings_in_place() -> None:
    """An update writes into the same memory; only weights that have moved, or a moved cache, are recorded again."""
    recorder = TapeRecorder()
    engine = build_engine(build_model(0), recorder)
    prompts = [list(range(n, n + 5)) for n in range(4)]

    def check(seed: int, model: CausalLM, recorded: int) -> None:
        requests = [request(prompt, seed=seed) for prompt in prompts]
        found = run(engine, *requests)
        check_alike(
            [replace(output, versions=[]) for output in found],
            [replace(output, versions=[]) for output in run(build_engine(model, None), *requests)],
        )
        assert recorder.recorded == recorded

    check(0, build_model(0), 1)
    engine.load_weights(tensor_names(build_model(1)), 1)
    check(1, build_model(1), 1)
    weight = engine.model.model.layers[1].self_attn.o_proj.weight
    weight.data = weight.data.clone()
    engine.load_weights(tensor_names(build_model(2)), 2)
    check(2, build_model(2), 2)
    engine._blocks.cache._resize([column.shape[2] + 1 for column in engine._blocks.cache.blocks], [0], 0)
    check(3, build_model(2), 3)


def test_a_longer_sequence_leaves_the_columns_before_it_in_place() -> None:
    recorder = TapeRecorder()
    engine = build_engine(build_model(0), recorder)
    for longest, recorded in ((20, 1), (200, 2), (20, 2), (200, 2)):
        run(engine, *(request(draw_prompt(longest), seed=i) for i in range(2)))
        assert recorder.recorded == recorded


def test_norms_of_one_kernel_are_norms() -> None:
    """As on a GPU in fast mode; exact mode there keeps the trainer's operations."""
    requests = [request(draw_prompt(n), seed=n) for n in range(1, 5)]
    engine = build_engine(build_model(0), None)
    for part in (engine._decoder, *engine._decoder.layers):
        assert not part.fuse
        part.fuse = True
    check_alike(list(run(engine, *requests)), list(run(build_engine(build_model(0), None), *requests)))
    weight = torch.empty(1, device="meta")
    assert fuses_norms(weight, exact=False) and not fuses_norms(weight, exact=True)


def test_what_is_not_recorded() -> None:
    """Exact mode, a CPU, adapters, experts, long sequences, much that is shared, and little memory."""
    assert build_recorder(torch.device("cpu"), exact=False, eager=False) is None
    assert build_recorder(torch.device("cuda"), exact=True, eager=False) is None
    assert build_recorder(torch.device("cuda"), exact=False, eager=True) is None
    experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    assert not PreparedDecoder(build_model(0, **experts), False, torch.float32).is_static
    with pytest.raises(AssertionError, match="last bits"):
        EmbeddedEngine(build_model(0), exact=True, recorder=TapeRecorder())
    engine = build_engine(build_model(0), TapeRecorder(), max_cache_tokens=64 * BLOCK)
    assert engine._runner.graphs is not None
    graph_decoder = engine._runner.graphs

    def select(positions: np.ndarray, shared: int = 0) -> GraphDecode | None:
        metadata = decode_metadata(positions, np.full(len(positions), shared))
        return graph_decoder.build(metadata, len(positions))

    assert isinstance(select(np.full(4, 300)), GraphDecode)
    assert min(column.shape[2] for column in engine._blocks.cache.blocks[:3]) >= 4
    assert select(np.full(4, 60 * BLOCK)) is None
    assert select(np.full(16, 300)) is not None and select(np.full(17, 300)) is None
    assert select(np.full(4, 300), 2) is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "MAX_SHARED", 5)
        assert select(np.full(4, 300), 2) is None
        patch.setattr(graphs, "MAX_BLOCKS", 2)
        assert select(np.full(4, 300)) is None
    for name in "ab":
        engine.load_adapter(name, draw_adapter(0), AdapterSpec(2, 4.0, 0))
        engine.add(request([1, 2], adapter=name))
    for _ in range(3):
        engine.step()
    assert isinstance(engine._runner.batch.backend, EagerDecode)  # type: ignore[union-attr]


def draw_adapter(seed: int) -> dict[str, Tensor]:
    """One that changes the second part of two joined products, a product of its own, and nothing else."""
    draw = torch.Generator().manual_seed(seed)
    sizes = {"self_attn.k_proj": (32, 16), "mlp.up_proj": (32, 48), "mlp.down_proj": (48, 32)}
    return {
        f"base_model.model.model.layers.{layer}.{module}.lora_{kind}.weight": torch.randn(shape, generator=draw) / 3
        for layer in (0, 1)
        for module, (inputs, outputs) in sizes.items()
        for kind, shape in (("A", (2, inputs)), ("B", (outputs, 2)))
    }


def draw_wide_adapter(seed: int) -> dict[str, Tensor]:
    """One of the models whose heads have a size that kernels support."""
    draw = torch.Generator().manual_seed(seed)
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_{}.weight"
    return {name.format(kind): torch.randn(shape, generator=draw) for kind, shape in (("A", (2, 48)), ("B", (32, 2)))}


@pytest.mark.parametrize("module", ["model.layers.0.self_attn.q_proj", "lm_head"])
def test_logits_beside_an_adapter_are_wide(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`multiply_wide` computes them on a GPU, unless the adapter adds to the head's own product."""
    products: list[Tensor] = []

    def multiply_wide(x: Tensor, weight: Tensor, out: Tensor | None) -> Tensor:
        products.append(x @ weight.T)
        return products[-1]

    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(prepared_decoder, "widens", lambda x: True)
    monkeypatch.setattr(prepared_decoder, "multiply_wide", multiply_wide)
    decoder, hidden = PreparedDecoder(build_model(0), False, torch.float32), torch.randn(min_rows(), 32)
    delta = LoraDelta(torch.randn(2, 32), torch.randn(97, 2), 1.0)
    logits = decoder.logits(hidden, BatchDelta("a", {module: delta}))
    assert bool(products) == (module != "lm_head")
    change = delta.scale * hidden @ delta.a.T @ delta.b.T if module == "lm_head" else 0  # type: ignore[union-attr]
    torch.testing.assert_close(logits, decoder.logits(hidden) + change)


def test_an_adapter_of_all_rows_is_recorded() -> None:
    """New weights of the adapter are recorded again, and those of the other adapter or of none are not forgotten."""
    outputs = []
    for recorder in (TapeRecorder(), None):
        engine = build_engine(build_model(0), recorder)
        for seed, name in enumerate("ab"):
            engine.load_adapter(name, draw_adapter(seed), AdapterSpec(2, 4.0, seed))
        found = []
        for name in ("a", "b", None, "a"):
            found += run(engine, *(request([n, 2, 3], seed=n, adapter=name) for n in range(3)))
        assert recorder is None or recorder.recorded == 3
        engine.load_adapter("a", draw_adapter(2), AdapterSpec(2, 4.0, 2))
        for name in ("a", "b", None):
            found += run(engine, *(request([n, 2, 3], seed=n, adapter=name) for n in range(3)))
        assert recorder is None or recorder.recorded == 4
        outputs.append(found)
        engine.remove_adapter("a")
        graph_decoder = engine._runner.graphs
        assert graph_decoder is None or {key[2] for key in graph_decoder.steps} == {"b", None}
    assert check_alike(*(list(one) for one in outputs)) > 100
    texts = [tuple(output.token_ids for output in found[i : i + 3]) for i in range(0, 21, 3)]
    assert texts[0] == texts[3] and texts[1] == texts[5] and texts[2] == texts[6] and len(set(map(str, texts))) == 4


def test_batches_of_several_adapters_take_turns_with_recorded_ones() -> None:
    tensors = draw_adapter(0)
    outputs = []
    for recorder in (TapeRecorder(), None):
        engine = build_engine(build_model(0), recorder)
        engine.load_adapter("a", tensors, AdapterSpec(2, 4.0, 0))
        requests = [
            request([n, 2, 3], seed=n, max_tokens=8 + 8 * (n % 2), adapter=("a", None)[n % 2]) for n in range(4)
        ]
        outputs.append(run(engine, *requests))
        assert recorder is None or recorder.replayed == 16 - 8 - graphs.WARM_UPS
    check_alike(*(list(one) for one in outputs))


def test_few_recordings_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 1)
    recorder = TapeRecorder()
    engine = build_engine(build_model(0), recorder)
    for longest in (20, 200, 20):
        run(engine, request(draw_prompt(longest)))
    assert engine._runner.graphs is not None and len(engine._runner.graphs.steps) == 1 and recorder.recorded == 3


@pytest.mark.slow  # the meta device imports half a compiler
@torch.inference_mode()
def test_step_has_no_device_sync_and_no_foreign_tensor() -> None:
    """On the meta device there are no numbers to be had."""
    meta = torch.device("meta")
    runner = PreparedDecoder(build_model(0).to(meta), False, torch.float32)
    cache = KVCache(runner.model.config, torch.float32, meta, 8, 64 * BLOCK)
    assert cache.reserve([8, 8], 2 * BLOCK) and runner.addresses(512) and runner.min_rows == 1
    step, tape = CapturedStep(runner, cache, Buffers(runner, cache, 512), 8, 2, 512), Tape()
    with tape:
        assert step().shape == (8, 97)
    assert {t.device for call in tape.calls for t in tree_iter(call) if isinstance(t, Tensor)} == {meta}


def test_tape_rejects_uncapturable_operations() -> None:
    x = torch.arange(4)
    steps: list[Callable[[], Tensor]] = [
        lambda: x + int(x[1]),
        lambda: x[x > 1],
        lambda: x.nonzero(),
        lambda: x.to("meta"),
    ]
    for step in steps:
        with pytest.raises((AssertionError, RuntimeError)):
            TapeRecorder().record(step)
    host = 1
    frozen = TapeRecorder().record(lambda: x * 2 + host)
    host = 5
    x += 1
    assert frozen().tolist() == [3, 5, 7, 9]


def test_how_graphs_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stream of their own that waits for the caller's and is waited for, from one pool of memory."""
    reported: list[Any] = []

    class Stream:
        def __init__(self, name: Any) -> None:
            self.name = name

        def wait_stream(self, other: Any) -> None:
            reported.append(f"{self.name} waits for {other.name}")

    class Noted:
        def __init__(self, *words: Any, **options: Any) -> None:
            self.words = (words, options)

        def __enter__(self) -> None:
            reported.append(self.words)

        def __exit__(self, *error: Any) -> None:
            reported.append("end")

    count = iter(range(9))

    def new_graph() -> Any:
        name = next(count)
        return SimpleNamespace(name=name, pool=lambda: "pool", replay=lambda: reported.append(f"replay {name}"))

    cuda = SimpleNamespace(
        Stream=lambda device: Stream("side"),
        current_stream=lambda device: Stream("main"),
        stream=lambda stream: Noted(stream.name),
        CUDAGraph=new_graph,
        graph=lambda graph, **options: Noted(graph.name, options["pool"], options["capture_error_mode"]),
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    recorder = CudaRecorder(torch.device("cuda"))

    def step() -> Tensor:
        reported.append("step")
        return torch.ones(1)

    recorder.warm_up(step)
    assert reported == ["side waits for main", (("side",), {}), "step", "end", "main waits for side"]
    reported.clear()
    first, second = recorder.record(step), recorder.record(step)
    assert reported == [
        *(((0, None, "thread_local"), {}), "step", "end"),
        *(((1, "pool", "thread_local"), {}), "step", "end"),
    ]
    reported.clear()
    assert first() is first() and first() is not second()
    assert reported == ["replay 0", "replay 0", "replay 0", "replay 1"]


def test_benchmark_runs_on_a_toy_model_and_requires_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[4] / "benchmarks"))
    bench = importlib.import_module("bench_decode_gpu")
    assert bench.main(["--tiny", "--repeats", "1", "--output", str(tmp_path / "out.json")]) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert len(rows) == 10 and all(row["value"] > 0 for row in rows)
    if not torch.cuda.is_available():
        assert bench.main([]) == 1
        assert "needs a GPU" in capsys.readouterr().err


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The kernel of a decode step in Triton's interpreter, on the CPU; returns the numbers of rows of its calls."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("no triton; cure: make test-extras")
    from rollouts.kernels import gpu

    calls: list[int] = []

    def attend_step(*arguments: Any) -> Tensor:
        calls.append(arguments[0].shape[0])
        return gpu.attend_step(*arguments)

    for module in (graphs, engine_module):
        monkeypatch.setattr(module, "find_decode_kernels", lambda *_: SimpleNamespace(attend_step=attend_step))
    return calls


def test_paged_steps_equal_eager_steps(interpreted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several lengths, that reach their next block at different steps; two share a prefix in memory."""
    shape = SMALL | {"num_attention_heads": 4, "num_key_value_heads": 2}
    shared = draw_prompt(130)
    prompts = [draw_prompt(1), draw_prompt(127), shared, draw_prompt(126), [*shared, 5, 6]]
    requests = [request(prompt, seed=i, max_tokens=4, ignore_eos=True) for i, prompt in enumerate(prompts)]
    recorder = SimpleNamespace(warm_up=lambda step: step(), record=lambda step: step)
    engine = build_engine(build_model(0, **shape), recorder)
    found = run(engine, *requests)
    assert interpreted and not engine._blocks.is_contiguous and engine.stats().shared_prompt_tokens
    monkeypatch.undo()
    assert check_alike(found, run(build_engine(build_model(0, **shape), None), *requests)) == 20


def test_decoding_after_a_longer_prompt_was_scored(interpreted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that are only scored may exceed `max_model_len`: no step reads the further blocks that they allocate."""
    scored = request(draw_prompt(300), max_tokens=0, prompt_logprobs=0)
    requests = [request(draw_prompt(n), seed=n, max_tokens=6, ignore_eos=True) for n in (9, 100)]
    recorder = SimpleNamespace(warm_up=lambda step: step(), record=lambda step: step)
    engine = build_engine(build_model(0, **SMALL), recorder, max_model_len=120)
    found = run(engine, scored, *requests)
    assert interpreted and len(engine._blocks.cache.blocks) == 3
    monkeypatch.undo()
    expected = run(build_engine(build_model(0, **SMALL), None, max_model_len=120), *requests)
    assert check_alike(found[1:], expected) == 12


def test_paged_steps_under_arrivals_cancellations_and_updates(
    interpreted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each output has the tokens that its request has alone, up to the first update."""
    models = [build_model(version, **SMALL) for version in range(3)]
    versions = [tensor_names(build_model(version, **SMALL)) for version in (1, 2)]
    recorder = SimpleNamespace(warm_up=lambda step: step(), record=lambda step: step)
    engine = build_engine(build_model(0, **SMALL), recorder, max_running=8)
    started: list[int] = []
    hand_over = engine._runner._hand_over

    def note(*arguments: Any) -> Any:
        sampled = hand_over(*arguments)
        started.append(len(engine._runner.in_flight))
        return sampled

    monkeypatch.setattr(engine._runner, "_hand_over", note)
    found = [output for output in drive(engine, 0, 80, versions) if output is not None]
    monkeypatch.undo()
    num = 0
    for version, model in enumerate(models):
        mine = [output for output in found if output.versions[0][1] == version]
        ends = [output.versions[1][0] if len(output.versions) > 1 else len(output.token_ids) for output in mine]
        alone = run(build_engine(model, None), *(output.request for output in mine))
        pairs = [(a.token_ids[:end], b.token_ids[:end]) for a, b, end in zip(mine, alone, ends, strict=True)]
        assert [a for a, _ in pairs] == [b for _, b in pairs]
        num += sum(ends)
    assert {output.versions[0][1] for output in found} == {0, 1, 2}
    assert num > 50 and interpreted and sum(n > 0 for n in started) > len(started) / 4


@pytest.mark.parametrize("event", ["none", "update", "adapter", "cancel", "arrival", "full"])
def test_steps_that_are_started_ahead(interpreted: list[int], event: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step is started before the tokens of one are handled; whatever happens then, the tokens are the same."""
    shape = SMALL | {"num_hidden_layers": 2} if event == "adapter" else SMALL
    newer = tensor_names(build_model(1, **shape))
    outputs, starts = [], []
    for recorder in (SimpleNamespace(warm_up=lambda step: step(), record=lambda step: step), None):
        if recorder is None:
            monkeypatch.undo()
        engine = build_engine(build_model(0, **shape), recorder, enable_prefix_caching=False)
        if event == "full" and recorder is not None:
            engine._blocks._max_pages = 5  # type: ignore[attr-defined]
        lengths = (120, 125, 123) if event == "full" else (9, 12, 40)
        params: dict[str, Any] = {"ignore_eos": True, "adapter": None}
        if event == "adapter":
            engine.load_adapter("a", draw_wide_adapter(0), AdapterSpec(2, 4.0, 0))
            params["adapter"] = "a"
        requests = [request(draw_prompt(n), seed=n, max_tokens=12 - i, **params) for i, n in enumerate(lengths)]
        for one in requests:
            engine.add(one)
        found: dict[GenerationRequest, Output] = {}
        ahead = []
        for step in itertools.count():
            if step == 4 and event == "update":
                engine.load_weights(newer, 1)
                assert not engine._runner.in_flight
            if step == 4 and event == "adapter":
                engine.load_adapter("a", draw_wide_adapter(1), AdapterSpec(2, 4.0, 1))
                assert not engine._runner.in_flight
            if step == 4 and event == "cancel":
                engine.cancel(requests.pop(1))
            if step == 4 and event == "arrival":
                requests.append(request(draw_prompt(7), seed=1))
                engine.add(requests[-1])
            found |= {output.request: output for output in engine.step() if isinstance(output, Output)}
            ahead.append(len(engine._runner.in_flight))
            if not engine.has_work():
                break
        outputs.append([found[one] for one in requests])
        starts.append(sum(num > 0 for num in ahead))
        assert recorder is None or 3 in ahead, ahead
        assert event != "full" or recorder is None or engine.stats().preempted
    assert starts[0] > 5 and not starts[1]
    assert check_alike(*(list(one) for one in outputs)) > 20


@pytest.mark.parametrize(
    "params",
    [{"top_p": 0.9, "return_support": True}, {"top_logprobs": 2}, {"logit_bias": ((3, 1.0),)}, {"min_tokens": 3}],
    ids=str,
)
def test_no_step_is_started_before_the_host_has_what_it_needs(interpreted: list[int], params: dict[str, Any]) -> None:
    recorder = SimpleNamespace(warm_up=lambda step: step(), record=lambda step: step)
    engine = build_engine(build_model(0, **SMALL), recorder)
    for n, more in ((5, params), (7, {})):
        engine.add(request(draw_prompt(n), seed=n, stop_token_ids=(96,), **more))
    while engine.has_work():
        engine.step()
        assert not engine._runner.in_flight or len(engine._scheduler.running) < 2
    assert interpreted


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [0, 1])
def test_graphs_equal_eager_steps_on_a_gpu(seed: int) -> None:
    device = torch.device("cuda")
    versions = [tensor_names(build_model(version)) for version in (1, 2)]
    outputs = []
    for recorder in (CudaRecorder(device), None):
        engine = build_engine(build_model(0).to(device), recorder, max_running=20)
        outputs.append(drive(engine, seed, (40, 300)[seed], versions))
        assert recorder is None or any(held.replay for held in engine._runner.graphs.steps.values())  # type: ignore[union-attr]
    check_alike(outputs[0], outputs[1], atol=1e-4)


@pytest.mark.gpu
def test_gpu_graphs_stay_correct_after_updates_and_moved_memory() -> None:
    device = torch.device("cuda")
    engine = build_engine(build_model(0).to(device), CudaRecorder(device))
    for version in range(1, 6):
        engine.load_weights(tensor_names(build_model(version)), version)
        n = 2**version
        requests = [request(list(range(i, i + 20)) * version, seed=i, max_tokens=20) for i in range(n)]
        found = run(engine, *requests)
        eager = build_engine(build_model(version).to(device), None)
        check_alike(
            [replace(output, versions=[]) for output in found],
            [replace(output, versions=[]) for output in run(eager, *requests)],
            atol=1e-4,
        )
