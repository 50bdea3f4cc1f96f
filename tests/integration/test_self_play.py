"""examples/nim with the commands of its README (slow): self-play beats the model that it began with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runner import ROOT, metric_rows, runner, until

from prime_rl.runtime.machine import find_free_port, is_healthy
from rollouts.training.environments import load_environment
from rollouts.training.metrics import append_jsonl

NIM = ROOT / "examples" / "nim"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_self_play_beats_its_start(tmp_path: Path) -> None:
    start = load_environment("nim", {}).start  # type: ignore[attr-defined]
    rows = start.__globals__["build_sft_examples"](4000)
    append_jsonl(tmp_path / "sft.jsonl", rows)
    port, deadline_s = find_free_port(), 1500.0
    with runner(tmp_path / "said") as run:
        sft = ["@", NIM / "sft.toml", "--data.name", tmp_path / "sft.jsonl", "--output-dir", tmp_path / "sft"]
        assert run.start("sft", *sft).wait(deadline_s) == 0
        old = tmp_path / "sft" / "weights" / "step_400"
        rl = ["@", NIM / "rl.toml", "--model.name", old, "--output-dir", tmp_path / "rl", "--seed", 1]
        rl += ["--inference.server.port", find_free_port()]
        assert run.start("rl", *rl).wait(deadline_s) == 0
        server = run.start("inference", "--model.name", old, "--server.port", port, "--output-dir", tmp_path / "old")
        until(lambda: is_healthy(None, port), "the server of the old model", server)
        opponent = {"opponent": {"model": str(old), "base_url": f"http://127.0.0.1:{port}/v1"}}
        played = ["@", NIM / "eval.toml", "--model.name", tmp_path / "rl" / "weights" / "step_60"]
        played += ["--output-dir", tmp_path / "eval", "--env.0.args", json.dumps(opponent)]
        assert run.start("eval", *played).wait(deadline_s) == 0
    seats = metric_rows(tmp_path / "rl", "orchestrator", "reward/nim/first")
    assert [row["step"] for row in seats] == list(range(1, 61)) and all("reward/nim/second" in row for row in seats)
    summary = json.loads((tmp_path / "eval" / "evals" / "nim" / "summary.json").read_text())
    rate, low, high = ((1 + summary[f"avg@4{part}"]) / 2 for part in ("", "/ci_low", "/ci_high"))
    print(f"win rate against the start: {rate:.3f} ({low:.3f} to {high:.3f}); > 0.5")
    assert summary["examples"] == 128 and low > 0.5
