"""Signals that end a command: during an import, while it runs, in asyncio, and after a library has wrapped them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

START = """
import asyncio, os, signal, sys
from prime_rl.configuration.command import exit_with_errors as command
from prime_rl.runtime.interrupts import cancel_on_signals, end_on_signals

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs
def stop():
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    for _ in range(100):  # the handler runs between two instructions
        pass
def state(path):
    from prime_rl.runtime.run_state import StateRecorder
    return StateRecorder(path, "sft")
"""
SWALLOWS = """
from __main__ import stop
try:
    stop()
except BaseException:
    pass
"""
CODES = {"SIGINT": 130, "SIGTERM": 143}


def run(tmp_path: Path, script: str, number: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "swallows.py").write_text(SWALLOWS)
    (tmp_path / "script.py").write_text(START + script)
    return subprocess.run(
        [sys.executable, "script.py", number], cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("number", CODES)
def test_an_import_cannot_swallow_a_signal(number: str, tmp_path: Path) -> None:
    done = run(tmp_path, 'command(lambda: __import__("swallows") and print("went on"))', number)
    assert (done.returncode, done.stdout, done.stderr) == (CODES[number], "", "Interrupted\n")


def test_a_signal_before_the_command_ends_the_process(tmp_path: Path) -> None:
    done = run(
        tmp_path, "end_on_signals()\ntry:\n    stop()\nexcept BaseException:\n    pass\nprint('went on')", "SIGINT"
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "Interrupted\n")


@pytest.mark.parametrize("number", CODES)
def test_a_running_command_cleans_up(number: str, tmp_path: Path) -> None:
    script = "def work():\n    try:\n        stop()\n    finally:\n        print('cleaned')\ncommand(work)"
    done = run(tmp_path, script, number)
    assert (done.returncode, done.stdout, done.stderr) == (CODES[number], "cleaned\n", "Interrupted\n")


@pytest.mark.parametrize("number", CODES)
def test_a_destructor_cannot_swallow_a_signal(number: str, tmp_path: Path) -> None:
    script = (
        "import time\nclass Swallows:\n    def __del__(self):\n        stop()\n"
        "def work():\n    Swallows()\n    print('went on')\n    time.sleep(30)\ncommand(work)"
    )
    done = run(tmp_path, script, number)
    assert (done.returncode, done.stdout, done.stderr) == (CODES[number], "went on\n", "Interrupted\n")


def test_other_errors_of_destructors_are_shown(tmp_path: Path) -> None:
    script = "class Fails:\n    def __del__(self):\n        raise OSError('lost')\ncommand(lambda: Fails() and None)"
    done = run(tmp_path, script, "SIGINT")
    assert done.returncode == 0 and "Exception ignored in" in done.stderr and "OSError: lost" in done.stderr


def test_a_wrapped_interrupt_is_no_error(tmp_path: Path) -> None:
    script = (
        "def work():\n    try:\n        stop()\n    except BaseException as error:\n"
        "        raise RuntimeError('load failed') from error\ncommand(work)"
    )
    done = run(tmp_path, script, "SIGINT")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "Interrupted\n")


@pytest.mark.parametrize("number", CODES)
def test_a_signal_cancels_the_task_of_asyncio(number: str, tmp_path: Path) -> None:
    script = (
        "async def work():\n    try:\n        stop()\n        await asyncio.sleep(60)\n"
        "    except asyncio.CancelledError:\n        print('cancelled')\n        raise\n"
        "def go():\n    with cancel_on_signals():\n        asyncio.run(work())\ncommand(go)"
    )
    done = run(tmp_path, script, number)
    assert (done.returncode, done.stdout, done.stderr) == (CODES[number], "cancelled\n", "Interrupted\n")


def test_a_sudden_end_is_recorded_as_interrupted(tmp_path: Path) -> None:
    script = 'def work():\n    with state(__import__("pathlib").Path("out")):\n        import swallows\ncommand(work)'
    assert run(tmp_path, script, "SIGINT").returncode == 130
    state = json.loads((tmp_path / "out" / "run_state.json").read_text())
    assert state["status"] == "interrupted" and state["ended"] >= state["started"]


def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    script = "signal.signal(signal.SIGINT, signal.SIG_IGN)\nend_on_signals()\nstop()\nprint('went on')"
    done = run(tmp_path, script, "SIGINT")
    assert (done.returncode, done.stdout, done.stderr) == (0, "went on\n", "")
