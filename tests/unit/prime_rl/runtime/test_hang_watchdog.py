"""Hang reports: the chain of waiting processes, from responsive processes and about unresponsive ones."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prime_rl.runtime.hang_watchdog import ANSWER_S, HangWatchdog
from prime_rl.runtime.process import Supervisor

REPORTING = """
import asyncio, signal, sys, time
from pathlib import Path
from loguru import logger
from prime_rl.runtime.hang_watchdog import WaitStatus, explain_on_signal
name, on = sys.argv[1], sys.argv[2] or None
explain_on_signal(name, Path(sys.argv[3]), lambda: WaitStatus("waits for the batch of step 5", on, 63.2, {"ready": 2}))
logger.info("a last message")
async def wait_for_ever():
    await asyncio.sleep(300)
print("ready", flush=True)
asyncio.run(wait_for_ever())
"""
NOT_REPORTING = "import time; print('loading shard 7', flush=True); time.sleep(300)"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Supervisor]:
    with Supervisor(tmp_path / "logs", handle_signals=False, grace_s=0.1) as found:
        yield found


def start(run: Supervisor, name: str, code: str, *arguments: object) -> int:
    child = run.start(name, [sys.executable, "-c", code, *map(str, arguments)])
    until(lambda: b"\n" in child.log_path.read_bytes())
    return child.process.pid


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_chain_of_waiting_processes_is_logged(run: Supervisor, tmp_path: Path) -> None:
    """Only processes with a handler are signaled; a stopped one is named with the fix; each hang is logged once."""
    start(run, "trainer", REPORTING, "trainer", "orchestrator", tmp_path)
    start(run, "orchestrator", REPORTING, "orchestrator", "inference", tmp_path)
    stopped = start(run, "inference", REPORTING, "inference", "", tmp_path)
    ignored = start(run, "teacher_inference", NOT_REPORTING)
    os.kill(stopped, signal.SIGSTOP)
    lines, clock = list[str](), Clock()
    watch = HangWatchdog(tmp_path, 60, lambda: run.children, run.find_pids, lines.append, clock)
    watch.check()
    clock.now = 59
    watch.check()
    assert not list((tmp_path / "hang").glob("*.json"))
    clock.now = 61
    watch.check()
    until(lambda: len(list((tmp_path / "hang").glob("*.json"))) == 2)
    clock.now += ANSWER_S
    watch.check()
    watch.check()
    assert len(lines) == 2 and str(tmp_path / "hang") in lines[1]
    wait = "waits for the batch of step 5 for 63 s"
    end = f"inference is stopped by a signal: `kill -CONT {stopped}` continues it"
    assert lines[0] == f"no progress for 64 s: trainer {wait}; orchestrator {wait}; {end}"
    report = json.loads((tmp_path / "hang" / "trainer.json").read_text())
    assert report["queues"] == {"ready": 2} and any("a last message" in line for line in report["messages"])
    assert any("wait_for_ever" in stack for stack in report["tasks"])
    assert "File" in (tmp_path / "hang" / "trainer.stacks").read_text()
    (tmp_path / "metrics.jsonl").write_text("{}\n")  # progress, then another hang
    watch.check()
    clock.now += 61
    watch.check()
    os.kill(stopped, signal.SIGCONT)
    assert run.children["teacher_inference"].code is None and ignored


def test_a_process_without_handler_is_described_by_its_log(run: Supervisor, tmp_path: Path) -> None:
    start(run, "trainer", NOT_REPORTING)
    watch = HangWatchdog(tmp_path, 60, lambda: run.children, run.find_pids, lambda line: None)
    assert watch.explain() == "trainer is still starting; last output: loading shard 7"
    os.kill(run.children["trainer"].process.pid, signal.SIGKILL)
    run.children["trainer"].process.wait()
    assert watch.explain() == "trainer has ended with signal SIGKILL"


def test_disabled_watchdog_logs_nothing(tmp_path: Path) -> None:
    clock, lines = Clock(), list[str]()
    watch = HangWatchdog(tmp_path, None, dict, list, lines.append, clock)
    for clock.now in (0, 1e6, 2e6):
        watch.check()
    assert not lines
