"""`monitor --replay`: a replayed step of the real trainer is identical."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from prime_rl.monitor import wandb_monitor
from prime_rl.trainer.config import TrainConfig
from prime_rl.trainer.rl.config import FakeDataConfig
from prime_rl.trainer.rl.data import FakeBatches
from prime_rl.transport.batches import FilesystemBatchSender
from prime_rl.utils.pydantic_config import parse_argv, write_config
from rollouts.training.metrics import load_jsonl

ROOT = Path(__file__).parents[2]
TINY = ["--model.name", "tiny-qwen3", "--model.debug.random-init", "--model.seq-len", "32", "--micro-bs", "4"]


def check_recorded(run: Path, batches: FakeBatches) -> None:
    """The trainer's log-probs of steps 2 and 4 are recorded, token by token."""
    rows = list(load_jsonl(run / "trainer_logprobs.jsonl"))
    assert [row["step"] for row in rows] == [2] * 8 + [4] * 8
    samples = {(s.group_index, s.index): s for s in batches.receive(4)}
    probs = []
    for row in rows[8:]:
        mask = samples[row["group_index"], row["index"]].loss_mask
        assert [value < 0 for value in row["trainer_logprobs"]] == [bool(m) for m in mask]
        probs += [math.exp(value) for value, m in zip(row["trainer_logprobs"], mask, strict=True) if m]
    logged = next(r for r in load_jsonl(run / "metrics.jsonl") if r["step"] == 4 and "trainer_probs/mean" in r)
    assert sum(probs) / len(probs) == pytest.approx(logged["trainer_probs/mean"], rel=1e-5)


@pytest.mark.timeout(600)
def test_a_recorded_step_is_taken_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    run = tmp_path / "run"
    options = [
        *TINY,
        "--max-steps",
        "4",
        "--ckpt.interval",
        "2",
        "--logprob-dump-interval",
        "2",
        "--output-dir",
        str(run),
    ]
    config, _ = parse_argv(TrainConfig, options, "trainer", {})
    write_config(config, run / "configs" / "trainer.toml")
    sender = FilesystemBatchSender(run / "rollouts")
    batches = FakeBatches(FakeDataConfig(batch_size=8), seq_len=32, vocab_size=300, seed=0)
    for step in range(1, 5):
        sender.send(step, batches.receive(step))
    words = [sys.executable, "-m", "prime_rl.trainer.rl.train", "@", str(run / "configs" / "trainer.toml")]
    subprocess.run(words, check=True, capture_output=True, timeout=280)
    check_recorded(run, batches)
    for step in (2, 4):  # the orchestrator's halves
        (run / "checkpoints" / f"step_{step}" / "orchestrator").mkdir()
        (run / "checkpoints" / f"step_{step}" / "orchestrator" / "STABLE").touch()
    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*"))

    with pytest.raises(SystemExit) as ended:
        wandb_monitor.main([str(run), "--replay", "3"])
    said = capsys.readouterr().out
    assert ended.value.code == 0, said
    assert "from checkpoint 2: 1 step" in said and "is reproduced: all " in said
    assert sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*")) == before, "the run is only read"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_step_of_sft_is_taken_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    run = tmp_path / "run"
    words = [sys.executable, "-m", "prime_rl.trainer.sft.train", "@", "configs/debug/sft/train.toml"]
    words += ["--max-steps", "4", "--ckpt.interval", "2", "--output-dir", str(run)]
    subprocess.run(words, check=True, capture_output=True, timeout=280, cwd=ROOT)
    assert "configs/debug/sft/train.toml:" in (run / "configs" / "sft.toml").read_text(), (
        "with where its values are from"
    )
    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*"))
    with pytest.raises(SystemExit) as ended:
        wandb_monitor.main([str(run), "--replay", "4"])
    said = capsys.readouterr().out
    assert ended.value.code == 0, said
    assert "from checkpoint 2: 2 steps" in said and "is reproduced: all " in said
    assert sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*")) == before, "the run is only read"
