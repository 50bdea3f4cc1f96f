"""Packs on a GPU: which sequences cuDNN computes, and that they do not change what is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from prime_rl.trainer.models import flash_attention
from prime_rl.trainer.models.attention import PackedAttention
from prime_rl.trainer.models.flash_attention import FlashPack, cudnn_attention, cudnn_size, has_cudnn, split_pack


def attend(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, window: int | None = None) -> Tensor:
    """`flash_attention` of torch's fused kernel."""
    lengths = ends.diff().tolist()
    assert longest == max(lengths)
    return PackedAttention(lengths, mode="sdpa")(0, q, k, v, window)


def draw(tokens: int, dim: int = 8) -> list[Tensor]:
    return [torch.randn(tokens, num, dim, requires_grad=True) for num in (4, 2, 2)]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of sequences given to cuDNN's function, which a CPU computes by its own kernel, from 16 tokens on."""
    lengths: list[int] = []

    def count(*rows: Tensor) -> Tensor:
        lengths.append(len(rows[0]))
        return cudnn_attention(*rows)

    monkeypatch.setattr(flash_attention, "CUDNN_LENGTH", 16)
    monkeypatch.setattr(flash_attention, "has_cudnn", lambda device: True)
    monkeypatch.setattr(flash_attention, "flash_attention", attend)
    monkeypatch.setattr(flash_attention, "cudnn_attention", count)
    return lengths


@pytest.mark.parametrize("lengths", [[3, 17, 5, 1, 16, 40], [33], [16, 2], [2, 3]])
def test_long_sequences_by_cudnn(lengths: list[int], computed: list[int]) -> None:
    torch.manual_seed(0)
    inputs = draw(sum(lengths))
    weight = torch.randn(sum(lengths), 4, 8)
    found, expected = FlashPack(lengths, "cpu").attend(*inputs, None), PackedAttention(lengths, mode="sdpa")(0, *inputs)
    assert computed == [length for length in lengths if length >= 16]
    torch.testing.assert_close(found, expected)
    grads = (torch.autograd.grad((out * weight).sum(), inputs) for out in (found, expected))
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_windows_and_large_heads_by_flash_attention(computed: list[int]) -> None:
    FlashPack([20], "cpu").attend(*draw(20), 4)
    FlashPack([20], "cpu").attend(*draw(20, 256), None)
    assert computed == []


@pytest.mark.parametrize("dim", [12, 16, 257])
@pytest.mark.parametrize("window", [None, 3])
def test_heads_of_any_size(dim: int, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def fused(q: Tensor, *rest: Any, scale: float | None = None, window_size: tuple[int, int]) -> Tensor:
        sizes.append(size := q.shape[-1])
        k, v, ends, _, longest, _ = rest
        factor = 1.0 if scale is None else scale * size**0.5
        return attend(q * factor, k, v, ends, longest, window_size[0] + 1 or None)

    monkeypatch.setattr(varlen, "varlen_attn", fused)
    monkeypatch.setattr(flash_attention, "find_grouped_options", lambda device: {})
    lengths, inputs = [3, 7, 1], draw(11, dim)
    outs = [PackedAttention(lengths, mode=mode)(0, *inputs, window) for mode in ("flash", "sdpa")]
    assert sizes == ([] if dim > 256 else [16]), "torch refuses more than 256 and odd sizes"
    torch.testing.assert_close(*outs)


def test_neighboring_short_sequences_are_one_part(computed: list[int]) -> None:
    parts = split_pack([3, 4, 16, 17, 5], "cpu")
    assert [(part.size, part.longest) for part in parts] == [(7, 4), (16, 16), (17, 17), (5, 5)]
    assert [None if part.ends is None else part.ends.tolist() for part in parts] == [[0, 3, 7], None, None, [0, 5]]


def test_few_sizes_of_cudnn() -> None:
    """8 per power of two, each at most an eighth longer than the sequence."""
    sizes = {length: cudnn_size(length) for length in range(4096, 65537)}
    assert all(length <= size <= length * 1.125 for length, size in sizes.items())
    assert len(set(sizes.values())) == 1 + 4 * 8
    assert sizes[65536] == 65536 and sizes[8192] == 8192


def test_no_cudnn_on_a_cpu() -> None:
    assert not has_cudnn(torch.device("cpu"))
    assert FlashPack([5000], "cpu").parts == []


@pytest.mark.gpu
def test_cudnn_equals_flash_attention_on_a_gpu() -> None:
    device = torch.device("cuda", 0)
    if torch.cuda.get_device_capability(device) < (9, 0):
        pytest.skip("FlashAttention computes all sequences on this GPU")
    with torch.inference_mode():
        assert has_cudnn(device)
    lengths = [300, 5000, 560, 1, 4096]
    q, k, v = (
        torch.randn(sum(lengths), n, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for n in (8, 2, 2)
    )
    pack = FlashPack(lengths, device)
    outs = [pack.attend(q, k, v, None), flash_attention.flash_attention(q, k, v, pack.ends, pack.longest)]
    assert len(pack.parts) == 4
    grads = [torch.autograd.grad(out.float().square().sum(), (q, k, v)) for out in outs]
    for mine, theirs in zip([outs[0], *grads[0]], [outs[1], *grads[1]], strict=True):
        assert (mine - theirs).norm() <= 0.02 * theirs.norm()
