"""Why nothing moves: who waits for whom, told by processes that answer and about those that cannot."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prime_rl.utils.hang import ANSWER_S, HangWatch
from prime_rl.utils.process import Supervisor

ASKED = """
import asyncio, signal, sys, time
from pathlib import Path
from loguru import logger
from prime_rl.utils.hang import Wait, explain_on_signal
name, on = sys.argv[1], sys.argv[2] or None
explain_on_signal(name, Path(sys.argv[3]), lambda: Wait("waits for the batch of step 5", on, 63.2, {"ready": 2}))
logger.info("the last words")
async def wait_for_ever():
    await asyncio.sleep(300)
print("ready", flush=True)
asyncio.run(wait_for_ever())
"""
DEAF = "import time; print('loading shard 7', flush=True); time.sleep(300)"


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


def test_the_blocked_edge_is_named_from_the_trainer_to_the_one_that_stands_still(
    run: Supervisor, tmp_path: Path
) -> None:
    """Nobody is asked who is not prepared; a stopped process is told with its cure; each hang is told once."""
    start(run, "trainer", ASKED, "trainer", "orchestrator", tmp_path)
    start(run, "orchestrator", ASKED, "orchestrator", "inference", tmp_path)
    stopped = start(run, "inference", ASKED, "inference", "", tmp_path)
    deaf = start(run, "teacher_inference", DEAF)
    os.kill(stopped, signal.SIGSTOP)
    said, clock = list[str](), Clock()
    watch = HangWatch(tmp_path, 60, lambda: run.children, run.find_pids, said.append, clock)
    watch.look()
    clock.now = 59
    watch.look()
    assert not list((tmp_path / "hang").glob("*.json"))
    clock.now = 61
    watch.look()
    until(lambda: len(list((tmp_path / "hang").glob("*.json"))) == 2)
    clock.now += ANSWER_S
    watch.look()
    watch.look()
    assert len(said) == 2 and str(tmp_path / "hang") in said[1]
    wait = "waits for the batch of step 5 since 63 s"
    cure = f"inference is stopped by a signal: `kill -CONT {stopped}` lets it go on"
    assert said[0] == f"nothing has moved for 64 s: trainer {wait}; orchestrator {wait}; {cure}"
    told = json.loads((tmp_path / "hang" / "trainer.json").read_text())
    assert told["queues"] == {"ready": 2} and any("the last words" in line for line in told["messages"])
    assert any("wait_for_ever" in stack for stack in told["tasks"])
    assert "File" in (tmp_path / "hang" / "trainer.stacks").read_text()
    (tmp_path / "metrics.jsonl").write_text("{}\n")  # it moves again, and stops again
    watch.look()
    clock.now += 61
    watch.look()
    os.kill(stopped, signal.SIGCONT)
    assert run.children["teacher_inference"].code is None and deaf


def test_a_process_that_is_not_prepared_is_told_by_its_last_words(run: Supervisor, tmp_path: Path) -> None:
    start(run, "trainer", DEAF)
    watch = HangWatch(tmp_path, 60, lambda: run.children, run.find_pids, lambda line: None)
    assert watch.explain() == "trainer is still starting; the last it said: loading shard 7"
    os.kill(run.children["trainer"].process.pid, signal.SIGKILL)
    run.children["trainer"].process.wait()
    assert watch.explain() == "trainer has ended with signal SIGKILL"


def test_switched_off_nothing_is_looked_at(tmp_path: Path) -> None:
    clock, said = Clock(), list[str]()
    watch = HangWatch(tmp_path, None, dict, list, said.append, clock)
    for clock.now in (0, 1e6, 2e6):
        watch.look()
    assert not said
