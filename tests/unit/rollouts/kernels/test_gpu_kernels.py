"""Triton kernels, in Triton's interpreter on a CPU, against torch operations; `make gpu` compares them on a GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("triton") is None:
    pytest.skip("no triton; cure: make test-extras", allow_module_level=True)

from prime_rl.trainer.models.causal_lm import apply_rotary_emb, rms_norm, swiglu
from rollouts.kernels import gpu, native

TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def _no_cpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The references are torch operations."""
    monkeypatch.setattr(native, "library", lambda: None)


def check(found: Sequence[Tensor], expected: Sequence[Tensor], dtype: torch.dtype) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def check_sums(found: Sequence[Tensor], expected: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Like `check`, of sums that may cancel: tolerances are relative to the largest element."""
    for a, b in zip(found, expected, strict=True):
        scale = max(float(b.abs().max()), 1.0)
        check([a / scale], [(b / scale).to(dtype)], dtype)


def differentiate(function: Callable[..., Tensor], grad: Tensor, *inputs: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    return list(torch.autograd.grad(function(*leaves), leaves, grad))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(7, 96), (1, 576), (5, 3, 64), (33, 2, 128), (3, 2500)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    grad = torch.randn(shape).to(dtype)
    out, scales = gpu.rms_norm(x, weight, 1e-6)
    check([out], [rms_norm(x, weight, 1e-6)], dtype)
    found = gpu.rms_norm_backward(grad, x, weight, scales)
    expected = differentiate(lambda x, w: rms_norm(x, w, 1e-6), grad.double(), x.double(), weight.double())
    check_sums(found, expected, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])  # the interpreter multiplies the bits of bf16
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(2, 16, 512), (17, 48, 1024), (64, 32, 512)])
def test_products_in_parts_are_added_by_the_norm(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    assert gpu.supports_split(x, weight)
    parts = gpu.multiply_split(x, weight)
    assert parts.shape == (gpu.SPLITS, rows, outputs) and parts.dtype == torch.float32
    torch.testing.assert_close(parts.double().sum(0), x.double() @ weight.double().t(), rtol=1e-5, atol=1e-4)
    residual, norm = torch.randn(rows, outputs).to(dtype), torch.randn(outputs).to(dtype)
    expected = (residual.float() + parts.sum(0)).to(dtype)
    out, _ = gpu.rms_norm(residual, norm, 1e-6, added=parts)
    assert torch.equal(residual, expected)
    check([out], [rms_norm(expected, norm, 1e-6)], dtype)


def test_which_products_are_in_parts() -> None:
    def supports(rows: int, outputs: int, inputs: int) -> bool:
        return gpu.supports_split(torch.empty(rows, inputs), torch.empty(outputs, inputs))

    assert supports(2, 2048, 512) and supports(64, 16, 3072)
    with pytest.MonkeyPatch.context() as patch:  # a GPU with less shared memory
        patch.setattr(gpu, "_shared_memory", lambda device: 101_376)
        assert supports(32, 64, 512) and not supports(33, 64, 512)
    others = [(1, 64, 512), (65, 64, 512), (8, 4096, 512), (8, 60, 512), (8, 64, 576)]
    assert not any(supports(*sizes) for sizes in others)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rms_norm_of_slices_with_a_weight_per_head(dtype: torch.dtype) -> None:
    whole, weight = torch.randn(6, 5, 32).to(dtype), torch.randn(3, 32).to(dtype)
    x = whole[:, 1:4]
    check([gpu.rms_norm(x, weight, 1e-5)[0]], [rms_norm(x, weight, 1e-5)], dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rms_norm_adds_the_residual_in_place(dtype: torch.dtype) -> None:
    x, added, weight = torch.randn(9, 80).to(dtype), torch.randn(9, 80).to(dtype), torch.randn(80).to(dtype)
    expected = x + added
    check([gpu.rms_norm(x, weight, 1e-5, added=added)[0], x], [rms_norm(expected, weight, 1e-5), expected], dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", [1, 3])
def test_rotate(heads: int, dtype: torch.dtype) -> None:
    x, grad = torch.randn(2, 10, heads, 32).to(dtype)
    angles = torch.rand(10, 1, 16).repeat(1, 1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    check_sums([gpu.rotate(x, cos, sin)], [apply_rotary_emb(x, cos, sin)], dtype)
    expected = differentiate(lambda x: apply_rotary_emb(x, cos, sin), grad, x)
    check_sums([gpu.rotate(grad, cos, sin, True)], expected, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_swiglu(dtype: torch.dtype) -> None:
    both, grad = torch.randn(5, 2 * 1500).to(dtype), torch.randn(5, 1500).to(dtype)
    gate, up = both.chunk(2, dim=1)
    check([gpu.swiglu(gate, up)], [swiglu(gate, up)], dtype)
    expected = differentiate(swiglu, grad.double(), gate.double(), up.double())
    check(gpu.swiglu_backward(grad, gate, up), [x.to(dtype) for x in expected], dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("has_norm", "has_rope"), [(True, True), (True, False), (False, True)])
def test_norm_and_rotate(has_norm: bool, has_rope: bool, dtype: torch.dtype) -> None:
    whole, weight = torch.randn(6, 8, 32).to(dtype), torch.randn(5, 32).to(dtype)
    angles = torch.rand(6, 1, 16).repeat(1, 1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    signed = torch.cat((-sin[..., :16], sin[..., 16:]), dim=-1)
    expected = whole.clone()
    qk = expected[:, :5]
    qk = rms_norm(qk, weight, 1e-6) if has_norm else qk
    expected[:, :5] = apply_rotary_emb(qk, cos, sin) if has_rope else qk
    angled = (cos, signed) if has_rope else (None, None)
    gpu.norm_and_rotate_(whole[:, :5], weight if has_norm else None, 1e-6, *angled)
    check_sums([whole], [expected], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter has no products of bf16
@pytest.mark.parametrize(
    ("config", "heads", "kv_heads", "dim"),
    [((16, 16), 9, 3, 64), ((32, 16), 4, 2, 32), ((64, 16), 2, 2, 16), ((128, 32), 9, 3, 64)],
)
def test_attend_step(
    config: tuple[int, int], heads: int, kv_heads: int, dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of no, a few, exactly one block and several blocks of cached keys; the rest of a page is NaN."""
    monkeypatch.setattr(gpu, "FEW", (*config, 4, 2))
    keys, lengths = 32, [0, 3, 32, 80, 65, -1]
    rows, blocks = len(lengths), 3
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim).to(dtype)
    q, k, v = qkv.split_with_sizes((heads, kv_heads, kv_heads), 1)
    cache = [torch.full((2, rows + 1, kv_heads, keys, dim), torch.nan, dtype=dtype) for _ in range(blocks)]
    tables = torch.stack([torch.randperm(rows + 1)[:rows] for _ in range(blocks)]).int()
    expected = []
    for row, length in enumerate(lengths):
        past = torch.randn(2, kv_heads, max(length, 0), dim).to(dtype)
        for j in range(blocks):
            part = past[:, :, j * keys : (j + 1) * keys]
            cache[j][:, tables[j, row], :, : part.shape[2]] = part
        k_all, v_all = (torch.cat((p, own[row][:, None]), 1).float() for p, own in zip(past, (k, v), strict=True))
        k_all, v_all = (x.repeat_interleave(heads // kv_heads, 0) for x in (k_all, v_all))
        weights = (torch.einsum("hd,hkd->hk", q[row].float(), k_all) * dim**-0.5).softmax(-1)
        expected.append(torch.einsum("hk,hkd->hd", weights, v_all).to(dtype))
    stored = [block.clone() for block in cache]
    for row, length in enumerate(lengths[:-1]):
        for half, own in enumerate((k, v)):
            stored[length // keys][half, tables[length // keys, row], :, length % keys] = own[row]
    addresses = torch.tensor([[c[half].data_ptr() for c in cache] for half in (0, 1)])
    found = gpu.attend_step(q, k, v, addresses, tables, torch.tensor(lengths), keys)
    check([found], [torch.stack(expected)], dtype)
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(cache, stored, strict=True))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("inputs", "outputs"), [(1024, 8), (96, 6), (2500, 33)])
def test_multiply_row(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(1, inputs).to(dtype), (torch.randn(outputs, inputs) * inputs**-0.5).to(dtype)
    check([gpu.multiply_row(x, weight)], [torch.nn.functional.linear(x, weight)], dtype)


def test_rows_do_not_depend_on_the_batch() -> None:
    x, weight = torch.randn(40, 96), torch.randn(96)
    assert torch.equal(gpu.rms_norm(x, weight, 1e-6)[0][:3], gpu.rms_norm(x[:3], weight, 1e-6)[0])


def test_sizes_that_the_decode_kernel_supports() -> None:
    sizes: dict[tuple[Any, ...], bool] = {(16, 8, 128, 128): True, (9, 3, 64, 128): True, (2, 2, 8, 128): False}
    sizes |= {(4, 4, 96, 128): False, (3, 2, 64, 128): False}
    for arguments, expected in sizes.items():
        assert gpu.supports_decode(*arguments) == expected


class Launches:
    """In place of a kernel: records the last two arguments, the warps and the stages of every launch."""

    def __init__(self) -> None:
        self.made: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, num_warps: int, num_stages: int = 0) -> None:
            self.made.append((*arguments[-2:], num_warps, num_stages))

        return launch


@pytest.mark.parametrize(
    ("memory", "dim", "dtype", "few", "many"),
    [
        (232_448, 256, torch.float32, gpu.FEW, gpu.MANY),  # H100
        (166_912, 256, torch.bfloat16, gpu.FEW, gpu.MANY),  # A100
        (166_912, 256, torch.float32, gpu.FEW, (512, 32, 2, 5)),
        (101_376, 128, torch.bfloat16, gpu.FEW, gpu.MANY),  # RTX 4090
        (101_376, 256, torch.bfloat16, gpu.FEW, (512, 32, 2, 5)),
        (101_376, 128, torch.float32, gpu.FEW, (512, 32, 2, 5)),
        (101_376, 256, torch.float32, (64, 32, 4, 2), (512, 32, 2, 3)),
        (65_536, 256, torch.float32, (64, 16, 4, 2), (512, 16, 2, 3)),  # T4
    ],
)
def test_attention_fits_into_the_shared_memory_of_a_gpu(
    memory: int, dim: int, dtype: torch.dtype, few: tuple[int, ...], many: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Only where it must, it differs from what was measured to be fast: else Triton would run out of memory."""
    launches = Launches()
    monkeypatch.setattr(gpu, "_shared_memory", lambda device: memory)
    monkeypatch.setattr(gpu, "_attend_split", launches)
    monkeypatch.setattr(gpu, "_combine", Launches())
    q = torch.zeros(1, 1, dim, dtype=dtype)
    for blocks in (1, gpu.MANY_BLOCKS):
        addresses, tables = torch.zeros(2, blocks, dtype=torch.long), torch.zeros(blocks, 1, dtype=torch.int32)
        gpu.attend_step(q, q, q, addresses, tables, torch.zeros(1, dtype=torch.long), 128)
    assert launches.made == [few, many]
