"""Kernels in C: the same numbers as torch's operations, a row's bits whatever stands beside it, and a life without."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from prime_rl.inference.embedded.engine import EmbeddedEngine
from prime_rl.inference.engine import GenerationRequest, Output, SamplingParams
from prime_rl.trainer.models import causal_lm
from prime_rl.trainer.models.attention import PackedAttention, RoundedAttention
from prime_rl.trainer.models.causal_lm import CausalLM, DecoderConfig, init_weights
from rollouts.training import native
from rollouts.training.linear import linear

needs_kernels = pytest.mark.skipif(native.library() is None, reason="no C compiler")
SIZES = [(5, 64), (33, 256), (7, 40), (3, 17), (300, 128)]


pytestmark = pytest.mark.usefixtures("one_thread")


def has_dots() -> bool:
    kernels = native.library()
    return kernels is not None and bool(kernels.has_dots())


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradients(function: Any, *inputs: Tensor) -> list[Tensor]:
    """What the function gives and its gradients, for a fixed gradient of its output."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    out.backward(draw(*out.shape, seed=9).to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@needs_kernels
@pytest.mark.parametrize(("rows", "size"), SIZES)
def test_norms_and_gated_units_and_their_gradients(rows: int, size: int) -> None:
    x, weight, up = draw(rows, size), draw(size, seed=1), draw(rows, size, seed=2) * 8
    for function, inputs in (
        (lambda a, w: causal_lm.rms_norm(a, w, 1e-6), (x, weight)),
        (causal_lm.swiglu, (up, x)),
    ):
        expected = gradients(function, *(i.double() for i in inputs))
        for found, value in zip(gradients(function, *inputs), expected, strict=True):
            assert found.dtype == torch.float32
            torch.testing.assert_close(found.double(), value, rtol=2e-5, atol=2e-5)


@needs_kernels
def test_rotations_and_their_gradients() -> None:
    x, angles = draw(11, 6, 64), draw(11, 1, 32, seed=1).repeat(1, 1, 2)
    expected = gradients(lambda a: causal_lm.rotate(a, angles.double().cos(), angles.double().sin()), x.double())
    for found, value in zip(
        gradients(lambda a: causal_lm.rotate(a, angles.cos(), angles.sin()), x), expected, strict=True
    ):
        torch.testing.assert_close(found.double(), value, rtol=1e-5, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize("size", [16, 48, 130, 7])
def test_softmax(size: int) -> None:
    scores = draw(40, size) * 20
    expected = torch.softmax(scores.double(), -1)
    found = native.softmax_(scores.clone())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7)
    scores[:, size // 2 :] = float("-inf")
    assert (native.softmax_(scores)[:, size // 2 :] == 0).all()


@needs_kernels
def test_masked_vectors_change_no_bit() -> None:
    scores = draw(20, 64) * 5
    wide = torch.cat((scores, torch.full((20, 80), float("-inf"))), dim=1)
    assert torch.equal(native.softmax_(wide)[:, :64], native.softmax_(scores))


@needs_kernels
def test_what_is_not_a_number_stays_so() -> None:
    x = draw(4, 64)
    x[1, 3] = float("nan")
    for out in (
        native.rms_norm(x, torch.ones(64), 1e-6)[0],
        native.swiglu(x, torch.ones(4, 64)),
        native.softmax_(x.clone()),
        native.PackedWeight(draw(64, 64))(x),
        native.PackedWeight(draw(64, 64).bfloat16(), rounded=True)(x),
    ):
        assert out[1].isnan().any()
        assert out[[0, 2, 3]].isfinite().all()


KINDS = [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
"""Of weights: their numbers, and whether inputs may be rounded too."""


@needs_kernels
@pytest.mark.parametrize(("dtype", "rounded"), KINDS)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 320), (100, 96), (99, 96), (768, 70), (1536, 512)])
@pytest.mark.parametrize("threads", [1, 2])
def test_products(inputs: int, outputs: int, dtype: torch.dtype, rounded: bool, threads: int) -> None:
    """Right, and a row is the same in any company; in fp32 the same as oneDNN's, which is the trainer's."""
    torch.set_num_threads(threads)
    weight, bias, x = draw(outputs, inputs).to(dtype), draw(outputs, seed=1), draw(40, inputs, seed=2)
    packed = native.PackedWeight(weight, rounded=rounded)
    assert (packed.format == native.DOTS) == (rounded and inputs % 2 == 0 and has_dots())
    whole = packed(x, bias)
    entering = x.bfloat16() if packed.format == native.DOTS else x
    expected = F.linear(entering.double(), weight.double(), bias.double())
    torch.testing.assert_close(whole.double(), expected, rtol=1e-4, atol=1e-3)
    for rows in (1, 2, 3, 5, 6, 7, 11, 12, 13, 24):
        assert torch.equal(packed(x[:rows], bias), whole[:rows])
    many = draw(490, inputs, seed=3)  # they go by in batches
    assert torch.equal(packed(many)[470:], packed(many[470:]))
    if dtype == torch.float32 and native.find_block(inputs) is not None:
        assert torch.equal(packed(x), linear(x, weight))


@needs_kernels
@pytest.mark.parametrize(("dtype", "rounded"), KINDS)
@pytest.mark.parametrize(("inputs", "inner"), [(64, 96), (100, 70), (1536, 128)])
@pytest.mark.parametrize("threads", [1, 2])
def test_gated_products(inputs: int, inner: int, dtype: torch.dtype, rounded: bool, threads: int) -> None:
    """A paired weight gives what a plain one does, bit for bit, and gates what the trainer's unit makes of that."""
    torch.set_num_threads(threads)
    weight, bias = draw(2 * inner, inputs).to(dtype), draw(2 * inner, seed=1)
    plain, paired = (native.PackedWeight(weight, paired=paired, rounded=rounded) for paired in (False, True))
    for rows in (1, 7, 40, 490):
        for b in (None, bias):
            x = draw(rows, inputs, seed=rows)
            expected = plain(x, b)
            assert torch.equal(paired(x, b), expected)
            assert torch.equal(paired(x, b, gated=True), causal_lm.swiglu(*expected.chunk(2, dim=1)))


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
    """Requests of many lengths, some alike, in their order."""
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
    """What the trainer's forward pass gives for the tokens of an answer; it computes in fp32, whatever is kept."""
    tokens, start = torch.tensor([*output.request.prompt, *output.token_ids]), len(output.request.prompt)
    attend = RoundedAttention(PackedAttention([len(tokens)]), dtype)
    with torch.no_grad():
        hidden = model.float()(tokens, torch.arange(len(tokens)), attend)[start - 1 : -1]
        logits = linear(hidden, model.lm_head.weight).float()
        return torch.log_softmax(logits, -1).gather(1, tokens[start:, None]).squeeze(1)


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
def test_a_step_of_decoding_is_the_trainers_to_the_bit(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and in a batch, over several columns of the cache, whatever the model's shape."""
    monkeypatch.setattr(native, "has_bf16_unit", lambda: False)
    model = build(dtype, **SHAPES[name])
    engine = EmbeddedEngine(build(dtype, **SHAPES[name]), max_model_len=512)
    assert engine._runner.fused is not None
    for output in generate(engine, 7) + generate(engine, 1):
        found, expected = torch.tensor(output.logprobs), trainer_logprobs(model, output, dtype)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@needs_kernels
@pytest.mark.parametrize("name", SHAPES)
def test_fast_steps_in_bf16_are_near_the_trainer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes into products may be rounded to bf16; a request still has the same bits in any batch."""
    monkeypatch.setattr(native, "has_bf16_unit", lambda: False)
    model = build(torch.bfloat16, **SHAPES[name])
    engine = EmbeddedEngine(build(torch.bfloat16, **SHAPES[name]), exact=False, max_model_len=512, share_prefixes=False)
    fused = engine._runner.fused
    assert fused is not None and (fused._shape.format == native.DOTS) == has_dots()
    outputs = generate(engine, 7)
    for output in outputs:
        found, expected = torch.tensor(output.logprobs), trainer_logprobs(model, output, torch.bfloat16)
        torch.testing.assert_close(found, expected, rtol=0, atol=0.15)
        assert (found - expected).abs().mean() < 0.02
    assert generate(engine, 1)[0].logprobs == outputs[0].logprobs


@needs_kernels
def test_two_threads_give_the_bits_of_one() -> None:
    one = generate(EmbeddedEngine(build(), max_model_len=512), 5)
    torch.set_num_threads(2)
    two = generate(EmbeddedEngine(build(), max_model_len=512), 5)
    assert [o.logprobs for o in one] == [o.logprobs for o in two]


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One sentence, and everything works: exact to the bit too."""
    native.library.cache_clear()
    try:
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setenv("PATH", "/nowhere")
        with caplog.at_level(logging.WARNING):
            assert native.library() is None and native.library() is None
        assert [record.message for record in caplog.records] == [
            "no C compiler found: norms and decoding run as single torch operations, which is slower"
        ]
        plain = {"hidden_size": 64, "intermediate_size": 96}  # torch's own operations are exact for whole vectors only
        model, engine = build(**plain), EmbeddedEngine(build(**plain), max_model_len=512)
        assert engine._runner.fused is None
        for output in generate(engine, 4):
            torch.testing.assert_close(torch.tensor(output.logprobs), trainer_logprobs(model, output), rtol=0, atol=0)
    finally:
        monkeypatch.undo()
        native.library.cache_clear()


@needs_kernels
@pytest.mark.skipif(not Path("/proc/self/maps").is_file(), reason="only Linux tells what is loaded")
def test_threads_are_those_of_torch() -> None:
    """Two pools of threads would fight for the cores."""
    loaded = {line.split(None, 5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
    assert len([path for path in loaded if "libgomp" in Path(path).name]) == 1
    if any("libgomp" in path and "torch" in path for path in loaded):
        assert "-fopenmp" in native._share_threads()


def test_a_compiler_that_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    broken = tmp_path / "my cc"
    broken.write_text("#!/bin/sh\necho it is out of order >&2\nexit 3\n")
    broken.chmod(0o755)
    native.library.cache_clear()
    try:
        monkeypatch.setenv("CC", f"'{broken}'")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert native.library() is None
        assert "it is out of order" in caplog.text
        assert not list(tmp_path.glob("rollouts/native*"))
    finally:
        monkeypatch.undo()
        native.library.cache_clear()


@needs_kernels
def test_it_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    native.library.cache_clear()
    try:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(native, "FLAGS", ["-O0" if flag == "-O3" else flag for flag in native.FLAGS])
        assert native.library() is not None
        (made,) = tmp_path.glob("rollouts/native-*.so")
        before = made.stat().st_mtime_ns
        native.library.cache_clear()
        assert native.library() is not None
        assert made.stat().st_mtime_ns == before
        assert sorted(path.name for path in tmp_path.glob("rollouts/*")) == ["lock", made.name]
    finally:
        monkeypatch.undo()
        native.library.cache_clear()


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    native.library.cache_clear()
    try:
        monkeypatch.setenv(native.OFF, "0")
        assert native.library() is None
        assert not native.runs_here(torch.ones(3))
    finally:
        monkeypatch.undo()
        native.library.cache_clear()
