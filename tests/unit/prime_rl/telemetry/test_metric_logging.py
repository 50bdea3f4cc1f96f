"""The monitor: rows of metrics, intervals and samples, and when Weights & Biases is started or rejected."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from prime_rl.configuration.sections import TrackersConfig, WandbConfig
from prime_rl.utils.monitor import build_monitor


def _rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_processes_share_the_files_of_a_run(tmp_path: Path) -> None:
    trainer, engine = build_monitor(tmp_path, "trainer"), build_monitor(tmp_path, "inference")
    trainer.log({"loss/mean": 0.25, "optim/grad_norm": float("nan")}, step=3)
    engine.log_timeline("decode", 10.5, 11.0, step=2)
    trainer.finish()
    metrics, interval = _rows(tmp_path / "metrics.jsonl")
    assert isinstance(metrics.pop("timestamp"), float) and isinstance(interval.pop("timestamp"), float)
    assert metrics == {"step": 3, "process": "trainer", "attempt": 0, "loss/mean": 0.25, "optim/grad_norm": None}
    assert interval == {
        "step": 2,
        "process": "inference",
        "attempt": 0,
        "timeline/what": "decode",
        "timeline/start": 10.5,
        "timeline/end": 11.0,
    }


def test_samples_have_their_own_file(tmp_path: Path) -> None:
    monitor = build_monitor(tmp_path / "new", "orchestrator")
    monitor.log_samples([{"prompt": "abc", "reward": 1.0}, {"prompt": "xyz", "reward": 0.0, "error": None}], step=1)
    rows = _rows(tmp_path / "new" / "samples.jsonl")
    assert [(r["step"], r["process"], r["prompt"], r["reward"]) for r in rows] == [
        (1, "orchestrator", "abc", 1.0),
        (1, "orchestrator", "xyz", 0.0),
    ]
    assert not (tmp_path / "new" / "metrics.jsonl").exists()


def test_rows_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    build_monitor(tmp_path, "inference", must_write=False).log({"loss": 1.0}, step=1)
    with pytest.raises(IsADirectoryError):
        build_monitor(tmp_path, "trainer").log({"loss": 1.0}, step=1)


def test_non_numeric_metrics_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'loss'"):
        build_monitor(tmp_path, "trainer").log({"loss": [1.0]}, step=1)


def test_missing_wandb_package_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delenv("WANDB_MODE")
    with pytest.raises(ValueError, match=r"wandb\.enabled is true but wandb is not installed") as caught:
        build_monitor(tmp_path, "trainer", TrackersConfig(wandb=WandbConfig()))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("config", "mode"), [(WandbConfig(enabled=False), "online"), (WandbConfig(), "disabled")])
def test_disabled_wandb_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: WandbConfig, mode: str
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setenv("WANDB_MODE", mode)
    monitor = build_monitor(tmp_path, "trainer", TrackersConfig(wandb=config))
    monitor.log({"loss": 1.0}, step=1)
    monitor.finish()
    assert len(_rows(tmp_path / "metrics.jsonl")) == 1
