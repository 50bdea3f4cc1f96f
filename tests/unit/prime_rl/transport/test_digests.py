"""Digests of many tensors, in groups for a GPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

from prime_rl.transport import digests
from rollouts.training.manifests import digest_tensor


def test_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group has at most some bytes, a larger tensor one of its own; what a GPU does not hold is in none."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("no triton; cure: make test-extras")
    from rollouts.kernels import gpu_digest

    groups: list[int] = []
    digest_on_gpu = gpu_digest.digest_on_gpu

    def digest_group(tensors: list[Tensor]) -> list[str]:
        groups.append(len(tensors))
        return digest_on_gpu(tensors)

    monkeypatch.setattr(digests, "GROUP_BYTES", 2000)
    monkeypatch.setattr(digests, "_has_kernels", lambda tensor: tensor.numel() != 77)
    monkeypatch.setattr(gpu_digest, "digest_on_gpu", digest_group)
    sizes = [900, 1100, 1, 77, 3000, 500, 900]
    tensors = {f"t{i}": torch.randint(256, (size,), dtype=torch.uint8) for i, size in enumerate(sizes)}
    found = digests.digest_tensors(tensors.items())
    assert list(found) == list(tensors) and groups == [2, 1, 1, 2]
    assert found == {name: digest_tensor(tensor) for name, tensor in tensors.items()}


def test_tensors_of_a_cpu() -> None:
    tensors = {"a": torch.randn(30, 4), "b": torch.zeros(0)}
    assert digests.digest_tensors(tensors.items()) == {name: digest_tensor(t) for name, t in tensors.items()}
