"""Throughput and model FLOPs utilization."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from prime_rl.trainer import perf
from prime_rl.trainer.models.causal_lm import CausalLM
from prime_rl.trainer.models.decoder_config import DecoderConfig
from prime_rl.trainer.models.value import add_critic
from prime_rl.trainer.perf import (
    MatmulParameters,
    PerfCounter,
    compute_train_flops,
    count_computed,
    count_matmul_parameters,
    measure_peak_flops,
)
from rollouts.training.batching import MicroBatch, Share
from rollouts.training.json_files import read_json_file

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


@pytest.fixture
def model() -> CausalLM:
    directory = Path(perf.__file__).parents[1] / "assets" / "tiny-qwen3"
    return CausalLM(DecoderConfig.from_hf(read_json_file(directory / "config.json")))


def build_micro(ids: list[int], lengths: list[int], loss_mask: list[float]) -> MicroBatch:
    zeros = [0.0] * len(ids)
    return MicroBatch(ids, [0] * len(ids), [0] * len(ids), loss_mask, zeros, zeros, zeros, None, lengths, [0])


def test_train_flops_are_6_per_parameter_plus_attention(model: CausalLM) -> None:
    layers = 2 * (128 * 128 * 2 + 2 * 128 * 64 + 3 * 128 * 384)
    assert count_matmul_parameters(model) == MatmulParameters(layers, 320 * 128)
    flops = compute_train_flops(model.config, MatmulParameters(900, 100), [10, 20])
    assert flops == 6 * 1000 * 30 + 12 * 2 * 128 * (50 + 200)
    frozen = compute_train_flops(model.config, MatmulParameters(900, 100, 300, 100), [10, 20])
    assert frozen == flops - 2 * 400 * 30
    half = compute_train_flops(model.config, MatmulParameters(900, 100), [10, 20], in_layers=0.5, in_head=0.1)
    assert half == flops - 6 * (450 + 90) * 30
    pairs = compute_train_flops(model.config, MatmulParameters(900, 100), [10, 20], in_attention=0.5)
    assert pairs == flops - 12 * 2 * 128 * 125
    model.requires_grad_(False)
    assert count_matmul_parameters(model) == MatmulParameters(layers, 320 * 128, layers, 320 * 128)


@pytest.mark.parametrize(("backbone", "num"), [("own", 2), ("shared", 1)])
def test_backbone_of_a_critic_is_counted(model: CausalLM, backbone: Literal["own", "shared"], num: int) -> None:
    plain = count_matmul_parameters(model)
    add_critic(model, backbone)
    parameters = count_matmul_parameters(model)
    assert parameters == MatmulParameters(num * plain.layers, plain.head, num_backbones=num)
    flops = compute_train_flops(model.config, parameters, [10, 20])
    assert flops == num * compute_train_flops(model.config, replace(plain, head=0), [10, 20]) + 6 * plain.head * 30


def test_shared_prefixes_and_prompts_are_not_counted() -> None:
    group = build_micro([*range(80), 90] * 2, [81, 81], [*[0.0] * 79, 1.0, 0.0] * 2)
    assert count_computed([group]) == (1.0, 2 / 162, 1.0)
    group.shared = [0, 60]
    assert count_computed([group]) == (102 / 162, 2 / 162, 1 - 60**2 / (2 * 81**2))
    assert count_computed([]) == (1.0, 1.0, 1.0)


def test_a_window_of_steps_is_averaged(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perf, "find_peak_flops", lambda *_: 1e9)
    counter = PerfCounter(model, CPU, torch.float32)
    share = Share([], [100])
    flops = compute_train_flops(model.config, counter.parameters, [100])
    assert counter.observe(share, 1.0)["perf/throughput"] == 100
    metrics = counter.observe(share, 3.0)
    assert metrics["perf/throughput"] == 50
    assert metrics["perf/mfu"] == pytest.approx(100 * 2 * flops / 4.0 / 1e9)


def test_peak_is_that_of_all_threads(model: CausalLM) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = measure_peak_flops(CPU, torch.float32)
        alone, together = (PerfCounter(model, CPU, torch.float32, num_concurrent=n).peak for n in (1, 4))
        torch.set_num_threads(3)
        three = measure_peak_flops(CPU, torch.float32)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    assert 1.5 < three / one < 6  # 3, if no other process slows one of them down
    assert 2 < together / alone < 8


def test_peak_counts_cpu_time_not_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that gets a core for a part of the time only measures the peak of an idle machine."""
    product = torch.matmul

    def interrupted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return product(a, b)

    alone = measure_peak_flops(CPU, torch.float32, size=384)
    monkeypatch.setattr(perf.torch, "matmul", interrupted)
    monkeypatch.setattr(perf, "linear", interrupted)
    assert measure_peak_flops(CPU, torch.float32, size=384) > alone / 4  # by the wall clock: 1 / 50
