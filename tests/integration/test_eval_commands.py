"""The documented `eval` commands on a CPU: a strict fake API, a local server, checkpoints, a kill."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_runner import Runner, runner, until
from fake_api import FakeApi, serve_api

from prime_rl.runtime.machine import find_free_port, is_healthy
from rollouts.training.metrics import load_jsonl

EVAL = "configs/debug/eval"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Runner]:
    with runner(tmp_path / "said") as found:
        yield found


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApi]:
    with serve_api(FakeApi()) as found:
        for name, value in found.environ.items():
            monkeypatch.setenv(name, value)
        yield found


def results(folder: Path) -> list[dict[str, Any]]:
    return list(load_jsonl(folder / "results.jsonl"))


def test_an_api_model(run: Runner, api: FakeApi, tmp_path: Path) -> None:
    command = run.run_well("eval", "@", f"{EVAL}/single_env.toml", "--output-dir", tmp_path)
    assert len(api.requests) == 32 and api.refusals == []
    summary = json.loads((tmp_path / "evals" / "reverse-text" / "summary.json").read_text())
    assert (summary["model"], summary["avg@2"], summary["pass@1"]) == ("gpt-4.1-mini", 1.0, 1.0)
    assert summary["completion_len/mean"] > 0 and summary["error/mean"] == 0
    assert "reverse-text" in command.out and "1.0000 (0.806 to 1.000)" in command.out
    assert all("sk-test" not in path.read_text() for path in (tmp_path / "logs").iterdir())


def test_a_killed_evaluation_resumes_without_repetition(run: Runner, api: FakeApi, tmp_path: Path) -> None:
    options = ["@", f"{EVAL}/multi_env.toml", "--max_concurrent", 4, "--output-dir", tmp_path]
    options += ["--sampling.temperature", 0.7]
    api.latency_s = 0.2
    command = run.start("eval", *options)
    until(lambda: api.answered >= 14, "some answers", command)
    os.kill(command.process.pid, signal.SIGKILL)
    command.wait()
    until(lambda: command.pids() == [], "its workers to end")
    api.latency_s = 0.0
    run.run_well("eval", *options)
    # 8 x 2 and 4 x 2 texts, and the 4 x 4 rollouts of one or two turns
    texts = [body for body in api.requests if "backwards" in str(body["messages"][0])]
    assert {body["temperature"] for body in texts} == {0.7}
    requested = [(body["messages"][-1]["content"], body["seed"]) for body in texts]
    assert len(set(requested)) == 24 and len(requested) <= 24 + 4, "only what was under way may be asked twice"
    found = {folder.name: results(folder) for folder in (tmp_path / "evals").iterdir()}
    assert {name: len(rows) for name, rows in found.items()} == {
        "reverse-text": 16,
        "reverse-text-long": 8,
        "alphabet-sort": 16,
    }
    for rows in found.values():
        assert len({(row["example_id"], row["rollout_idx"]) for row in rows}) == len(rows)
        assert all(row["error"] is None for row in rows)
    assert not list((tmp_path / "evals").rglob(".unfinished-*"))


def test_a_local_model_by_itself_and_behind_a_server(run: Runner, tmp_path: Path) -> None:
    port = find_free_port()
    server = run.start("inference", "@", "configs/debug/infer.toml", "--server.port", port, "--output_dir", tmp_path)
    alone = run.start("eval", "@", f"{EVAL}/local_model.toml", "--output-dir", tmp_path / "alone")
    until(lambda: is_healthy("127.0.0.1", port), "the server", server)
    url = f"http://localhost:{port}/v1"
    options = ["--client.base-url", url, "--output-dir", tmp_path / "served"]
    run.run_well("eval", "@", f"{EVAL}/local_model.toml", *options)
    assert alone.wait() == 0, alone.err
    rows = [results(tmp_path / name / "evals" / "reverse-text") for name in ("alone", "served")]
    output = [[(row["prompt"], row["completion"], row["completion_len"]) for row in found] for found in rows]
    assert len(output[0]) == 32 and output[0] == output[1]


def test_a_series_of_checkpoints(run: Runner, tmp_path: Path) -> None:
    sft = ["--model.name", "tiny-qwen3", "--model.debug.random-init", "--model.debug.num-layers", 1]
    sft += ["--data.type", "fake", "--data.batch_size", 2, "--data.seq_len", 16, "--max_steps", 3, "--ckpt.interval", 1]
    run.run_well("sft", *sft, "--output-dir", tmp_path)
    options = ["--weights-dir", tmp_path / "weights", "--steps", "1,2,3", "--num_examples", 2]
    options += ["--sampling.max_tokens", 4, "--env.0.num_workers", 0, "--output-dir", tmp_path]
    command = run.run_well("eval", "@", f"{EVAL}/single_env.toml", *options)
    rows = [row for row in load_jsonl(tmp_path / "metrics.jsonl") if row["process"] == "eval"]
    assert [row["step"] for row in rows] == [1, 2, 3]
    for step in (1, 2, 3):
        assert len(results(tmp_path / "evals" / f"step_{step}" / "reverse-text")) == 4
        assert f"(step {step})" in command.out
