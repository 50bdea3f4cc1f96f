"""Status of a run: running, finished or stopped."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from page_runs import write_evaluation

from prime_rl.monitor.local_runs import find_runs, open_run
from prime_rl.monitor.run_status import find_status
from prime_rl.runtime.run_dir import RunDir
from prime_rl.runtime.run_state import ProcessIdentity, StateRecorder, identify_process
from rollouts.training.metrics import append_jsonl


def write_metrics(path: Path, steps: int = 3, ago: float = 0.0, every: float = 1.0) -> None:
    now = time.time() - ago
    rows = [
        {"step": step, "timestamp": now - every * (steps - step), "process": "trainer", "loss/mean": 1.0}
        for step in range(1, steps + 1)
    ]
    append_jsonl(path / "metrics.jsonl", rows)


def write_state(
    path: Path, process: ProcessIdentity, status: str = "running", reason: str | None = None, command: str = "rl"
) -> None:
    state: dict[str, Any] = {"status": status, "command": command, "process": asdict(process), "started": 1.0}
    RunDir(path).state.write_text(json.dumps({**state, "ended": None, "reason": reason}))


def status_of(path: Path) -> str:
    return find_status(open_run(path)).text


def test_killed_run_is_stopped_however_fresh_its_metrics(tmp_path: Path) -> None:
    write_metrics(tmp_path)
    me = identify_process()
    if me.started is None:
        pytest.skip("needs /proc")
    write_state(tmp_path, replace(me, started=me.started + 1))
    assert status_of(tmp_path) == "stopped at step 3 (killed)"
    write_state(tmp_path, replace(me, boot="before the reboot"))
    assert status_of(tmp_path) == "stopped at step 3 (killed)"


def test_living_run_is_running_however_old_its_metrics(tmp_path: Path) -> None:
    write_metrics(tmp_path, ago=9000)
    with StateRecorder(tmp_path, "rl"):
        assert status_of(tmp_path) == "running"
    assert status_of(tmp_path) == "finished"


def test_recorded_end_is_shown_with_its_reason(tmp_path: Path) -> None:
    write_metrics(tmp_path)
    write_state(tmp_path, identify_process(), "interrupted")
    assert status_of(tmp_path) == "stopped at step 3 (interrupted)"
    write_state(tmp_path, identify_process(), "failed", "trainer: signal SIGKILL")
    assert status_of(tmp_path) == "stopped at step 3 (failed: trainer: signal SIGKILL)"


def test_run_on_another_host_is_judged_by_its_heartbeat(tmp_path: Path) -> None:
    write_metrics(tmp_path, ago=500)
    write_state(tmp_path, replace(identify_process(), host="another"))
    assert status_of(tmp_path) == "running"
    os.utime(RunDir(tmp_path).state, (time.time() - 100,) * 2)
    assert status_of(tmp_path) == "stopped at step 3 (no sign of life)"


def test_without_a_record_the_age_of_training_metrics_counts(tmp_path: Path) -> None:
    write_metrics(tmp_path, ago=100)
    assert status_of(tmp_path) == "stopped at step 3"
    append_jsonl(tmp_path / "metrics.jsonl", [{"step": 3, "timestamp": time.time(), "process": "eval", "avg@1": 1.0}])
    assert status_of(tmp_path) == "stopped at step 3", "an evaluation that was made later is no sign of life"
    write_metrics(tmp_path / "slow", ago=100, every=60)
    assert status_of(tmp_path / "slow") == "running", "its steps take a minute"


def test_run_that_failed_before_its_first_step_is_found(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), StateRecorder(tmp_path / "run", "rl"):
        raise RuntimeError("no memory")
    assert [run.path.name for run in find_runs(tmp_path)] == ["run"]
    assert status_of(tmp_path / "run") == "stopped before the first step (failed: RuntimeError: no memory)"


def test_a_server_has_no_steps(tmp_path: Path) -> None:
    append_jsonl(tmp_path / "metrics.jsonl", [{"step": 40, "timestamp": 1.0, "process": "serve", "open/models": 2.0}])
    write_state(tmp_path, replace(identify_process(), boot="before the reboot"), command="serve")
    assert status_of(tmp_path) == "stopped (killed)"
    write_state(tmp_path, identify_process(), "failed", "no memory", command="serve")
    assert status_of(tmp_path) == "stopped (failed: no memory)"


@pytest.mark.parametrize("command", ["eval", "synthesize"])
def test_evaluation_and_synthesis_have_a_state(command: str, tmp_path: Path) -> None:
    with StateRecorder(tmp_path, command):
        append_jsonl(tmp_path / "metrics.jsonl", [{"step": 0, "timestamp": 1.0, "process": command, "avg@1": 1.0}])
        write_evaluation(tmp_path, 0, [1.0])
        assert status_of(tmp_path) == "running", "the second environment"
    assert status_of(tmp_path) == "finished"
    with pytest.raises(KeyboardInterrupt), StateRecorder(tmp_path, command):
        raise KeyboardInterrupt
    assert status_of(tmp_path) == "stopped (interrupted)"


@pytest.mark.parametrize("tail_bytes", [7, 1000, 64 * 1024])
def test_the_step_is_found_before_many_intervals(
    tail_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prime_rl.monitor.run_status.TAIL_BYTES", tail_bytes)
    write_metrics(tmp_path, steps=12)
    interval = {"step": 12, "timestamp": time.time(), "process": "inference", "timeline/what": "generate"}
    append_jsonl(tmp_path / "metrics.jsonl", [interval] * (10 if tail_bytes == 7 else 800))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "process": "trainer", "loss/me')
    write_state(tmp_path, identify_process(), "interrupted")
    assert status_of(tmp_path) == "stopped at step 12 (interrupted)"
