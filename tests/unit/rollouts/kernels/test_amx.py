"""AMX products, by an emulation of the instructions: right, batch-invariant, and checked before they are used."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from prime_rl.inference.embedded.engine import EmbeddedEngine
from prime_rl.inference.engine import GenerationRequest, Output, SamplingParams
from prime_rl.trainer.models.causal_lm import CausalLM, init_weights, swiglu
from prime_rl.trainer.models.decoder_config import DecoderConfig
from rollouts.kernels import cpu as cpu_kernels
from rollouts.kernels import native
from rollouts.kernels.cpu import PackedWeight

HEADER = Path(__file__).with_name("emulated_amx.h")
MACROS = ["-D__AMX_TILE__", "-D__AMX_BF16__", "-D__AMX_INT8__"]


def has_dots() -> bool:
    kernels = native.library()
    return kernels is not None and bool(kernels.has_dots())


pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not has_dots(), reason="CPU without AVX512_BF16, or no C compiler; cure: such a CPU, and gcc"),
]


def compile_with(cache_dir: Path, *flags: str) -> ctypes.CDLL:
    """The kernels with further flags, without optimization."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "FLAGS", ["-O0" if flag == "-O3" else flag for flag in native.FLAGS] + [*flags])
        patch.setenv("XDG_CACHE_HOME", str(cache_dir))
        library = native._load.__wrapped__()
    assert library is not None
    return library


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels compiled for AMX, which is emulated."""
    library = compile_with(tmp_path_factory.mktemp("cache"), *MACROS, "-include", str(HEADER))
    assert library.enable_amx(1)
    library.emulation_error.restype = ctypes.c_char_p
    library.emulated_products.restype = library.configured_threads.restype = ctypes.c_int64
    library.watch.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.emulate.argtypes = [ctypes.c_int64, ctypes.c_int64]
    return library


@pytest.fixture
def kernels(compiled: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    """The emulation as the kernels of this process: a test must use it, and without any invalid access."""
    monkeypatch.setattr(native, "library", lambda: compiled)
    monkeypatch.setattr(native, "call", watched(native.call, compiled))
    compiled.emulate(0, 0)
    assert compiled.enable_amx(1)
    before = compiled.emulated_products()
    yield compiled
    assert compiled.emulation_error() == b""
    assert compiled.emulated_products() > before and compiled.configured_threads() == 0


def watched(call: Any, library: ctypes.CDLL) -> Any:
    """`call`, with products that may access no other memory than their tensors, where nothing of use is left."""

    def inner(name: str, *arguments: Any) -> None:
        tensors = [x for x in arguments if isinstance(x, Tensor)] if name == "linear" else []
        for out in tensors[-2:]:  # output and scratch
            out.fill_(float("nan"))
        for tensor in tensors:
            library.watch(tensor.data_ptr(), tensor.nbytes)
        call(name, *arguments)
        library.watch(None, 0)

    return inner


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


SHAPES = [(32, 64), (64, 320), (100, 96), (99, 70), (576, 16), (7, 130)]
ROWS = range(1, 71)


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_products_for_any_number_of_rows(kernels: ctypes.CDLL, inputs: int, outputs: int, threads: int) -> None:
    torch.set_num_threads(threads)
    weight, bias, x = draw(outputs, inputs).bfloat16(), draw(outputs, seed=1), draw(70, inputs, seed=2)
    packed = PackedWeight(weight, rounded=True)
    assert packed.format == native.DOTS
    whole = packed(x, bias)
    expected = F.linear(x.bfloat16().double(), weight.double(), bias.double())
    torch.testing.assert_close(whole.double(), expected, rtol=1e-5, atol=1e-4)
    for rows in ROWS if threads == 1 else ROWS[::7]:
        assert torch.equal(packed(x[:rows], bias), whole[:rows])


@pytest.mark.parametrize(("inputs", "inner"), [(64, 96), (100, 70), (36, 10)])
def test_paired_and_gated_products(kernels: ctypes.CDLL, inputs: int, inner: int) -> None:
    weight, bias, x = draw(2 * inner, inputs).bfloat16(), draw(2 * inner, seed=1), draw(50, inputs, seed=2)
    plain, paired = (PackedWeight(weight, paired=paired, rounded=True) for paired in (False, True))
    for rows in (1, 16, 17, 33, 50):
        expected = plain(x[:rows], bias)
        assert torch.equal(paired(x[:rows], bias), expected)
        assert torch.equal(paired(x[:rows], bias, gated=True), swiglu(*expected.chunk(2, dim=1)))


def test_long_products_in_batches(kernels: ctypes.CDLL) -> None:
    packed, x = PackedWeight(draw(70, 64).bfloat16(), rounded=True), draw(490, 64, seed=1)
    assert torch.equal(packed(x)[470:], packed(x[470:]))


@pytest.mark.parametrize("outputs", [33_024, 33_001])
@pytest.mark.parametrize("quantized", [False, True])
def test_products_written_past_the_caches(kernels: ctypes.CDLL, outputs: int, quantized: bool) -> None:
    """As logits of many rows are: in whole lines, where the rows of the output begin with one."""
    weight, x = draw(outputs, 32), draw(33, 32, seed=1)
    packed = PackedWeight(weight if quantized else weight.bfloat16(), quantized=quantized, rounded=not quantized)
    assert torch.equal(packed(x), torch.cat((packed(x[:20]), packed(x[20:]))))


@pytest.mark.parametrize(("inputs", "outputs", "paired"), [(64, 320, False), (99, 70, False), (200, 140, True)])
def test_int8_products_have_the_bits_of_other_instructions(
    kernels: ctypes.CDLL, inputs: int, outputs: int, paired: bool
) -> None:
    packed, x = PackedWeight(draw(outputs, inputs), paired=paired, quantized=True), draw(40, inputs, seed=1)
    kernels.enable_amx(0)
    expected = packed(x)
    kernels.enable_amx(1)
    for rows in (1, 5, 16, 17, 33, 40):
        assert torch.equal(packed(x[:rows]), expected[:rows])


def test_nan_stays_in_its_row(kernels: ctypes.CDLL) -> None:
    x = draw(40, 99)
    x[17, 3] = float("nan")
    for packed in (
        PackedWeight(draw(64, 99).bfloat16(), rounded=True),
        PackedWeight(draw(64, 99), quantized=True),
    ):
        is_nan = packed(x).isnan().any(1)
        assert is_nan.nonzero().flatten().tolist() == [17]


def attend_in_fp64(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Causal attention of one sequence by its definition."""
    keys, values = (x[0].repeat_interleave(q.shape[2] // k.shape[2], dim=1).double() for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q[0].double(), keys) * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    if window is not None:
        hidden |= torch.ones_like(hidden).tril(-window)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 64), (2, 1, 128), (3, 3, 96), (8, 1, 32)])
@pytest.mark.parametrize(("keys", "window"), [(16, None), (80, None), (208, None), (208, 30)])
def test_attention_of_many_queries(
    kernels: ctypes.CDLL, heads: int, kv_heads: int, dim: int, keys: int, window: int | None
) -> None:
    """Close to fp64, and with the same bits for any part of the queries."""
    q = draw(1, keys, heads, dim)
    k, v = (draw(1, keys, kv_heads, dim, seed=i).bfloat16().float() for i in (1, 2))
    found, log_sums = cpu_kernels.causal_attention(q, k, v, torch.zeros(1, dtype=torch.long), window, rounded=True)
    expected = attend_in_fp64(q, k, v, window)
    assert (found[0] - expected).norm() < 0.004 * expected.norm()
    for start in (keys // 3, keys - 1):
        part = cpu_kernels.causal_attention(q[:, start:], k, v, torch.tensor([start]), window, rounded=True)
        assert torch.equal(part[0], found[:, start:]) and torch.equal(part[1], log_sums[..., start:])


def build(head_dim: int = 32, layers: int = 2, heads: int = 4, kv_heads: int = 2) -> CausalLM:
    """A tiny decoder; other sizes are no multiple of what a tile holds."""
    config = {
        "model_type": "qwen3",
        "vocab_size": 90,
        "hidden_size": 40,
        "intermediate_size": 60,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "initializer_range": 0.15,
    }
    model = CausalLM(DecoderConfig.from_hf(config))
    init_weights(model, 0)
    return model.bfloat16().requires_grad_(False)


def draw_prompt(length: int) -> list[int]:
    return torch.randint(90, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def generate(engine: EmbeddedEngine, *requests: GenerationRequest) -> list[Output]:
    for one in requests:
        engine.add(one)
    outputs: dict[GenerationRequest, Output] = {}
    while engine.has_work():
        outputs |= {event.request: event for event in engine.step() if isinstance(event, Output)}
    return [outputs[one] for one in requests]


def score(engine: EmbeddedEngine, output: Output) -> list[float]:
    """The log-probs of generated tokens as those of a prompt."""
    prompt, start = [*output.request.prompt, *output.token_ids], len(output.request.prompt)
    params = SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_start=start)
    found = generate(engine, GenerationRequest(prompt, params))[0].prompt_logprobs
    assert found is not None
    return list(found.logprobs)


def test_decode_steps_and_prefill_agree_in_any_batch(kernels: ctypes.CDLL) -> None:
    engine = EmbeddedEngine(build(), exact=False, max_model_len=128, enable_prefix_caching=False)
    assert engine._decoder.fused is not None and engine._decoder.fused.shape.format == native.DOTS
    requests = [
        GenerationRequest([3, 1 + i, 4, 1, 5][: 2 + i % 4], SamplingParams(max_tokens=5, seed=i)) for i in range(19)
    ]
    outputs = generate(engine, *requests)
    kernels.enable_amx(0)
    for output in outputs:
        assert score(engine, output) == pytest.approx(output.logprobs, abs=0.03)
    kernels.enable_amx(1)
    for output in outputs[::9]:
        assert generate(engine, output.request)[0].logprobs == output.logprobs
        assert score(engine, output) == list(output.logprobs)


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
def test_decode_steps_and_prefill_agree_on_this_cpu(head_dim: int) -> None:
    """By its own instructions, with contexts of several blocks of the cache, some of them shared.

    Products round their inputs to bf16, which shows one of 65,536 differences of a last bit: so many tokens and layers.
    """
    engine = EmbeddedEngine(build(head_dim, 6), exact=False, max_model_len=512, enable_prefix_caching=False)
    assert engine._decoder.fused is not None and engine.model.rounds_inputs
    prompts = [draw_prompt(length) for length in (3, 40, 130, 300)]
    requests = [GenerationRequest(prompts[i // 2], SamplingParams(max_tokens=150, seed=i)) for i in range(8)]
    for output in generate(engine, *requests):
        assert score(engine, output) == list(output.logprobs)


@torch.inference_mode()
@pytest.mark.parametrize("head_dim", [32, 64])
def test_memory_behind_the_last_key_is_not_read(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EmbeddedEngine(build(head_dim), exact=False, max_model_len=256, enable_prefix_caching=False)
    requests = [GenerationRequest(draw_prompt(length), SamplingParams(max_tokens=9, seed=1)) for length in (3, 60, 135)]
    expected = [output.logprobs for output in generate(engine, *requests)]
    cache = engine._blocks.cache
    assert cache.blocks
    for block in cache.blocks:
        block.fill_(float("nan"))
    monkeypatch.setattr(cache, "clear_page", lambda *_: None)
    assert [output.logprobs for output in generate(engine, *requests)] == expected


@pytest.mark.parametrize("heads", [16, 20, 40])
def test_many_queries_of_one_key_head(heads: int) -> None:
    """More than a tile has rows: in several, of which the last overlaps."""
    engine = EmbeddedEngine(build(32, 6, heads, 1), exact=False, max_model_len=256, enable_prefix_caching=False)
    requests = [GenerationRequest(draw_prompt(length), SamplingParams(max_tokens=40, seed=1)) for length in (3, 110)]
    for output in generate(engine, *requests):
        assert score(engine, output) == list(output.logprobs)


def compare_groups(model: Callable[[], CausalLM], lengths: list[int], group: int, new: int) -> None:
    """Groups of one prompt, whose blocks in common are multiplied for all of a group, have the bits of prefill."""
    engine = EmbeddedEngine(model(), exact=False, max_model_len=512)
    alone = EmbeddedEngine(model(), exact=False, max_model_len=512, enable_prefix_caching=False)
    prompts = [draw_prompt(length) for length in lengths for _ in range(group)]
    prompts.append(prompts[-1][:130] + draw_prompt(170))  # only its first block is the group's
    requests = [GenerationRequest(prompt, SamplingParams(max_tokens=new, seed=i)) for i, prompt in enumerate(prompts)]
    for output in generate(engine, *requests):
        assert score(alone, output) == list(output.logprobs)


def test_groups_in_emulation(kernels: ctypes.CDLL) -> None:
    compare_groups(build, [140], 5, 3)


@pytest.mark.parametrize(("head_dim", "threads"), [(32, 1), (64, 2), (96, 2), (128, 1)])
def test_groups_on_this_cpu(head_dim: int, threads: int) -> None:
    torch.set_num_threads(threads)
    compare_groups(lambda: build(head_dim, 6), [90, 130, 254, 300], 9, 20)


def test_code_for_amx_runs_where_linux_refuses_it(tmp_path: Path) -> None:
    """With the compiler's own AMX instructions; other instructions are used on a CPU without AMX."""
    library = compile_with(tmp_path, "-mamx-tile", "-mamx-bf16", "-mamx-int8")
    has_amx = "amx_bf16" in native.processor()
    assert library.enable_amx(1) == has_amx
    x, weight = draw(5, 64), draw(70, 64, seed=1).bfloat16()
    found = native._multiply(library, x, weight, native.DOTS)
    torch.testing.assert_close(found, F.linear(x.bfloat16().float(), weight.float()), rtol=1e-5, atol=1e-4)


def test_refused_permission_leaves_other_instructions(kernels: ctypes.CDLL) -> None:
    packed, x = PackedWeight(draw(70, 64).bfloat16(), rounded=True), draw(5, 64, seed=1)
    expected = packed(x)
    kernels.emulate(1, 0)
    native._enable_amx(kernels)
    before = kernels.emulated_products()
    torch.testing.assert_close(packed(x), expected, rtol=1e-5, atol=1e-4)
    assert kernels.emulated_products() == before


def test_wrong_products_are_found_and_not_used(kernels: ctypes.CDLL, caplog: pytest.LogCaptureFixture) -> None:
    packed, x = PackedWeight(draw(70, 64).bfloat16(), rounded=True), draw(5, 64, seed=1)
    expected = packed(x)
    with caplog.at_level(logging.WARNING):
        native._enable_amx(kernels)
        assert not caplog.records and torch.equal(packed(x), expected)
        kernels.emulate(0, 1)
        assert not torch.allclose(packed(x), expected, atol=0.5)
        native._enable_amx(kernels)
    assert [record.message for record in caplog.records] == [
        "AMX products of this CPU are wrong, so they are not used: please report this"
    ]
    torch.testing.assert_close(packed(x), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("which", "error"), [(1, b"load"), (2, b"store"), (3, b"load")])
def test_emulation_detects_access_beyond_memory(compiled: ctypes.CDLL, which: int, error: bytes) -> None:
    """Of packed weight, output and rounded rows."""
    x, weight = draw(5, 64), draw(64, 64).bfloat16()
    tensors = [x, torch.empty(64 * 64, dtype=torch.bfloat16), torch.empty(5, 64), torch.empty(5 * 64 // 2)]
    compiled.emulate(0, 0)  # another test may have left it refused
    assert compiled.enable_amx(1)
    compiled.pack(weight.data_ptr(), tensors[1].data_ptr(), 64, 64, native.DOTS, native.ONE_BY_ONE)
    for missing in (0, 2):
        for i, tensor in enumerate(tensors):
            compiled.watch(tensor.data_ptr(), tensor.nbytes - missing * (i == which))
        addresses = [tensor.data_ptr() for tensor in tensors]
        compiled.linear(*addresses[:2], None, 64, *addresses[2:], 160, 5, 64, 64, native.DOTS, 0, 1)
        compiled.watch(None, 0)
        found = compiled.emulation_error()
        assert found.startswith(error) if missing else found == b""
