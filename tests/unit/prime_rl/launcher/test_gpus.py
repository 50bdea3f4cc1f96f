"""Which process uses which GPU or core."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from loguru import logger

from prime_rl.config import RLConfig
from prime_rl.launcher import gpus
from prime_rl.rl import build_trainer_argv, start_processes
from prime_rl.runtime.core_lease import DIRECTORY_VARIABLE
from prime_rl.runtime.machine import SHARED_GPU_VARIABLE
from prime_rl.utils.pydantic_config import parse_argv


def parse(*argv: str) -> RLConfig:
    return parse_argv(RLConfig, ["--model.name", "tiny-qwen3", *argv], "rl")[0]


@pytest.fixture
def visible(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    monkeypatch.setattr(gpus, "find_gpus", lambda: found)
    return found


def test_without_gpus_everything_is_on_the_cpu(visible: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpus.assign_gpus(parse()) == gpus.GpuAssignment(None, None)
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(gpus, "num_cores", lambda: 2)
    assert gpus.compute_environment(None, 2) == {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    shared = gpus.compute_environment(None, 2, Path("leases"))
    assert shared["OMP_NUM_THREADS"] == "1" and shared[DIRECTORY_VARIABLE] == "leases"
    monkeypatch.setattr(gpus, "num_cores", lambda: 1)
    assert gpus.compute_environment(None, 2)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setattr(gpus, "num_cores", lambda: 16)
    assert gpus.compute_environment(None, 2)["OMP_NUM_THREADS"] == "8"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert gpus.compute_environment(None, 2, Path("leases")) == {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "3"}


def test_gpu_ids_without_a_gpu_are_rejected_by_name(visible: list[int]) -> None:
    with pytest.raises(ValueError, match=r"trainer_gpu_ids .* leave it out"):
        gpus.assign_gpus(parse("--trainer_gpu_ids", "0"))


def test_ids_of_gpus_that_are_not_visible_are_rejected(visible: list[int]) -> None:
    visible[:] = [2, 3]
    for key in ("trainer_gpu_ids", "inference_gpu_ids"):
        with pytest.raises(ValueError, match=rf"{key} = \[0\]: GPU 0 is not visible here, give ids of \[2, 3\]"):
            gpus.assign_gpus(parse(f"--{key}", "0"))


def test_the_command_for_a_single_gpu_shares_it(visible: list[int]) -> None:
    visible[:] = [0]
    lines: list[str] = []
    sink = logger.add(lines.append, format="{message}")
    try:
        config = parse("--trainer_gpu_ids", "0", "--inference_gpu_ids", "1")  # as documented for one GPU
        assert gpus.assign_gpus(config) == gpus.GpuAssignment((0,), (0,))
    finally:
        logger.remove(sink)
    assert lines == ["inference_gpu_ids = [1]: GPU 1 is not visible here, sharing GPU 0\n"]
    with pytest.raises(ValueError, match=r"trainer_gpu_ids = \[0, 1\]: GPU 1 is not visible here"):
        gpus.assign_gpus(parse("--trainer_gpu_ids", "0,1"))


def test_gpus_are_shared_out(visible: list[int]) -> None:
    visible[:] = [3]
    assert gpus.assign_gpus(parse()) == gpus.GpuAssignment((3,), (3,))
    visible[:] = [0, 1, 2]
    assert gpus.assign_gpus(parse()) == gpus.GpuAssignment((1,), (0,))
    assert gpus.assign_gpus(parse("--trainer_gpu_ids", "0,1")) == gpus.GpuAssignment((0, 1), (2,))
    assert gpus.assign_gpus(parse("--trainer_gpu_ids", "0,1,2")) == gpus.GpuAssignment((0, 1, 2), (0,)), "shared"
    assert gpus.assign_gpus(parse("--inference_gpu_ids", "2")) == gpus.GpuAssignment((0,), (2,))
    assert gpus.compute_environment((0, 1), 3)["CUDA_VISIBLE_DEVICES"] == "0,1"
    with pytest.raises(ValueError, match=r"inference_gpu_ids = \[1, 2\]: .* one id, or change inference\.parallel"):
        gpus.assign_gpus(parse("--inference_gpu_ids", "1,2"))


def test_weights_do_not_pass_by_nccl_on_a_shared_gpu(visible: list[int]) -> None:
    config = parse("--weight_broadcast.type", "nccl")
    visible[:] = [0, 1]
    assert gpus.assign_gpus(config) == gpus.GpuAssignment((1,), (0,))
    visible[:] = [3]
    with pytest.raises(ValueError, match=r'share GPU 3, which NCCL refuses: use "filesystem" or "gloo"'):
        gpus.assign_gpus(config)


def test_processes_know_whether_they_share_a_gpu() -> None:
    found: dict[str, dict[str, str]] = {}
    run: Any = SimpleNamespace(start=lambda name, argv, *, env, **options: found.update({name: env}))
    paths = dict.fromkeys(("inference", "teacher_inference", "orchestrator", "trainer"), Path("x.toml"))
    for assignment, shared in (
        (gpus.GpuAssignment((0,), (0,), (0,)), {"inference", "teacher_inference", "trainer"}),
        (gpus.GpuAssignment((1,), (0,), (1,)), {"teacher_inference", "trainer"}),
        (gpus.GpuAssignment((1, 2), (0,), (3,)), set()),
        (gpus.GpuAssignment(None, None), set()),
    ):
        start_processes(run, parse(), paths, assignment, Path("leases"))
        assert {name for name, env in found.items() if SHARED_GPU_VARIABLE in env} == shared


def test_the_trainer_starts_a_rank_per_gpu(visible: list[int]) -> None:
    visible[:] = [0, 1, 2]
    one, two = parse(), parse("--trainer_gpu_ids", "0,1")
    assert gpus.count_trainer_ranks(one, gpus.assign_gpus(one)) == 1
    assert build_trainer_argv(Path("t.toml"), 1)[-2:] == ["@", "t.toml"]
    assert gpus.count_trainer_ranks(two, gpus.assign_gpus(two)) == 2
    assert build_trainer_argv(Path("t.toml"), 2)[-4:] == ["@", "t.toml", "--parallel.dp", "2"]
    assert gpus.assign_gpus(parse("--trainer.parallel.dp", "2")) == gpus.GpuAssignment((1, 2), (0,))
    with pytest.raises(ValueError, match=r"trainer_gpu_ids = \[0, 1\], .*: trainer\.parallel\.dp is 3 but 2"):
        gpus.assign_gpus(parse("--trainer_gpu_ids", "0,1", "--trainer.parallel.dp", "3"))
    with pytest.raises(ValueError, match=r"trainer\.parallel needs 3 ranks but inference leaves 2 of 3"):
        gpus.assign_gpus(parse("--trainer.parallel.dp", "3"))
    assert gpus.assign_gpus(parse("--trainer.parallel.tp", "2")) == gpus.GpuAssignment((1, 2), (0,))
    visible.clear()
    many = parse("--trainer.parallel.dp", "4")
    assert gpus.count_trainer_ranks(many, gpus.assign_gpus(many)) == 4
