"""`micro_bs = "auto"`."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from group_of_one import group_of_one
from loguru import logger

from prime_rl.plan.config import PlanConfig
from prime_rl.runtime.machine import SHARED_GPU_VARIABLE, find_available_memory
from prime_rl.trainer import micro_batch_size
from prime_rl.trainer.backend import Backend, build_backend, shard_model
from prime_rl.trainer.config import MAX_AUTO_TOKENS, TrainConfig
from prime_rl.trainer.micro_batch_size import choose_num_rows, find_free_bytes, measure_num_rows, measure_row_bytes
from prime_rl.trainer.run import choose_micro_bs

pytestmark = pytest.mark.usefixtures("one_thread")


def build_config(tmp_path: Path, **changes: Any) -> TrainConfig:
    model = {"name": "tiny-qwen3", "dtype": "float32", "device": "cpu", "debug": {"random_init": True}}
    return TrainConfig.model_validate(
        {"model": model | changes, "output_dir": str(tmp_path), "micro_bs": "auto", "seed": 3}
    )


def build(tmp_path: Path, **changes: Any) -> Backend:
    return build_backend(build_config(tmp_path, **changes))


@pytest.mark.parametrize(
    ("row_mib", "free_mib", "seq_len", "num_threads", "rows"),
    [
        (1, 1000, 64, 1, 32),  # limited by MAX_AUTO_TOKENS
        (10, 1000, 64, 1, 16),  # 1000 / 4 / 15 = 16.7
        (10, 1000, 64, 2, 8),
        (100, 1000, 64, 1, 1),  # 1.7
        (10_000, 1000, 64, 1, 1),  # does not fit
        (10, -500, 64, 1, 1),
        (1, 1e6, 4096, 1, 1),
    ],
)
def test_rows_are_a_power_of_two_within_memory_and_tokens(
    row_mib: float, free_mib: float, seq_len: int, num_threads: int, rows: int
) -> None:
    assert choose_num_rows(row_mib * 2**20, free_mib * 2**20, seq_len, "cpu", num_threads) == rows


def test_an_engine_takes_memory_of_a_shared_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"mem_get_info": (700, 1000), "memory_reserved": 150, "memory_allocated": 50}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert find_free_bytes(torch.device("cuda")) == 800
    monkeypatch.setenv(SHARED_GPU_VARIABLE, "1")
    assert find_free_bytes(torch.device("cuda")) == 500


def test_stored_bytes_grow_with_length_and_layers(tmp_path: Path) -> None:
    short, long = (measure_row_bytes(build(tmp_path), seq_len) for seq_len in (64, 256))
    assert 3 < long / short < 20  # linear and, in exact attention, quadratic terms
    shallow = measure_row_bytes(build(tmp_path, debug={"random_init": True, "num_layers": 1}), 256)
    assert shallow < 0.8 * long
    recomputed, selective, offloaded = (
        measure_row_bytes(build(tmp_path, **options), 256)
        for options in ({"ac": {}}, {"ac": {"mode": "selective"}}, {"ac": {"mode": "selective"}, "ac_offloading": {}})
    )
    assert recomputed < 0.7 * selective and selective < 0.95 * long
    assert offloaded == selective, "on a CPU nothing is moved"


@pytest.mark.parametrize("reshards", [True, False])
def test_gathered_parameters_are_no_activations(reshards: bool, tmp_path: Path) -> None:
    whole, sharded = build(tmp_path), build(tmp_path)
    config = build_config(tmp_path, reshard_after_forward=reshards).model
    with group_of_one() as mesh:
        shard_model(sharded.model, config, sharded.placement, replace(sharded.mesh, dense=mesh))
        assert measure_row_bytes(sharded, 128) == measure_row_bytes(whole, 128)


def test_measuring_changes_no_state(tmp_path: Path) -> None:
    backend = build(tmp_path)
    before = {name: tensor.clone() for name, tensor in backend.model.state_dict().items()}
    state = torch.get_rng_state()
    measure_num_rows(backend, 64)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in backend.model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in backend.model.state_dict().items())


def test_state_in_host_memory_takes_none_of_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = build(tmp_path)
    state = micro_batch_size.STATE_BYTES * sum(p.numel() for p in backend.parameters.values())
    monkeypatch.setattr(micro_batch_size, "find_free_bytes", lambda device: float(state))
    monkeypatch.setattr(micro_batch_size, "measure_row_bytes", lambda *_: state / 16)
    assert measure_num_rows(backend, 64) == 1
    on_gpu = replace(backend, placement=replace(backend.placement, device=torch.device("cuda")))
    assert measure_num_rows(on_gpu, 64) == 8, "0.8 * 16 / 1.5 = 8.5"


def test_size_is_logged_and_kept_by_a_resumed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, lines = build_config(tmp_path), list[str]()
    backend = build_backend(config)
    monkeypatch.setattr(micro_batch_size, "find_available_memory", lambda: 8.0 * 2**30)
    handler = logger.add(lines.append, format="{message}")
    rows = choose_micro_bs(config, backend, {})
    logger.remove(handler)
    assert rows == MAX_AUTO_TOKENS["cpu"] // config.model.seq_len
    assert f"micro_bs auto: {rows} rows of {config.model.seq_len} tokens" in lines[0]
    assert choose_micro_bs(config, backend, {"micro_bs": 5}) == 5
    assert choose_micro_bs(config.model_copy(update={"micro_bs": 7}), backend, {"micro_bs": 5}) == 7


def test_available_memory_is_at_most_that_of_the_machine() -> None:
    assert 2**20 < find_available_memory() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_plan_assumes_the_largest_micro_batch_of_auto() -> None:
    config = PlanConfig.model_validate({"trainer": {"micro_bs": "auto"}, "seq_len": 512})
    assert config.count_micro_tokens("cpu") == MAX_AUTO_TOKENS["cpu"]
    assert PlanConfig.model_validate({"trainer": {"micro_bs": 3}, "seq_len": 512}).count_micro_tokens("cpu") == 1536


@pytest.mark.parametrize("value", ["many", 0, -1])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="micro_bs"):
        TrainConfig.model_validate({"micro_bs": value})
