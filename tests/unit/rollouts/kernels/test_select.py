"""Which kernels are selected."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from rollouts import kernels
from rollouts.kernels import cpu, native, select


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    select.gpu_kernels.cache_clear()
    yield
    select.gpu_kernels.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, swiglu: Any) -> ModuleType:
    """A replacement of `rollouts.kernels.gpu`, and tensors on the CPU in place of the GPU's."""
    module = ModuleType("rollouts.kernels.gpu")
    module.swiglu = swiglu  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(kernels, "gpu", module, raising=False)
    monkeypatch.setattr(select.importlib.util, "find_spec", lambda name: SimpleNamespace(name=name))
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, **options: zeros(*size))
    return module


def test_triton_that_does_not_run_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("Failed to find C compiler")

    install(monkeypatch, swiglu)
    assert select.gpu_kernels() is None and select.gpu_kernels() is None
    assert len(caplog.records) == 1 and "Failed to find C compiler" in caplog.text


def test_triton_that_runs_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    module = install(monkeypatch, lambda gate, up: gate * up)
    assert select.gpu_kernels() is module


def test_a_machine_without_triton_has_no_gpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select.importlib.util, "find_spec", lambda name: None)
    assert select.gpu_kernels() is None


def test_tensors_on_a_cpu_get_its_kernels() -> None:
    x = torch.randn(3, 32)
    expected = cpu if native.library() is not None else None
    assert select.find_kernels(x, x) is expected
    assert select.find_kernels(x, x.double()) is None
