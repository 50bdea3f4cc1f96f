"""`monitor --replay`: a step that the real trainer took is taken again, by the same command, and comes out equal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prime_rl.monitor import wandb_monitor
from prime_rl.trainer.config import FakeDataConfig, TrainConfig
from prime_rl.trainer.rl.data import FakeBatches
from prime_rl.transport.batches import FilesystemBatchSender
from prime_rl.utils.pydantic_config import parse_argv, write_config

ROOT = Path(__file__).parents[2]
TINY = ["--model.name", "tiny-qwen3", "--model.debug.random-init", "--model.seq-len", "32", "--micro-bs", "4"]


@pytest.mark.timeout(300)
def test_a_recorded_step_is_taken_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    run = tmp_path / "run"
    options = [*TINY, "--max-steps", "4", "--ckpt.interval", "2", "--output-dir", str(run)]
    config, _ = parse_argv(TrainConfig, options, "trainer", {})
    write_config(config, run / "configs" / "trainer.toml")
    sender = FilesystemBatchSender(run / "rollouts")
    batches = FakeBatches(FakeDataConfig(batch_size=8), seq_len=32, vocab_size=300, seed=0)
    for step in range(1, 5):
        sender.send(step, batches.receive(step))
    words = [sys.executable, "-m", "prime_rl.trainer.rl.train", "@", str(run / "configs" / "trainer.toml")]
    subprocess.run(words, check=True, capture_output=True, timeout=110)
    for step in (2, 4):  # the orchestrator's halves
        (run / "checkpoints" / f"step_{step}" / "orchestrator").mkdir()
        (run / "checkpoints" / f"step_{step}" / "orchestrator" / "STABLE").touch()
    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*"))

    with pytest.raises(SystemExit) as ended:
        wandb_monitor.main([str(run), "--replay", "3"])
    said = capsys.readouterr().out
    assert ended.value.code == 0, said
    assert "from checkpoint 2: 1 step" in said and "came out again: all " in said
    assert sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*")) == before, "the run is only read"
