"""oneDNN matrix products: batch-invariant, with the gradients of `F.linear`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from prime_rl.trainer.backend import build_backend
from prime_rl.trainer.config import TrainConfig
from rollouts.kernels import cpu, onednn
from rollouts.kernels import linear as module
from rollouts.kernels.linear import Linear, linear
from rollouts.kernels.onednn import pack_weight, packed_linear, round_rows, uses_onednn


def backward_products(x: torch.Tensor, weight: torch.Tensor) -> list[tuple[Any, torch.Tensor]]:
    return [(module.input_gradient, weight), (module.weight_gradient, x)]


needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
needs_bf16 = pytest.mark.skipif(
    not cpu.name_bf16_instructions(), reason="no instructions for bf16; cure: a CPU with AVX512_BF16"
)


@needs_onednn
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 320), (128, 96), (192, 64), (256, 512), (768, 256)])
def test_rows_are_batch_invariant(inputs: int, outputs: int, threads: int) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(outputs, inputs), torch.randn(300, inputs)
    assert uses_onednn(x)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = linear(x, weight)
        torch.set_num_threads(threads)
        packed, half = pack_weight(weight), outputs // 2
        first, second = pack_weight(weight[:half]), pack_weight(weight[half:])
        for rows in (1, 2, 3, 4, 7, 16, 31, 65, 128, 300):
            assert torch.equal(linear(x[:rows], weight), whole[:rows])
            if rows > 1:
                assert torch.equal(packed_linear(x[:rows], packed), whole[:rows])
                joined = torch.cat((packed_linear(x[:rows], first), packed_linear(x[:rows], second)), dim=1)
                assert torch.equal(joined, whole[:rows])
    finally:
        torch.set_num_threads(before)


@needs_onednn
def test_weights_can_be_packed_for_a_single_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with torch 2.11, whose oneDNN computes other bits with a plain weight."""
    x, weight, grad = torch.randn(70, 64), torch.randn(96, 64), torch.randn(70, 96)
    found, packed_shapes = [], []

    def pack(weight: torch.Tensor) -> torch.Tensor:
        packed_shapes.append(tuple(weight.shape))
        return pack_weight(weight)

    monkeypatch.setattr(onednn, "pack_weight", pack)
    for is_exact in (True, False):
        monkeypatch.setattr(onednn, "plain_weights_are_exact", lambda is_exact=is_exact: is_exact)
        found.append(
            [linear(x, weight), linear(x[:1], weight), *(f(grad, y, True) for f, y in backward_products(x, weight))]
        )
    assert packed_shapes == [(96, 64), (96, 64), (64, 96), (64, 72)], "forward twice, and both gradients, if not exact"
    packed = packed_linear(x, pack_weight(weight))
    assert torch.equal(found[1][0], packed) and torch.equal(found[1][1], packed[:1])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", [(1, 32), (5, 32), (200, 32), (2, 60, 32)])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_match_torch(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layer, x = Linear(32, 48, bias=bias), torch.randn(shape)
    grads = []
    for product in (layer, lambda x: F.linear(x, layer.weight, layer.bias)):
        layer.zero_grad()
        ours = x.clone().requires_grad_()
        out = product(ours)
        out.square().sum().backward()
        grads.append([out.detach(), ours.grad, *(p.grad for p in layer.parameters())])
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    layer.requires_grad_(False)
    frozen = x.clone().requires_grad_()
    layer(frozen).square().sum().backward()
    torch.testing.assert_close(frozen.grad, grads[1][1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rounded", [False, pytest.param(True, marks=needs_bf16)])
@pytest.mark.parametrize("shape", [(1, 32), (5, 32), (2, 3, 32)])
def test_a_product_may_be_changed_in_place(shape: tuple[int, ...], rounded: bool) -> None:
    """As code of transformers does, such as that of Llama 4."""
    layer, x = Linear(32, 48), torch.randn(shape, requires_grad=True)
    layer.rounds_inputs = rounded
    [found], [expected] = (torch.autograd.grad(y.sum(), x) for y in (layer(x).mul_(2.0), layer(x) * 2.0))
    assert torch.equal(found, expected)


def round_to_bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().double()


@needs_bf16
@pytest.mark.parametrize("shape", [(1, 40), (70, 64), (2, 60, 96)])
def test_rounded_products_and_gradients(shape: tuple[int, ...]) -> None:
    """Factors are rounded, sums are not; gradients are also rounded."""
    torch.manual_seed(0)
    layer, x, grad = Linear(shape[-1], 50), torch.randn(shape, requires_grad=True), torch.randn(*shape[:-1], 50)
    layer.rounds_inputs = True
    y = layer(x)
    wide, weight = round_to_bf16(x), round_to_bf16(layer.weight)
    torch.testing.assert_close(y.double(), F.linear(wide, weight, layer.bias.double()), rtol=1e-5, atol=1e-5)
    y.backward(grad)
    narrow = round_to_bf16(grad)
    of_weight = narrow.flatten(0, -2).t() @ wide.flatten(0, -2)
    for mine, expected in ((x.grad, narrow @ weight), (layer.weight.grad, of_weight)):
        torch.testing.assert_close(mine.double(), expected, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(layer.bias.grad, grad.flatten(0, -2).sum(0))
    rows = x.detach().flatten(0, -2)
    assert layer(rows[:0]).shape == (0, 50)
    assert all(torch.equal(layer(rows[i : i + 1])[0], y.flatten(0, -2)[i]) for i in range(len(rows)))


@needs_bf16
def test_memory_is_reused_outside_of_inference_mode() -> None:
    def multiply(size: int) -> torch.Tensor:
        x, weight = torch.ones(3, size), torch.ones(size, size)
        return linear(x, weight, rounded=True)

    def run() -> bool:
        with torch.inference_mode():
            small = multiply(64)
        return bool((small == 64).all() and (multiply(256) == 256).all())

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run).result()


@needs_bf16
def test_adapters_of_rounded_products_are_summed_in_blocks() -> None:
    """As by the trainer, although the products themselves are not."""
    assert cpu.PackedWeight(torch.ones(64, 1536).bfloat16(), rounded=True).block == cpu.find_block(1536)


@needs_bf16
def test_threads_compute_rounded_products_at_once() -> None:
    """Each packs weights in memory of its own."""
    x, weights = torch.randn(64, 128), [torch.randn(256, 128) for _ in range(8)]
    expected = [linear(x, weight, rounded=True) for weight in weights]

    def multiply(number: int) -> bool:
        torch.set_num_threads(1)
        return all(torch.equal(linear(x, w, rounded=True), y) for w, y in zip(weights, expected, strict=True))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(multiply, range(40)))


def test_row_counts_are_rounded_to_few_shapes() -> None:
    """Eight sizes per power of two, which bounds the number of compiled kernels; padding is below an eighth."""
    sizes = {round_rows(rows) for rows in range(1, 4097)}
    assert len(sizes) == 16 + 14 + 8 * 5 and max(sizes) == 4096
    for rows in range(1, 4097):
        assert rows <= round_rows(rows) <= max(rows + 7, rows * 9 / 8) and round_rows(round_rows(rows)) == round_rows(
            rows
        )


@needs_onednn
def test_all_products_use_rounded_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = set()
    product = torch.ops.mkldnn._linear_pointwise

    def watched(x: torch.Tensor, *others: object) -> torch.Tensor:
        shapes.add(x.shape[0])
        return product(x, *others)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", watched)
    layer = Linear(8, 96)
    for rows in range(1, 700):
        assert layer(torch.ones(rows, 8, requires_grad=True)).shape == (rows, 96)
    assert shapes == {round_rows(rows) for rows in range(2, 700)}
    layer(torch.ones(2, 100, 8)).sum().backward()
    assert shapes == {round_rows(rows) for rows in range(2, 700)}, "96 is one of them"


def test_inexact_layers_compute_the_same_product(tmp_path: Path) -> None:
    values = {"model": {"name": "tiny-qwen3", "debug": {"random_init": True}}, "output_dir": tmp_path}
    exact = build_backend(TrainConfig.model_validate(values)).model
    values["model"] = {**values["model"], "attn": "sdpa"}  # type: ignore[dict-item]
    fast = build_backend(TrainConfig.model_validate(values)).model
    layers = [[m for m in model.modules() if isinstance(m, Linear)] for model in (exact, fast)]
    assert all(layer.exact for layer in layers[0])
    assert not any(layer.exact for layer in layers[1])
    x = torch.randn(70, layers[0][0].in_features, requires_grad=True)
    for a, b in zip(*layers, strict=True):
        if a.in_features != x.shape[1]:
            continue
        grads = [torch.autograd.grad(layer(x).square().sum(), (x, layer.weight)) for layer in (a, b)]
        assert torch.allclose(a(x), b(x), atol=1e-5)
        assert all(torch.allclose(ours, theirs, atol=1e-3) for ours, theirs in zip(*grads, strict=True))
