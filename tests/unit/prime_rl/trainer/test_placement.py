"""Device, number format and threads of `auto`."""

from __future__ import annotations

import pytest
import torch
from loguru import logger

from prime_rl.trainer.models import placement
from prime_rl.trainer.models.placement import find_device, find_dtype, limit_threads


@pytest.mark.parametrize(
    ("variable", "cores", "threads"), [("", 4, 1), ("", 5, 2), ("", 16, 8), ("3", 16, 3), ("0", 16, 8), ("two", 2, 1)]
)
def test_threads_follow_the_variable_or_the_cores(
    monkeypatch: pytest.MonkeyPatch, variable: str, cores: int, threads: int
) -> None:
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setattr(placement, "num_cores", lambda: cores)
    try:
        assert limit_threads() == torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_a_missing_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert find_device("auto") == find_device("cuda") == torch.device("cuda")
    assert find_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="'cuda:2', but torch finds 2 GPUs"):
        find_device("cuda:2")
    for name in ("tpu", "mps", "cuda:x"):
        with pytest.raises(ValueError, match=f"{name}.* use auto, cpu or cuda:0"):
            find_device(name)


def test_dtype_follows_the_device() -> None:
    assert find_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert find_dtype("auto", torch.device("cpu")) == torch.float32
    assert find_dtype("float64", torch.device("cpu")) == torch.float64


@pytest.mark.parametrize(("visible", "num_warnings"), [("0,1", 1), ("", 0), ("-1", 0)])
def test_an_assigned_gpu_that_torch_lacks_is_reported(
    monkeypatch: pytest.MonkeyPatch, visible: str, num_warnings: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    lines: list[str] = []
    sink = logger.add(lines.append, format="{message}")
    try:
        assert find_device("auto") == torch.device("cpu")
    finally:
        logger.remove(sink)
    assert len(lines) == num_warnings
