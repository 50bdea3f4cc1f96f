"""The recorded state of a run: how a run ended, and whether the recorded process still exists."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from prime_rl.runtime import run_state
from prime_rl.runtime.process import ChildFailed, Supervisor
from prime_rl.runtime.run_dir import RunDir
from prime_rl.runtime.run_state import (
    StateRecorder,
    describe_end,
    identify_process,
    is_alive,
    read_run_state,
)
from rollouts.training.metrics import append_jsonl


def recorded(path: Path) -> tuple[str, str | None]:
    state = read_run_state(path)
    assert state is not None
    return state.status, state.reason


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (None, ("finished", None)),
        (KeyboardInterrupt(), ("interrupted", None)),
        (SystemExit(128 + 15), ("interrupted", None)),
        (SystemExit(3), ("failed", "exit code 3")),
        (ValueError("lr is 0\nmore"), ("failed", "lr is 0")),
    ],
)
def test_recorder_writes_how_the_block_ended(
    error: BaseException | None, end: tuple[str, str | None], tmp_path: Path
) -> None:
    try:
        with StateRecorder(tmp_path / "new", "rl"):
            assert recorded(tmp_path / "new") == ("running", None)
            if error is not None:
                raise error
    except BaseException as raised:
        assert raised is error
    assert recorded(tmp_path / "new") == end


def test_failed_child_is_named(tmp_path: Path) -> None:
    with Supervisor(tmp_path, handle_signals=False) as run:
        child = run.start("trainer", [sys.executable, "-c", "raise SystemExit(3)"])
        child.process.wait(60)
        assert describe_end(ChildFailed([child])) == ("failed", "trainer: exit code 3")


def test_second_recorder_leaves_a_living_run_alone(tmp_path: Path) -> None:
    with StateRecorder(tmp_path, "rl"):
        with pytest.raises(ValueError), StateRecorder(tmp_path, "trainer"):
            raise ValueError("the trainer failed")
        state = read_run_state(tmp_path)
        assert state is not None and (state.status, state.command) == ("running", "rl")
    assert recorded(tmp_path) == ("finished", None)


def test_an_evaluation_leaves_the_record_of_a_training(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), StateRecorder(tmp_path, "rl"):
        raise RuntimeError("no memory")
    with StateRecorder(tmp_path, "eval"):
        assert recorded(tmp_path) == ("failed", "RuntimeError: no memory")
    assert recorded(tmp_path) == ("failed", "RuntimeError: no memory")
    unrecorded = tmp_path / "unrecorded"
    append_jsonl(unrecorded / "metrics.jsonl", [{"step": 1, "process": "trainer", "loss/mean": 1.0}])
    with StateRecorder(unrecorded, "eval"):
        assert read_run_state(unrecorded) is None, "a training that records no state"


def test_a_training_replaces_the_record_of_an_evaluation(tmp_path: Path) -> None:
    evaluation = StateRecorder(tmp_path, "eval").__enter__()
    with StateRecorder(tmp_path, "rl"):
        evaluation.__exit__(None, None, None)
        state = read_run_state(tmp_path)
        assert state is not None and (state.status, state.command) == ("running", "rl")
    assert recorded(tmp_path) == ("finished", None)


def test_refused_start_leaves_the_record_of_the_earlier_run(tmp_path: Path) -> None:
    with StateRecorder(tmp_path, "sft"):
        (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ValueError), StateRecorder(tmp_path, "sft"):
        raise ValueError("weights holds versions of another run")
    assert recorded(tmp_path) == ("finished", None)
    with pytest.raises(ValueError), StateRecorder(tmp_path, "sft"):
        (tmp_path / "metrics.jsonl").write_text("{}\n{}\n")
        raise ValueError("a bad batch")
    assert recorded(tmp_path) == ("failed", "a bad batch")


def test_reused_pid_is_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    me = identify_process()
    assert is_alive(me) is True
    if me.started is not None:
        assert is_alive(replace(me, started=me.started + 1)) is False
    assert is_alive(replace(me, boot="another boot")) is False
    assert is_alive(replace(me, host="another host", boot="another boot")) is None
    assert is_alive(replace(me, namespace="another container")) is None


def test_killed_process_is_not_alive_even_as_zombie() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        identity = replace(identify_process(), pid=process.pid, started=run_state._start_ticks(process.pid))
        assert is_alive(identity) is True
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert is_alive(identity) is False
    assert is_alive(identity) is False


def test_heartbeat_renews_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_state, "HEARTBEAT_S", 0.01)
    path = RunDir(tmp_path).state

    def is_renewed() -> bool:
        os.utime(path, (1.0, 1.0))
        deadline = time.monotonic() + 10
        while path.stat().st_mtime == 1.0 and time.monotonic() < deadline:
            time.sleep(0.005)
        return path.stat().st_mtime > 1.0

    with StateRecorder(tmp_path, "evolve"):
        assert is_renewed() and is_renewed()
    for thread in threading.enumerate():
        if thread.name == "heartbeat":
            thread.join(10)
            assert not thread.is_alive()


def test_damaged_or_missing_file_is_no_state(tmp_path: Path) -> None:
    assert read_run_state(tmp_path) is None
    RunDir(tmp_path).state.write_text('{"status": "running"}')
    assert read_run_state(tmp_path) is None
    RunDir(tmp_path).state.write_text("{")
    assert read_run_state(tmp_path) is None


def test_unwritable_directory_does_not_fail_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with StateRecorder(tmp_path / "file", "rl"):
        pass
