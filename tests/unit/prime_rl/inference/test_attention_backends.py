"""Every path through the engine's attention gives the trainer's log-probs, bit for bit in exact mode."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from prime_rl.inference.embedded import adapters, model_runner, scheduler
from prime_rl.inference.embedded.attention import DecodeBackend
from prime_rl.inference.embedded.cuda_graphs import GraphDecode, Step
from prime_rl.inference.embedded.engine import EmbeddedEngine
from prime_rl.inference.embedded.fused_decode import FusedDecode
from prime_rl.inference.embedded.kv_cache import BLOCK
from prime_rl.inference.embedded.model_runner import EagerDecode, GatheredDecode
from prime_rl.inference.engine import AdapterSpec, GenerationRequest, Output, SamplingParams
from prime_rl.trainer.lora import LoraSpec, adapter_tensors, add_lora, peft_tensors
from prime_rl.trainer.models.attention import PackedAttention, RoundedAttention, has_kernel_bits
from prime_rl.trainer.models.causal_lm import CausalLM, init_weights, tensor_names
from prime_rl.trainer.models.decoder_config import DecoderConfig
from prime_rl.trainer.models.registry import MODEL_CLASSES
from rollouts.kernels import cpu as cpu_kernels
from rollouts.kernels import native
from rollouts.kernels.linear import linear
from rollouts.kernels.log_softmax import log_softmax
from rollouts.training.numerics import MIN_TOKENS

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = {
    "model_type": "qwen3", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024,
    "tie_word_embeddings": True, "initializer_range": 0.3,
}  # fmt: skip
MODELS = {
    "qwen3": CONFIG,
    "smollm3": {**CONFIG, "model_type": "smollm3", "no_rope_layers": [1, 0]},
    "gemma3": {**CONFIG, "model_type": "gemma3_text", "sliding_window": 50, "sliding_window_pattern": 2},
}
WIDE = {"wide heads": {**CONFIG, "head_dim": 32}}
"""Heads that bf16 instructions support."""


class Rerun:
    """Captured steps are computed again."""

    def warm_up(self, step: Step) -> torch.Tensor:
        return step()

    def record(self, step: Step) -> Step:
        return step


@dataclass(frozen=True)
class Path:
    """Engine options, prompts, and what must have happened."""

    backend: type[DecodeBackend]
    max_tokens: int = 20
    prompts: str = "different"
    tolerance: float = 0.0
    least_shared: int = 0
    least_preempted: int = 0
    options: dict[str, Any] = field(default_factory=dict)


def build_paths(backend: type[DecodeBackend]) -> dict[str, Path]:
    return {
        "prefill": Path(backend, max_tokens=1),
        "chunked prefill": Path(backend, max_tokens=1, options={"max_num_batched_tokens": 64}),
        "decode over a block's end": Path(backend, max_tokens=60),
        "shared prefixes": Path(backend, prompts="group", least_shared=2 * 270),
        "shared whole blocks": Path(backend, prompts="aligned group", least_shared=2 * 255),
        "continued prefixes": Path(backend, prompts="continued", least_shared=200),
        "preemption": Path(
            backend, max_tokens=60, least_preempted=1, options={"max_model_len": 512, "max_cache_tokens": 1}
        ),
    }


PATHS = {
    **{f"eager: {name}": path for name, path in build_paths(EagerDecode).items()},
    **{f"fused: {name}": path for name, path in build_paths(FusedDecode).items()},
    "graph": Path(GraphDecode, max_tokens=60, tolerance=1e-4, options={"exact": False, "recorder": Rerun()}),
    "graph: shared prefixes": Path(
        GraphDecode, prompts="group", tolerance=1e-4, least_shared=540, options={"exact": False, "recorder": Rerun()}
    ),
}


def build_model(name: str) -> CausalLM:
    config = DecoderConfig.from_hf((MODELS | WIDE)[name])
    model = MODEL_CLASSES.get(config.model_type, CausalLM)(config)
    init_weights(model, 0)
    return model.requires_grad_(False)


def run(
    engine: EmbeddedEngine, prompts: list[list[int]], max_tokens: int, adapters: tuple[str | None, ...] = (None,)
) -> tuple[list[Output], set[type]]:
    """Outputs, and the decode backends that computed them; the adapters take turns."""
    for seed, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=max_tokens, seed=seed, temperature=0.8)
        engine.add(GenerationRequest(prompt, params, adapter=adapters[seed % len(adapters)]))
    outputs: list[Output] = []
    backends: set[type] = set()
    while engine.has_work():
        outputs += [event for event in engine.step() if isinstance(event, Output)]
        if engine._runner.batch is not None:
            backends.add(type(engine._runner.batch.backend))
    return outputs, backends


def draw_prompts(kind: str, engine: EmbeddedEngine) -> list[list[int]]:
    rng = random.Random(0)
    first = rng.choices(range(128), k=280)
    if kind == "group":
        return [first, first, [*first[:270], 7]]
    if kind == "aligned group":
        return [first[: 2 * BLOCK]] * 3
    if kind == "continued":
        (output,), _ = run(engine, [first], 4)
        return [[*first, *output.token_ids, 5, 6]]
    # A long one, whose growth needs memory that newer ones hold if it is short.
    return [rng.choices(range(128), k=length) for length in (250, 120, 90, *range(1, 30, 2))]


@torch.no_grad()
def check_trainer(output: Output, model: CausalLM, tolerance: float, dtype: torch.dtype = torch.float32) -> None:
    """Log-probs equal those of a trainer with these weights, whose keys and values are rounded to `dtype`."""
    tokens = [*output.request.prompt, *output.token_ids]
    length = len(tokens)
    tokens += [0] * (MIN_TOKENS - length)  # a trainer's pack is never shorter
    model.round_inputs(dtype)
    attend = RoundedAttention(PackedAttention([len(tokens)], rounded=model.rounds_inputs), dtype)
    hidden = model(torch.tensor(tokens), torch.arange(len(tokens)), attend)
    scale = torch.full((len(tokens), 1), output.request.params.temperature)
    logits = linear(hidden, model.lm_head.weight, rounded=True) if model.rounds_inputs else model.logits(hidden)
    logprobs = log_softmax(logits.float() / scale)
    rows = torch.arange(len(output.request.prompt), length) - 1
    expected = logprobs[rows, torch.tensor(output.token_ids)]
    torch.testing.assert_close(torch.tensor(output.logprobs), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("model_name", MODELS)
@pytest.mark.parametrize("name", PATHS)
def test_path_equals_the_trainer(name: str, model_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = PATHS[name]
    if path.backend is FusedDecode and native.library() is None:
        pytest.skip("no C compiler; cure: apt-get install gcc")
    if path.backend is EagerDecode:
        monkeypatch.setattr(native, "library", lambda: None)
    model, engine = build_model(model_name), EmbeddedEngine(build_model(model_name), **path.options)
    outputs, backends = run(engine, draw_prompts(path.prompts, engine), path.max_tokens)
    backend = EagerDecode if model_name == "gemma3" else path.backend
    assert backends == {backend} if path.max_tokens > 1 else not backends
    stats = engine.stats()
    assert stats.shared_prompt_tokens >= path.least_shared and stats.preempted >= path.least_preempted
    for output in outputs:
        check_trainer(output, model, path.tolerance)


@pytest.mark.skipif(native.library() is None, reason="no C compiler; cure: apt-get install gcc")
@pytest.mark.parametrize("name", ["chunked prefill", "decode over a block's end", "shared prefixes"])
def test_path_in_bfloat16_equals_the_trainer(name: str) -> None:
    """With the inputs of products rounded where the CPU has instructions for it, and in fp32 elsewhere."""
    path, bf16 = build_paths(FusedDecode)[name], torch.bfloat16
    engine = EmbeddedEngine(build_model("wide heads").to(bf16), **path.options)
    assert engine.arithmetic == (cpu_kernels.name_bf16_instructions() if has_kernel_bits(32) else "")
    outputs, _ = run(engine, draw_prompts(path.prompts, engine), path.max_tokens)
    for output in outputs:
        check_trainer(output, build_model("wide heads").to(bf16).float(), 0.0, bf16)


INT8 = pytest.param(
    *("qwen3", {"exact": False, "quantization": "int8"}),
    marks=pytest.mark.skipif(native.library() is None, reason="no C compiler; cure: apt-get install gcc"),
)


@pytest.mark.skipif(native.library() is None, reason="no C compiler; cure: apt-get install gcc")
@pytest.mark.parametrize(
    ("dtype", "options"),
    [("float32", {}), ("bfloat16", {}), ("bfloat16", {"exact": False}), ("float32", INT8.values[1])],
)
def test_short_prompts_are_computed_by_the_decode_kernel(
    dtype: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row for each of their tokens, with the bits of a pass over chunks; and so are continued ones."""
    steps: list[tuple[int, int]] = []

    class Recorded(FusedDecode):
        def __init__(self, decoder: Any, cache: Any, metadata: Any, changes: Any = None, wanted: Any = None) -> None:
            super().__init__(decoder, cache, metadata, changes, wanted)
            steps.extend([] if wanted is None else [(len(metadata.slots), len(wanted))])

    monkeypatch.setattr(model_runner, "FusedDecode", Recorded)
    rng = random.Random(0)
    first = rng.choices(range(128), k=260)
    prompts = [[*first, 5], *(rng.choices(range(128), k=length) for length in (1, 9, 30, 16, 2, 40)), [*first, 6, 7, 8]]
    outputs = []
    for most in (scheduler.MAX_CHUNK_ROWS, 0):
        monkeypatch.setattr(scheduler, "MAX_CHUNK_ROWS", most)
        engine = EmbeddedEngine(build_model("qwen3").to(getattr(torch, dtype)), **options)
        held = [output for prompt in prompts for output in run(engine, [prompt], 3)[0]]
        outputs.append([*held, *run(engine, [[100, *prompt] for prompt in prompts[1:5]], 3)[0]])
        assert steps == [(1, 1), (9, 1), (30, 1), (16, 1), (2, 1), (40, 1), (3, 1), (60, 4)]
    assert [(o.token_ids, o.logprobs) for o in outputs[0]] == [(o.token_ids, o.logprobs) for o in outputs[1]]


def build_adapted(
    model_name: str,
    packs: bool,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[CausalLM, CausalLM, EmbeddedEngine]:
    """A model, the same with an adapter, and an engine that serves it as "a", in the kernel only if it `packs`."""
    if not packs:
        monkeypatch.setattr(adapters, "pack_adapter", lambda changes, num_layers: None)
    model, adapted = (build_model(model_name).to(dtype).float() for _ in range(2))
    engine = EmbeddedEngine(build_model(model_name).to(dtype), **options)
    add_lora(adapted, LoraSpec(4, 8.0), 1)
    for tensor in adapter_tensors(adapted).values():
        tensor.data.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(2)), alpha=0.1)
        tensor.data.copy_(tensor.data.to(dtype))
    engine.load_adapter("a", peft_tensors(adapted), AdapterSpec(4, 8.0, 0))
    return model, adapted, engine


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize(
    ("model_name", "options"),
    [*((name, {}) for name in MODELS), ("wide heads", {"dtype": torch.bfloat16}), INT8],
    ids=str,
)
def test_adapter_equals_its_trainer(
    model_name: str, options: dict[str, Any], packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, adapted, engine = build_adapted(model_name, packs, monkeypatch, **options)
    outputs, backends = run(engine, draw_prompts("different", engine), 20, (None, "a"))
    if model_name == "gemma3" or native.library() is None:
        assert backends == {EagerDecode}
    elif packs:
        assert backends == {FusedDecode}
    else:  # without rows of the adapter at the end
        assert backends == {GatheredDecode, FusedDecode} or backends == {GatheredDecode}
    assert {output.request.adapter for output in outputs} == {None, "a"}
    for output in outputs:
        one, dtype = adapted if output.request.adapter else model, options.get("dtype", torch.float32)
        check_trainer(output, one, 0.5 if "quantization" in options else 0.0, dtype)


@pytest.mark.skipif(native.library() is None, reason="no C compiler; cure: apt-get install gcc")
@pytest.mark.parametrize("packs", [True, False])
def test_a_short_prompt_joins_decoding_with_packed_adapters(packs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a pass over chunks would pad the decoding sequences to its length."""
    model, adapted, engine = build_adapted("qwen3", packs, monkeypatch)
    sizes: list[int] = []
    compute = engine._runner.run

    def record(batch: scheduler.ScheduledBatch) -> Any:
        sizes.append(len(batch.chunks))
        return compute(batch)

    monkeypatch.setattr(engine._runner, "run", record)
    engine.add(GenerationRequest([1, 2, 3], SamplingParams(max_tokens=8, temperature=0.8), adapter="a"))
    for _ in range(3):
        engine.step()
    outputs, _ = run(engine, [[4, 5, 6, 7, 8]], 4)
    assert sizes[:4] == [1, 0, 0, 2 if packs else 1] and len(outputs) == 2
    for output in outputs:
        check_trainer(output, adapted if output.request.adapter else model, 0.0)


def test_new_weights_equal_the_trainer() -> None:
    """Gemma 3 runs the model's own layers, but a packed head."""
    model, engine = build_model("gemma3"), EmbeddedEngine(build_model("gemma3"))
    init_weights(model, 1)
    engine.load_weights({name: tensor.clone() for name, tensor in tensor_names(model).items()}, 1)
    outputs, _ = run(engine, draw_prompts("different", engine), 8)
    for output in outputs:
        check_trainer(output, model, 0.0)
