"""The library's FSDP backend: two ranks equal one, and each continues from what the other has written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from forked_ranks import run_program
from tiny_hf import build_batch, build_tiny_hf

from rollouts.training.backends import latest_checkpoint
from rollouts.training.backends.pytorch import PyTorchTrainingBackend
from rollouts.training.backends.pytorch_factory import create_adamw_optimizer, create_cross_entropy_loss

LATE_RELEASE = """
import sys, torch, torch.distributed as dist
from rollouts.training.backends.ranks import Ranks

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
Ranks(0, 2)  # as the backends construct it
source, gathered = torch.ones(4), [torch.zeros(4)]
view = gathered[0].numpy()
sys.setswitchinterval(60)  # no other thread gets the GIL while this one computes
dist.all_gather(gathered, source, async_op=True)
while not view[0]:  # the thread of the collective is done, and next waits for the GIL
    pass
sum(range(10**7))
"""


def build_backend(path: Path, seed: int = 0, **options: Any) -> PyTorchTrainingBackend:
    model = build_tiny_hf(seed)
    optimizer = create_adamw_optimizer(model, 1e-2)
    return PyTorchTrainingBackend(model, optimizer, create_cross_entropy_loss(), path, **options)


def weights_of(backend: PyTorchTrainingBackend) -> dict[str, torch.Tensor]:
    return backend.get_weights().wait()


def step(backend: Any, *batches: dict[str, Any]) -> dict[str, float]:
    for batch in batches:
        backend.forward_backward(batch)
    return backend.optim_step().wait()


def rows(batch: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    return {name: value[start:stop] for name, value in batch.items()}


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    batches = [build_batch(4, seed) for seed in range(4)]
    single = build_backend(tmp_path / "one", max_grad_norm=0.5)
    reports = [step(single, rows(batch, 0, 2), rows(batch, 2, 4)) for batch in batches[:2]]
    path = anyio.run(single.save_checkpoint, 2, {})
    reports += [step(single, batch) for batch in batches[2:]]

    (tmp_path / "two").mkdir()
    run_program("fsdp_ranks.py", path, tmp_path / "two", timeout_s=300)
    results = json.loads((tmp_path / "two" / "results.json").read_text())
    for name, found in results["exact"].items():
        for mine, theirs in zip(reports, found, strict=True):
            for key in ("loss", "grad_norm", "lr", "step"):
                assert theirs[key] == pytest.approx(mine[key], rel=2e-4), (name, key)
        # One rank continues from what two have written, and two from what one has.
        reader = build_backend(tmp_path / "reader", seed=3)
        metadata = anyio.run(reader.load_checkpoint, latest_checkpoint(tmp_path / "two" / name))
        assert metadata["step"] == 4 and reader.current_step == 4
        ours, theirs = weights_of(single), weights_of(reader)
        assert all(torch.allclose(ours[n], theirs[n], atol=2e-4) for n in ours)
        assert step(reader, batches[0])["step"] == 5
    assert results["bfloat16"]["loss"] == pytest.approx(results["exact"]["full"][0]["loss"], rel=2e-2)
    assert results["bfloat16"]["param_dtype"] == "torch.float32"
    assert results["broadcast"] == ["hello", "hello"]
    assert results["continued"] == [2, 2] and results["num_tensors"] == [len(weights_of(single)), 0]


def test_a_collective_that_ends_at_exit_does_not_abort_the_process() -> None:
    path = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", LATE_RELEASE]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
