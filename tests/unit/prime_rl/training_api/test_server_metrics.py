"""Metrics and tenants of the training server, as files and on the page of `monitor`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from training_requests import TOKENS, Server

from prime_rl.monitor.local_runs import open_run
from prime_rl.monitor.page_data import build_page_data
from prime_rl.training_api.config import ServeConfig, ServedModelConfig
from prime_rl.training_api.futures import Future
from prime_rl.training_api.metrics import MAX_TENANTS, ServerMetrics
from prime_rl.training_api.serve import build_app, build_service, find_owner
from prime_rl.utils.pydantic_config import write_config
from rollouts.training.metrics import load_jsonl

IDLE = {"queue/training": 0, "queue/sampling": 0}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    config = ServeConfig(
        model=ServedModelConfig(name="tiny-qwen3", debug={"random_init": True}),  # type: ignore[arg-type]
        output_dir=tmp_path,
        metrics_interval=3600,
    )
    write_config(config, tmp_path / "configs" / "serve.toml")
    service = build_service(config)
    with TestClient(build_app(service), base_url="http://127.0.0.1:8010") as client:
        yield Server(client, service)


def test_finished_work_appears_on_the_page(server: Server, tmp_path: Path) -> None:
    model_id = server.create_model()
    server.run_pass(model_id, 1)
    server.run_pass(model_id, 2, forward_only=True)
    server.step(model_id, 3)
    server.result(
        server.sample(server.open_sampler(base_model="tiny-qwen3"), 0, {"max_tokens": 5, "stop": []}, num_samples=2)
    )
    assert server.run_pass(model_id, 4, [0, 10**6])["category"] == "user"
    asyncio.run(server.service.log_metrics())
    [row] = load_jsonl(tmp_path / "metrics.jsonl")
    assert {name: row[f"requests/{name}"] for name in ("create_model", "forward", "asample", "failed")} == {
        "create_model": 1, "forward": 1, "asample": 1, "failed": 1,
    }  # fmt: skip
    assert row["requests/forward_backward"] == 2 and row["open/models"] == row["open/tenants"] == 1
    assert row["tokens_per_s/trained"] > 0 and row["latency/sampling/p99"] >= row["latency/sampling/p50"] > 0
    page = build_page_data(open_run(tmp_path))
    assert page["run"]["kind"]["name"] == "server" and page["run"]["model"] == "tiny-qwen3"
    [tenant] = page["tenants"]
    assert (tenant["tokens_trained"], tenant["tokens_sampled"]) == (len(TOKENS) - 1, 10)
    assert (tenant["sessions"], tenant["models"], tenant["requests"], tenant["failed"]) == (1, 1, 6, 1)
    written = (tmp_path / "tenants.json").read_text()
    assert "tml-a" not in written and find_owner("tml-a") not in written


def test_idle_server_writes_one_row_and_then_none(tmp_path: Path) -> None:
    metrics = ServerMetrics(tmp_path)
    assert metrics.read(IDLE) is None
    metrics.observe(Future("m:0", "a" * 32, "s", "m", 0, 1, "optim_step"), b"{}")
    rows = [metrics.read(IDLE) for _ in range(3)]
    assert [row and row.get("requests/optim_step", 0) for row in rows] == [1, 0, None]


def test_restarted_server_continues_the_steps(tmp_path: Path) -> None:
    for _ in range(2):
        ServerMetrics(tmp_path).write({"open/models": 1}, {})
    assert [row["step"] for row in load_jsonl(tmp_path / "metrics.jsonl")] == [1, 2]


def test_tenants_without_a_session_are_forgotten(tmp_path: Path) -> None:
    metrics, busy = ServerMetrics(tmp_path), {"sessions": 1, "models": 0, "waiting": 0}
    for i in range(MAX_TENANTS + 50):
        metrics.observe(Future("m:0", f"{i:08}", "s", "m", 0, 1, "optim_step"), None)
    metrics.write({}, {"00000000": busy})
    rows = json.loads((tmp_path / "tenants.json").read_text())
    names = {row["tenant"] for row in rows}
    assert len(rows) == MAX_TENANTS + 1 and {"00000000", f"{MAX_TENANTS + 49:08}"} < names and "00000001" not in names
