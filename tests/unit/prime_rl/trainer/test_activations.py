"""Activation checkpointing, offloading and compilation: lower memory, same results."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import varlen

from prime_rl.trainer.activations import PRODUCTS, ActivationOffload, recompute_layers
from prime_rl.trainer.backend import Backend, build_backend
from prime_rl.trainer.config import TrainConfig
from prime_rl.trainer.model_config import ActivationConfig
from prime_rl.trainer.models import flash_attention
from prime_rl.trainer.models.attention import AttentionBackend, PackedAttention, has_kernel_bits
from prime_rl.trainer.optim import MasterWeights
from prime_rl.trainer.rl.data import build_batches
from prime_rl.trainer.rl.loss import build_loss
from rollouts.kernels import cpu
from rollouts.kernels.onednn import plain_weights_are_exact
from rollouts.training.batching import pack_samples

MODEL = {"name": "tiny-qwen3", "seq_len": 48, "debug": {"random_init": True}}


def make(**model: Any) -> tuple[TrainConfig, Backend]:
    config = TrainConfig.model_validate(
        {"model": {**MODEL, **model}, "data": {"fake": {"batch_size": 4}}, "output_dir": Path("unused")}
    )
    return config, build_backend(config)


def compute_gradients(config: TrainConfig, backend: Backend, steps: int = 2) -> dict[str, Tensor]:
    loss = build_loss(config.loss, 48)
    for step in range(1, steps + 1):
        [micros] = pack_samples(build_batches(config, 320).receive(step), 48)
        backend.forward_backward(micros, loss)
    return {name: p.grad.clone() for name, p in backend.parameters.items() if p.grad is not None}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys() and ours
    for name, gradient in ours.items():
        assert torch.equal(gradient, theirs[name]), name


@pytest.mark.parametrize("ac", [{}, {"freq": 2}, {"mode": "selective"}])
def test_recomputation_is_bit_identical(ac: dict[str, Any]) -> None:
    config, backend = make(ac=ac)
    names = list(backend.parameters)
    plain = make()
    for measured in (plain_weights_are_exact, has_kernel_bits):
        measured.cache_clear()  # measured in the first step of a process
    assert names == list(plain[1].parameters), "names of parameters stay, and so do checkpoints"
    assert_same(compute_gradients(config, backend), compute_gradients(*plain))


@pytest.mark.parametrize(("mode", "freq", "expected"), [("full", 1, 0.5), ("full", 2, 0.8), ("selective", 1, 0.9)])
def test_recomputation_saves_memory(mode: Any, freq: int, expected: float) -> None:
    """Elements saved by autograd, relative to the plain model."""

    def count_saved(**model: Any) -> int:
        config, backend = make(**model)
        [micros] = pack_samples(build_batches(config, 320).receive(1), 48)
        sizes: list[int] = []

        def pack(tensor: Tensor) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            backend.compute_inputs(micros[0].to_tensors())
        return sum(sizes)

    assert count_saved(ac={"mode": mode, "freq": freq}) < expected * count_saved()


@pytest.mark.skipif(not cpu.name_bf16_instructions(), reason="no instructions for bf16; cure: a CPU with AVX512_BF16")
@pytest.mark.parametrize(("mode", "passes"), [("full", 2), ("selective", 1)])
def test_selective_mode_stores_rounded_products(mode: str, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply, counts = cpu.multiply_rounded, Counter[bool]()

    def record(*args: Any, turned: bool = False) -> Tensor:
        counts[turned] += 1
        return multiply(*args, turned=turned)

    config, backend = make(dtype="bfloat16", ac={"mode": mode})
    [micros] = pack_samples(build_batches(config, 320).receive(1), 48)
    monkeypatch.setattr(cpu, "multiply_rounded", record)
    backend.forward_backward(micros[:1], build_loss(config.loss, 48))
    products = 7 * backend.model.config.num_hidden_layers
    assert counts == {False: passes * products + 1, True: products}, "the head is computed once"


def test_selective_mode_stores_flash_attention() -> None:
    """The operation that `attn = "flash"` runs on a GPU, under the name that torch registers."""
    assert varlen.varlen_attn is not None
    assert torch.ops.torch_attn._varlen_attn.default.name() in PRODUCTS


def test_offloading_is_bit_identical() -> None:
    """The hooks are configured to offload CPU tensors too."""
    config, backend = make()
    host = ActivationOffload(pin_memory=False, kinds=("cpu",))
    recompute_layers(list(backend.model.model.layers), ActivationConfig())
    for layer in backend.model.model.layers:
        inner = layer.forward

        def forward(*args: Any, inner: Any = inner) -> Tensor:
            with host.hooks():
                return inner(*args)

        layer.forward = forward
    assert_same(compute_gradients(config, backend), compute_gradients(*make()))
    assert host.num_moved >= 2 * len(backend.model.model.layers)
    x = torch.ones(2, 2, requires_grad=True)
    assert host.pack(x) is x, "too small"
    assert host.pack(torch.ones(64, 64)).shape == (64, 64), "no gradient flows through tables"


def test_offloaded_masters_match_plain_training() -> None:
    config, plain = make()
    gradients = compute_gradients(config, plain)
    _, other = make()
    masters = MasterWeights(other.model, torch.float32, torch.device("cpu"))
    compute_gradients(config, other)
    assert_same({name: p.grad for name, p in masters.by_name.items() if p.grad is not None}, gradients)
    with torch.no_grad():
        for master in masters.by_name.values():
            master.add_(1.0)
    masters.write_back()
    for name, parameter in other.model.named_parameters():
        assert torch.equal(parameter, masters.by_name[name])


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_compiled_layers_match_without_graph_breaks(backend: str) -> None:
    """Only tracing is tested, that of the backward pass by aot_eager."""
    one_layer = {"random_init": True, "num_layers": 1}
    options = {"compile": {"backend": backend, "fullgraph": True}, "ac": {}}
    compiled = compute_gradients(*make(debug=one_layer, **options), steps=1)
    plain = compute_gradients(*make(debug=one_layer, attn="sdpa"), steps=1)
    for name, gradient in compiled.items():
        torch.testing.assert_close(gradient, plain[name], rtol=1e-4, atol=1e-6)


class Attending(nn.Module):
    def forward(self, x: Tensor, attend: AttentionBackend) -> Tensor:
        return attend(0, x, x, x) + 1


def test_flash_attention_compiles_twice_for_any_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for the sizes of the first pack, once for dynamic sizes, also where cuDNN would compute some sequences in
    eager mode; the kernel is mocked."""
    from torch._dynamo.testing import CompileCounter

    monkeypatch.setattr(flash_attention, "CUDNN_LENGTH", 5)
    monkeypatch.setattr(flash_attention, "has_cudnn", lambda device: True)
    monkeypatch.setattr(
        flash_attention, "flash_attention", lambda q, k, v, ends, longest, window: q * longest + ends.sum()
    )
    layer, compiled = Attending(), CompileCounter()
    layer.compile(fullgraph=True, backend=compiled)
    for lengths in ([5, 3], [4, 4, 2], [9], [2, 3, 4, 5], [7, 1], [3] * 20):
        x = torch.randn(sum(lengths), 2, 4)
        found = layer(x, PackedAttention(lengths, mode="flash"))
        torch.testing.assert_close(found, x * max(lengths) + sum(itertools.accumulate(lengths)) + 1)
    assert compiled.frame_count == 2


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"ac_offloading": {}}, "set model.ac"),
        ({"compile": {}, "attn": "exact"}, "set attn = sdpa"),
        ({"compile": {}, "ac": {"mode": "selective"}}, "ac.mode = full"),
    ],
)
def test_incompatible_options_are_rejected(model: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(**model)


def test_compiling_on_a_cpu_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match="no-such-compiler was not found"):
        make(compile={})
