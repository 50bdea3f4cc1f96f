"""CPU kernels: equal to torch operations, batch-invariant, and the fallback without them."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from product_kernels import compile_products_alone
from token_filters import filter_logprobs
from torch import Tensor

from prime_rl.inference.embedded.engine import EmbeddedEngine
from prime_rl.inference.engine import GenerationRequest, Output, SamplingParams
from prime_rl.trainer.models import causal_lm
from prime_rl.trainer.models.attention import PackedAttention, RoundedAttention, has_kernel_bits
from prime_rl.trainer.models.causal_lm import CausalLM, init_weights
from prime_rl.trainer.models.decoder_config import DecoderConfig
from rollouts.kernels import cpu as cpu_kernels
from rollouts.kernels import native
from rollouts.kernels.linear import linear
from rollouts.kernels.log_softmax import log_softmax
from rollouts.training.manifests import digest_tensor
from rollouts.training.sampling import sample_tokens, top_tokens

needs_kernels = pytest.mark.skipif(native.library() is None, reason="no C compiler; cure: apt-get install gcc")
SIZES = [(5, 64), (33, 256), (7, 40), (3, 17), (300, 128)]


pytestmark = pytest.mark.usefixtures("one_thread")


def has_dots() -> bool:
    kernels = native.library()
    return kernels is not None and bool(kernels.has_dots())


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradients(function: Any, *inputs: Tensor) -> list[Tensor]:
    """Output and gradients of the function, for a fixed gradient of its output."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    out.backward(draw(*out.shape, seed=9).bfloat16().to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@needs_kernels
@pytest.mark.parametrize(("rows", "size"), SIZES)
def test_rms_norm_and_swiglu_with_gradients(rows: int, size: int) -> None:
    x, weight, up = draw(rows, size), draw(size, seed=1), draw(rows, size, seed=2) * 8
    for function, inputs in (
        (lambda a, w: causal_lm.rms_norm(a, w, 1e-6), (x, weight)),
        (causal_lm.swiglu, (up, x)),
    ):
        expected = gradients(function, *(i.double() for i in inputs))
        for actual, value in zip(gradients(function, *inputs), expected, strict=True):
            assert actual.dtype == torch.float32
            torch.testing.assert_close(actual.double(), value, rtol=2e-5, atol=2e-5)


@needs_kernels
def test_rotary_embedding_with_gradients() -> None:
    x, angles = draw(11, 6, 64), draw(11, 1, 32, seed=1).repeat(1, 1, 2)
    expected = gradients(
        lambda a: causal_lm.apply_rotary_emb(a, angles.double().cos(), angles.double().sin()), x.double()
    )
    for actual, value in zip(
        gradients(lambda a: causal_lm.apply_rotary_emb(a, angles.cos(), angles.sin()), x), expected, strict=True
    ):
        torch.testing.assert_close(actual.double(), value, rtol=1e-5, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2])
def test_bf16_is_fp32_rounded_once(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, up = draw(400, 96).bfloat16(), draw(400, 96, seed=2).bfloat16() * 8
    weight, heads = draw(96, seed=1).bfloat16(), draw(400, 3, 64).bfloat16()
    angles = draw(400, 1, 32, seed=1).repeat(1, 1, 2)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    cases: tuple[tuple[Callable[..., Any], tuple[Tensor, ...]], ...] = (
        (lambda a, w: causal_lm.rms_norm(a, w, 1e-6), (x, weight)),
        (causal_lm.swiglu, (up, x)),
        (lambda a: causal_lm.apply_rotary_emb(a, cos.to(a.dtype), sin.to(a.dtype)), (heads,)),
    )
    torch.set_num_threads(threads)
    for function, inputs in cases:
        expected = gradients(function, *(i.float() for i in inputs))
        with monkeypatch.context() as patch:  # a wrong turn to torch's operations fails, too
            patch.setattr(torch, "rsqrt", None)
            patch.setattr(torch, "cat", None)
            patch.setattr(F, "silu", None)
            actual = gradients(function, *inputs)
        for narrow, wide in zip(actual, expected, strict=True):
            assert torch.equal(narrow, wide.bfloat16())


@needs_kernels
@pytest.mark.parametrize("size", [16, 48, 130, 7])
def test_softmax(size: int) -> None:
    scores = draw(40, size) * 20
    expected = torch.softmax(scores.double(), -1)
    actual = cpu_kernels.softmax_(scores.clone())
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-7)
    scores[:, size // 2 :] = float("-inf")
    assert (cpu_kernels.softmax_(scores)[:, size // 2 :] == 0).all()


@needs_kernels
@pytest.mark.parametrize("vocab", [5, 63, 320, 4097, 49152])
@pytest.mark.parametrize("threads", [1, 2])
def test_sampling_equals_torch(vocab: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by torch: the same tokens and the same log-probs, with ties and with tokens of probability 0."""
    torch.set_num_threads(threads)
    logits = draw(24, vocab) * 4
    logits[:8] = logits[:8].round()  # ties
    logits[3:12, : vocab // 2] = float("-inf")
    logprobs = torch.log_softmax(logits, -1)
    noise = torch.rand(24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    noise[:3] = torch.tensor([0.0, 1 - 2**-53, 0.5])
    filters = [
        SamplingParams(max_tokens=1, top_k=top_k, top_p=top_p, min_p=min_p)
        for top_k in (0, 1, 7)
        for top_p in (1.0, 0.9, 0.3, 1e-6)
        for min_p in (0.0, 0.05)
    ]

    greedy = torch.arange(24) % 7 == 6

    def run() -> tuple[Tensor, ...]:
        drawn, best = sample_tokens(logits, noise, greedy), sample_tokens(logits, None)
        return drawn[0], best[0], filter_logprobs(logprobs, filters), top_tokens(logprobs, 4)[0], drawn[1], best[1]

    *actual, of_drawn, of_best = run()
    values, tokens = top_tokens(logprobs, 4)
    assert torch.equal(top_tokens(logprobs, 1)[1], logprobs.argmax(-1, keepdim=True))
    alone = [sample_tokens(logits[i : i + 1], noise[i : i + 1], greedy[i : i + 1])[0][0] for i in range(24)]
    table = log_softmax(logits)
    assert torch.equal(table.gather(1, actual[0][:, None])[:, 0], of_drawn)
    assert torch.equal(table.gather(1, actual[1][:, None])[:, 0], of_best)
    monkeypatch.setattr(cpu_kernels, "runs_here", lambda *_: False)
    *expected, torch_drawn, torch_best = run()
    for mine, theirs in zip(actual, expected, strict=True):
        assert torch.equal(mine, theirs)
    torch.testing.assert_close((of_drawn, of_best), (torch_drawn, torch_best), rtol=1e-6, atol=1e-5)
    assert torch.equal(torch.stack(alone), actual[0])
    assert torch.equal(logprobs.gather(1, tokens), values)
    assert (actual[0][greedy] == actual[1][greedy]).all() and (actual[0][~greedy] != actual[1][~greedy]).any()


@needs_kernels
@pytest.mark.parametrize("size", [5, 320, 4097])
def test_log_softmax(size: int) -> None:
    """Close to fp64 even for large logits, with torch's gradient, and NaN only in rows that have one."""
    logits = draw(9, size) * 30 + 500
    logits[1, size // 2 :] = float("-inf")
    expected = torch.log_softmax(logits.double(), -1)
    actual = log_softmax(logits)
    kept = expected > float("-inf")
    error = (actual - expected)[kept].abs() / expected[kept].abs().clamp(min=1)
    assert error.max() < 2e-7
    assert (actual[1, size // 2 :] == float("-inf")).all()
    weights = draw(9, size)
    grads = []
    for function in (log_softmax, lambda x: torch.log_softmax(x, -1)):
        x = (logits[2:] - 500).requires_grad_()
        (function(x) * weights[2:]).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-6)
    logits[3, 2], logits[4] = float("nan"), float("-inf")
    assert log_softmax(logits).isnan().any(1).tolist() == [False] * 3 + [True] * 2 + [False] * 4


@needs_kernels
def test_a_row_of_nan_does_not_stop_sampling() -> None:
    logprobs = torch.log_softmax(draw(2, 100), -1)
    logprobs[1] = float("nan")
    params = [SamplingParams(max_tokens=1, top_k=3, top_p=0.9, min_p=0.1)] * 2
    filtered = filter_logprobs(logprobs, params)
    tokens, chosen = sample_tokens(filtered, torch.tensor([0.5, 0.5], dtype=torch.float64))
    assert 0 <= int(tokens[1]) < 100
    assert chosen.isnan().tolist() == [False, True]


@needs_kernels
def test_masked_vectors_change_no_bit() -> None:
    scores = draw(20, 64) * 5
    wide = torch.cat((scores, torch.full((20, 80), float("-inf"))), dim=1)
    assert torch.equal(cpu_kernels.softmax_(wide)[:, :64], cpu_kernels.softmax_(scores))


@needs_kernels
def test_nan_propagates() -> None:
    x = draw(4, 64)
    x[1, 3] = float("nan")
    for out in (
        cpu_kernels.rms_norm(x, torch.ones(64), 1e-6)[0],
        cpu_kernels.swiglu(x, torch.ones(4, 64)),
        cpu_kernels.softmax_(x.clone()),
        cpu_kernels.PackedWeight(draw(64, 64))(x),
        cpu_kernels.PackedWeight(draw(64, 64).bfloat16(), rounded=True)(x),
        cpu_kernels.PackedWeight(draw(64, 64), quantized=True)(x),
    ):
        assert out[1].isnan().any()
        assert out[[0, 2, 3]].isfinite().all()


KINDS = [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
"""Dtype of the weight, and whether activations may be rounded to bf16."""


@needs_kernels
@pytest.mark.parametrize(("dtype", "rounded"), KINDS)
@pytest.mark.parametrize(("outputs", "inputs", "paired"), [(70, 99, False), (192, 64, True), (140, 48, True)])
def test_an_update_needs_no_second_copy(
    outputs: int, inputs: int, paired: bool, dtype: torch.dtype, rounded: bool
) -> None:
    first, second, x = draw(outputs, inputs).to(dtype), draw(outputs, inputs, seed=1).to(dtype), draw(5, inputs, seed=2)
    packed = cpu_kernels.PackedWeight(first, paired=paired, rounded=rounded)
    address = packed.data.data_ptr()
    packed.update(second)
    assert packed.data.data_ptr() == address
    assert torch.equal(packed(x), cpu_kernels.PackedWeight(second, paired=paired, rounded=rounded)(x))
    torch.testing.assert_close(packed(x), F.linear(x, second.float()), rtol=0.05, atol=0.3 if rounded else 1e-3)


@needs_kernels
@pytest.mark.parametrize(("dtype", "rounded"), KINDS)
@pytest.mark.parametrize(
    ("outputs", "inputs", "paired"),
    [(1, 7, False), (70, 99, False), (320, 576, False), (192, 64, True), (98, 30, True), (140, 48, True)],
)
def test_packed_weights_are_unpacked_bit_for_bit(
    outputs: int, inputs: int, paired: bool, dtype: torch.dtype, rounded: bool
) -> None:
    weight = draw(outputs, inputs).to(dtype)
    weight[0, 0], weight[-1, -1] = float("nan"), -0.0
    unpacked = cpu_kernels.PackedWeight(weight, paired=paired, rounded=rounded).unpack()
    assert unpacked.dtype == dtype
    assert torch.equal(unpacked.view(torch.uint8), weight.view(torch.uint8))


@needs_kernels
def test_engine_updates_keep_the_packed_weights_in_place() -> None:
    config = {"model_type": "qwen3", "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    config |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "max_position_embeddings": 64,
    }
    models = [CausalLM(DecoderConfig.from_hf(config)) for _ in range(2)]
    for seed, model in enumerate(models):
        init_weights(model, seed)
    engine = EmbeddedEngine(models[0])
    held = [*engine._decoder.layers[0].products, engine._decoder.head]
    before = [product.kernel.data.data_ptr() for product in held]  # type: ignore[union-attr]
    engine.load_weights(causal_lm.tensor_names(models[1]), 1)
    assert [product.kernel.data.data_ptr() for product in held] == before  # type: ignore[union-attr]


@needs_kernels
@pytest.mark.parametrize(("dtype", "rounded"), KINDS)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 320), (100, 96), (99, 96), (3, 80), (768, 70), (1536, 512)])
@pytest.mark.parametrize("threads", [1, 2])
def test_products(inputs: int, outputs: int, dtype: torch.dtype, rounded: bool, threads: int) -> None:
    """Correct and batch-invariant; in fp32 bit-identical to oneDNN, which the trainer uses, and to exact bf16."""
    torch.set_num_threads(threads)
    weight, bias, x = draw(outputs, inputs).to(dtype), draw(outputs, seed=1), draw(40, inputs, seed=2)
    packed = cpu_kernels.PackedWeight(weight, rounded=rounded)
    assert (packed.format == native.DOTS) == (rounded and has_dots())
    whole = packed(x, bias)
    entering = x.bfloat16() if packed.format == native.DOTS else x
    expected = F.linear(entering.double(), weight.double(), bias.double())
    torch.testing.assert_close(whole.double(), expected, rtol=1e-4, atol=1e-3)
    for rows in (1, 2, 3, 5, 6, 7, 11, 12, 13, 24):
        assert torch.equal(packed(x[:rows], bias), whole[:rows])
    many = draw(490, inputs, seed=3)  # more rows than one batch
    assert torch.equal(packed(many)[470:], packed(many[470:]))
    if dtype == torch.float32 and cpu_kernels.find_block(inputs) is not None:
        assert torch.equal(packed(x), linear(x, weight))
    if dtype == torch.bfloat16 and packed.format == native.BF16:
        assert torch.equal(whole, cpu_kernels.PackedWeight(weight.float())(x, bias))


@needs_kernels
@pytest.mark.parametrize(("dtype", "rounded"), KINDS)
@pytest.mark.parametrize(("inputs", "inner"), [(64, 96), (100, 70), (1536, 128)])
@pytest.mark.parametrize("threads", [1, 2])
def test_gated_products(inputs: int, inner: int, dtype: torch.dtype, rounded: bool, threads: int) -> None:
    """A paired weight has the bits of a plain one; gated, those of the trainer's SwiGLU."""
    torch.set_num_threads(threads)
    weight, bias = draw(2 * inner, inputs).to(dtype), draw(2 * inner, seed=1)
    plain, paired = (cpu_kernels.PackedWeight(weight, paired=paired, rounded=rounded) for paired in (False, True))
    for rows in (1, 7, 40, 490):
        for b in (None, bias):
            x = draw(rows, inputs, seed=rows)
            expected = plain(x, b)
            assert torch.equal(paired(x, b), expected)
            assert torch.equal(paired(x, b, gated=True), causal_lm.swiglu(*expected.chunk(2, dim=1)))


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Integers of the Hadamard transform of each 64 inputs, and their scale for every input (groups of 128)."""
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(6):
        hadamard = torch.cat((torch.cat((hadamard, hadamard), 1), torch.cat((hadamard, -hadamard), 1)))
    x = (F.pad(x, (0, -x.shape[1] % 64)).double().unflatten(1, (-1, 64)) @ hadamard).flatten(1)
    most = torch.cat([g.abs().amax(1, keepdim=True).expand_as(g) for g in x.split(128, dim=1)], dim=1)
    return (x * 127 / most).round(), most / (127 * 8)


INT8_SHAPES = [(64, 320, False), (99, 70, False), (576, 96, False), (1536, 70, False), (200, 140, True)]


@needs_kernels
@pytest.mark.parametrize(("inputs", "outputs", "paired"), INT8_SHAPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_int8_products(inputs: int, outputs: int, paired: bool, threads: int) -> None:
    """The quantized product, with the same bits in any batch, and after an update."""
    torch.set_num_threads(threads)
    weight, bias, x = draw(outputs, inputs), draw(outputs, seed=1), draw(40, inputs, seed=2)
    x[:, 3] *= 100  # an outlier
    packed = cpu_kernels.PackedWeight(draw(outputs, inputs, seed=4), paired=paired, quantized=True)
    address = packed.data.data_ptr()
    packed.update(weight)
    assert packed.data.data_ptr() == address and packed.data.dtype == torch.int8
    whole = packed(x, bias)
    (a, a_scale), (w, w_scale) = quantize(x), quantize(weight)
    expected = (a * a_scale) @ (w * w_scale).T + bias
    assert (whole - expected).abs().max() < 1e-3 * expected.abs().max()
    right = F.linear(x, weight, bias)
    assert (whole - right).abs().mean() < 0.015 * right.abs().mean()
    for rows in (1, 2, 5, 6, 7, 12, 13):
        assert torch.equal(packed(x[:rows], bias), whole[:rows])
    many = draw(490, inputs, seed=3)  # more rows than one batch
    assert torch.equal(packed(many)[470:], packed(many[470:]))
    if paired:
        assert torch.equal(packed(x, bias, gated=True), causal_lm.swiglu(*whole.chunk(2, dim=1)))


@needs_kernels
@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86 CPUs")
@pytest.mark.parametrize("without", ["-mno-avx512vnni", "-mno-avx512f", "-mno-avx2"])
def test_bits_do_not_depend_on_instructions(without: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """int8 and exact bf16: the same with AVX-512 VNNI, AVX-512, AVX2 and plain C."""

    def compute() -> list[Tensor]:
        shapes = [(draw(n, k), paired, draw(13, k, seed=1) * draw(13, 1, seed=2).exp()) for k, n, paired in INT8_SHAPES]
        packed = [cpu_kernels.PackedWeight(w, paired=paired, quantized=True)(x) for w, paired, x in shapes]
        exact = [cpu_kernels.PackedWeight(w.bfloat16(), paired=paired)(x) for w, paired, x in shapes]
        return [*packed, *exact]

    expected = compute()
    compile_products_alone(monkeypatch, tmp_path)
    monkeypatch.setattr(native, "FLAGS", [*native.FLAGS, without])
    native.library.cache_clear()
    native._load.cache_clear()
    try:
        assert native.library() is not None
        assert all(map(torch.equal, compute(), expected))
    finally:
        monkeypatch.undo()
        native.library.cache_clear()
        native._load.cache_clear()


def build(dtype: torch.dtype = torch.float32, **shape: Any) -> CausalLM:
    """A small decoder of any shape."""
    config = {
        "model_type": "qwen3",
        "vocab_size": 150,
        "hidden_size": 72,
        "intermediate_size": 100,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "initializer_range": 0.15,
    }
    model = CausalLM(DecoderConfig.from_hf(config | shape))
    init_weights(model, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2:
                parameter.add_(draw(*parameter.shape, seed=len(name)) * 0.2)
    return model.to(dtype).requires_grad_(False)


def generate(engine: EmbeddedEngine, num: int, new: int = 24, longest: int = 150) -> list[Output]:
    """Outputs of requests of many lengths, some with equal prompts, in order."""
    requests = []
    for i in range(num):
        prompt = torch.randint(150, (longest if i % 3 == 0 else i + 1,), generator=torch.Generator().manual_seed(i % 5))
        requests.append(GenerationRequest(prompt.tolist(), SamplingParams(max_tokens=new + i % 3, seed=i)))
        engine.add(requests[-1])
    outputs: dict[GenerationRequest, Output] = {}
    while engine.has_work():
        outputs |= {event.request: event for event in engine.step() if isinstance(event, Output)}
    return [outputs[one] for one in requests]


def trainer_logprobs(model: CausalLM, output: Output, dtype: torch.dtype = torch.float32) -> Tensor:
    """Log-probs of the completion by the trainer's forward pass, computed in fp32 for every storage dtype."""
    tokens, start = torch.tensor([*output.request.prompt, *output.token_ids]), len(output.request.prompt)
    model.float().round_inputs(dtype)
    attend = RoundedAttention(PackedAttention([len(tokens)], rounded=model.rounds_inputs), dtype)
    with torch.no_grad():
        hidden = model(tokens, torch.arange(len(tokens)), attend)[start - 1 : -1]
        logits = linear(hidden, model.lm_head.weight, rounded=model.rounds_inputs).float()
        return log_softmax(logits).gather(1, tokens[start:, None]).squeeze(1)


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3 tied, heads of 128": {"tie_word_embeddings": True, "head_dim": 128, "hidden_size": 64},
    "qwen2, with biases": {"model_type": "qwen2", "num_key_value_heads": 4},
    "llama, all biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 64},
    "long sums": {"hidden_size": 640, "intermediate_size": 1200, "num_hidden_layers": 1, "num_attention_heads": 20},
}


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_decode_step_is_bit_identical_to_trainer(name: str, dtype: torch.dtype) -> None:
    """Alone and in a batch, over several cache columns, for every model shape."""
    model = build(dtype, **SHAPES[name])
    engine = EmbeddedEngine(build(dtype, **SHAPES[name]), max_model_len=512)
    assert engine._decoder.fused is not None
    for output in generate(engine, 7) + generate(engine, 1):
        actual, expected = torch.tensor(output.logprobs), trainer_logprobs(model, output, dtype)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [208, 256])
def test_exact_decoding_of_large_heads(dim: int, dtype: torch.dtype) -> None:
    """Torch's products, with which the trainer computes them on some CPUs, have another order of sums."""
    model = build(dtype, head_dim=dim)
    engine = EmbeddedEngine(build(dtype, head_dim=dim), max_model_len=512)
    assert (engine._decoder.fused is not None) == has_kernel_bits(dim)
    for output in generate(engine, 3):
        actual, expected = torch.tensor(output.logprobs), trainer_logprobs(model, output, dtype)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@needs_kernels
@pytest.mark.parametrize("name", SHAPES)
def test_fast_bf16_decode_is_close_to_trainer(name: str) -> None:
    """Activations may be rounded to bf16; a request still has the same bits in any batch."""
    model = build(torch.bfloat16, **SHAPES[name])
    engine = EmbeddedEngine(
        build(torch.bfloat16, **SHAPES[name]), exact=False, max_model_len=512, enable_prefix_caching=False
    )
    fused = engine._decoder.fused
    assert fused is not None and (fused.shape.format == native.DOTS) == has_dots()
    outputs = generate(engine, 7)
    for output in outputs:
        actual, expected = torch.tensor(output.logprobs), trainer_logprobs(model, output, torch.bfloat16)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0.15)
        assert (actual - expected).abs().mean() < 0.03
    assert generate(engine, 1)[0].logprobs == outputs[0].logprobs
    for output in outputs[:3]:  # prefill has the bits of decoding
        prompt, start = [*output.request.prompt, *output.token_ids], len(output.request.prompt)
        engine.add(GenerationRequest(prompt, SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_start=start)))
        scored = None
        while engine.has_work():
            scored = next((event for event in engine.step() if isinstance(event, Output)), scored)
        assert scored is not None and scored.prompt_logprobs is not None
        assert scored.prompt_logprobs.logprobs == list(output.logprobs)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3", "qwen2, with biases", "long sums"])
def test_int8_decode_is_close_to_trainer(name: str, dtype: torch.dtype) -> None:
    """Decoded and prompt log-probs are those of the same products, before and after a weight update."""
    options: dict[str, Any] = {"exact": False, "max_model_len": 512, "enable_prefix_caching": False}
    engine = EmbeddedEngine(build(dtype, **SHAPES[name]), quantization="int8", **options)
    outputs = generate(engine, 7)
    model = build(dtype, **SHAPES[name])
    away = [torch.tensor(output.logprobs) - trainer_logprobs(model, output, dtype) for output in outputs]
    assert 0 < torch.cat(away).abs().mean() < 0.1
    assert generate(engine, 1)[0].logprobs == outputs[0].logprobs
    scored = GenerationRequest(
        [*outputs[0].request.prompt, *outputs[0].token_ids],
        SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_start=len(outputs[0].request.prompt)),
    )
    engine.add(scored)
    (output,) = (event for event in engine.step() if isinstance(event, Output))
    assert output.prompt_logprobs is not None
    torch.testing.assert_close(list(output.prompt_logprobs.logprobs), outputs[0].logprobs, rtol=0, atol=1e-5)
    tensors = {key: tensor + 0.1 * draw(*tensor.shape) for key, tensor in causal_lm.tensor_names(model).items()}
    digests = engine.load_weights(tensors, 1)()
    fresh = EmbeddedEngine(build(dtype, **SHAPES[name]), quantization="int8", **options)
    assert digests == {k: digest_tensor(t.to(dtype).to(t.dtype)) for k, t in tensors.items()}
    fresh.load_weights(tensors, 1)
    assert generate(engine, 3)[0].logprobs == generate(fresh, 3)[0].logprobs != outputs[0].logprobs


@needs_kernels
@pytest.mark.parametrize(
    ("model", "exact", "reason"),
    [
        ({}, True, "needs a CPU and exact = false"),
        ({"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}, False,
         "needs a dense decoder"),
    ],
)  # fmt: skip
def test_int8_is_refused_with_a_reason(model: dict[str, Any], exact: bool, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        EmbeddedEngine(build(**model), exact=exact, quantization="int8")


@needs_kernels
@pytest.mark.parametrize("flags", [[], ["-DSPINS=0", "-DYIELDS_NS=0"]], ids=["as used", "always asleep"])
def test_thread_count_changes_no_bits(flags: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """However threads wait for each other; more of them than cores must sleep, and others take what they leave."""
    if flags:
        unoptimized = ["-O0" if flag == "-O3" else flag for flag in native.FLAGS]  # compiles in 2 s, not 15
        monkeypatch.setattr(native, "FLAGS", [*unoptimized, *flags])
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        library = native._load.__wrapped__()
        monkeypatch.setattr(native, "library", lambda: library)
    kinds: list[dict[str, Any]] = [{}, {"exact": False}, {"exact": False, "quantization": "int8"}]
    for dtype, options in zip((torch.float32, torch.bfloat16, torch.bfloat16), kinds, strict=True):
        logprobs = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            engine = EmbeddedEngine(build(dtype, vocab_size=4096), max_model_len=512, **options)
            assert engine._decoder.fused is not None
            logprobs.append([output.logprobs for output in generate(engine, 5, new=8)])
        assert logprobs[0] == logprobs[1] == logprobs[2]


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One warning; the fallback is bit-exact as well."""
    native.library.cache_clear()
    native._load.cache_clear()
    try:
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setenv("PATH", "/nowhere")
        with caplog.at_level(logging.WARNING):
            assert native.library() is None and native.library() is None
        assert [record.message for record in caplog.records] == [
            "no C compiler found (gcc, cc, clang): norms and decoding run as single torch operations, which is slower"
        ]
        plain = {"hidden_size": 64, "intermediate_size": 96}  # torch's own operations are exact for whole vectors only
        model, engine = build(**plain), EmbeddedEngine(build(**plain), max_model_len=512)
        assert engine._decoder.fused is None
        for output in generate(engine, 4):
            torch.testing.assert_close(torch.tensor(output.logprobs), trainer_logprobs(model, output), rtol=0, atol=0)
    finally:
        monkeypatch.undo()
        native.library.cache_clear()
        native._load.cache_clear()
