"""`synthesize` as documented, killed and resumed, and `sft` on its output."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from cli_runner import metric_rows, runner, until
from fake_api import FakeApi, serve_api

from rollouts.training.metrics import load_jsonl


def test_killed_synthesis_resumes_and_feeds_sft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    api, out = FakeApi(latency_s=0.2), tmp_path / "out"
    options = ["@", "configs/debug/synthesize/single_turn.toml", "--max_concurrent", 4, "--output-dir", out]
    with serve_api(api), runner(tmp_path / "said") as run:
        for name, value in api.environ.items():
            monkeypatch.setenv(name, value)
        command = run.start("synthesize", *options)
        until(lambda: api.answered >= 10, "some answers", command)
        os.kill(command.process.pid, signal.SIGKILL)
        command.wait()
        until(lambda: command.pids() == [], "its workers to end")
        api.latency_s = 0.0
        command = run.run_well("synthesize", *options)
        assert api.refusals == []
        requested = [(body["messages"][-1]["content"], body["seed"]) for body in api.requests]
        assert len(set(requested)) == 32 and len(requested) <= 32 + 4, "only what was under way may be asked twice"
        data = out / "synthesize" / "reverse-text.jsonl"
        rows = list(load_jsonl(data))
        assert len(rows) == 16 == len({row["example_id"] for row in rows})
        assert {row["reward"] for row in rows} == {1.0}
        assert "kept 16 of 32 rollouts" in command.out and f"sft --data.name {data}" in command.out
        sft = ["--data.name", data, "--model.name", "tiny-qwen3", "--model.debug.random-init"]
        sft += ["--data.batch_size", 2, "--data.seq_len", 512, "--max_steps", 2, "--output-dir", tmp_path / "sft"]
        run.run_well("sft", *sft)
        assert [row["step"] for row in metric_rows(tmp_path / "sft", "sft", "loss/mean")] == [1, 2]
