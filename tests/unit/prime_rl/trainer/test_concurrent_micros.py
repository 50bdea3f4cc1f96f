"""Micro-batches computed by several threads."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from prime_rl.trainer.backend import Backend, build_backend
from prime_rl.trainer.concurrent_micros import ConcurrentMicros
from prime_rl.trainer.config import TrainConfig
from prime_rl.trainer.rl.loss import build_loss
from rollouts.kernels import cpu as cpu_kernels
from rollouts.training.batching import pack_samples
from rollouts.training.types import Sample

pytestmark = pytest.mark.usefixtures("one_thread")


def build(tmp_path: Path, **changes: Any) -> Backend:
    model = {"name": "tiny-qwen3", "dtype": "float32", "device": "cpu", "debug": {"random_init": True}}
    settings = {"model": model | changes.pop("model", {}), "output_dir": str(tmp_path)}
    return build_backend(TrainConfig.model_validate(settings | changes))


def draw_samples(num: int) -> list[Sample]:
    draw = torch.Generator().manual_seed(0)
    samples = []
    for _ in range(num):
        length = int(torch.randint(8, 40, (), generator=draw))
        tokens = torch.randint(0, 300, (length,), generator=draw).tolist()
        mask, streams = [0.0] * 4 + [1.0] * (length - 4), torch.randn(2, length, generator=draw)
        samples.append(
            Sample(
                prompt="", tokens=tokens, loss_mask=mask, advantages=streams[0].tolist(),
                inference_logprobs=(streams[1] - 5).tolist(),
            )
        )  # fmt: skip
    return samples


@pytest.mark.parametrize(
    "model", [{}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "attn": "sdpa"}], ids=["fp32", "bf16 exact", "bf16"]
)
def test_threads_change_no_bit_of_gradients_and_statistics(
    model: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_kernels, "has_bf16_products", lambda: True)
    backend = build(tmp_path, model=model)
    assert backend.concurrent is None  # the model is small
    loss = build_loss(TrainConfig().loss, 64)
    [micros] = pack_samples(draw_samples(24), 64)
    assert len(micros) > 6

    def run() -> tuple[list[Tensor], dict[str, float]]:
        for parameter in backend.parameters.values():
            parameter.grad = None
        stats = backend.forward_backward(micros, loss)
        return [p.grad.clone() for p in backend.parameters.values() if p.grad is not None], stats.summary()

    expected, statistics = run()
    for num_threads in (2, 3):
        backend.concurrent = ConcurrentMicros(num_threads)
        actual, found = run()
        assert found == statistics and len(actual) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def run_fake(num_threads: int, failures: dict[int, BaseException]) -> tuple[list[int], set[str]]:
    """Micro-batches that wait a little; returns the order of the losses, and the threads that computed."""
    order: list[int] = []
    threads: set[str] = set()
    weight = torch.ones(1, requires_grad=True)

    def compute(number: Any) -> Any:
        threads.add(threading.current_thread().name)
        threading.Event().wait(0.01)
        if number in failures:
            raise failures[number]
        return number

    def finish(number: Any, inputs: Any) -> Tensor:
        order.append(number)
        return (weight * number).sum()

    ConcurrentMicros(num_threads).run(list(range(12)), compute, finish, [weight], [weight])  # type: ignore[arg-type]
    assert weight.grad == sum(range(12))
    return order, threads


def test_losses_of_all_threads_are_computed_in_order() -> None:
    for num_threads in (1, 4):
        order, threads = run_fake(num_threads, {})
        assert order == list(range(12)) and len(threads) == num_threads


@pytest.mark.parametrize("number", [0, 1, 5, 11])
def test_an_error_of_any_thread_is_raised(number: int) -> None:
    with pytest.raises(RuntimeError, match="no memory"):
        run_fake(3, {number: RuntimeError("no memory")})
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("micro-batches")]


def test_concurrency_that_is_not_supported_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"max_concurrent_micro_batches is 2, which model\.ac or model\.compile does not"
    ):
        build(tmp_path, max_concurrent_micro_batches=2, model={"ac": {}})


def test_several_threads_per_product_are_named_with_a_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    with pytest.raises(ValueError, match=r"several threads per product .*: set OMP_NUM_THREADS=1 in the environment"):
        build(tmp_path, max_concurrent_micro_batches=2)
