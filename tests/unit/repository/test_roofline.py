"""Least time of generation: operations and bytes counted by hand and from a model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import roofline
from roofline import BandwidthMeter, Decoder, PeakMeter, Resources, Speed, compute_bound, read_decoder

from prime_rl.runtime.tokenizer import resolve_model_dir
from prime_rl.trainer.models.registry import load_decoder

HERE = Resources(threads=1)


def test_weights_are_those_of_the_products() -> None:
    directory = resolve_model_dir("tiny-qwen3")
    decoder = read_decoder(directory, "bfloat16")
    named = load_decoder(directory, random_init=True).named_parameters()
    assert decoder.num_weights == sum(p.numel() for name, p in named if "_proj" in name)
    assert decoder.count_bytes(0) == 2 * (decoder.num_weights + 320 * 128)
    assert decoder.token_bytes == 2 * 2 * 2 * 32 * 2  # keys and values, layers, heads, dim, bytes
    assert read_decoder(directory, "bfloat16", quantized=True).count_bytes(1) == decoder.count_bytes(0) // 2 + 512


def test_bound_is_the_larger_of_products_and_reads() -> None:
    decoder = Decoder(
        {"num_hidden_layers": 1, "hidden_size": 4, "intermediate_size": 8, "vocab_size": 10, "head_dim": 2}
        | {"num_attention_heads": 2, "num_key_value_heads": 1},
        "float32",
        "float32",
    )
    assert (decoder.num_weights, decoder.num_head_weights, decoder.token_bytes) == (48 + 96, 40, 16)
    bound = compute_bound(decoder, groups=2, group=3, prompt=5, new=9)
    assert bound.prefill == 2 * (10 * 144 + 2 * 40) + 10 * 4 * 3 * 4  # 3 keys on average
    assert bound.operations == 2 * 6 * (144 + 40) + 6 * 4 * 9 * 4
    assert bound.num_bytes == 4 * 184 + 16 * (2 * 5 + 6 * 4)
    assert bound.seconds(Speed(100, 10)) == pytest.approx(bound.prefill / 100 + 8 * bound.num_bytes / 10)
    assert bound.seconds(Speed(100, 1e6)) == pytest.approx((bound.prefill + 8 * bound.operations) / 100)


def test_bandwidth_counts_the_bytes_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(Resources, "find_least", lambda _, work: sizes.append(work.__self__.numel()) or 0.5)
    assert BandwidthMeter(4000, HERE).measure(2000) == 4000.0
    assert sizes == [500, 500]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_peak_is_that_of_the_fastest_way(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "ROWS", 64)
    monkeypatch.setattr(roofline, "SIZE", 128)
    seconds: list[float] = []

    def find_least(_: Resources, work: Callable[[], object]) -> float:
        work()
        seconds.append(2.0 - len(seconds))
        return seconds[-1]

    monkeypatch.setattr(Resources, "find_least", find_least)
    assert PeakMeter(dtype, HERE).measure() == 2 * 64 * 128 * 128 / seconds[-1]
    with_onednn = dtype == "float32" or (dtype == "bfloat16" and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    assert len(seconds) == 1 + with_onednn
