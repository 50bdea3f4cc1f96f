"""Answer checking in processes that can be killed: sympy may think for hours about a short expression.

Run as a program it is such a process: one JSON line in, [right answer, given answer, seconds], one JSON line out.
"""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import resource
import select
import signal
import subprocess
import sys
from enum import Enum

MAX_MEMORY_BYTES = 2 << 30
BUSY_S = 120.0  # a busy machine may let a process wait so long: to import sympy, or beyond its seconds of computing


class Verdict(Enum):
    """What came of checking an answer."""

    RIGHT = "right"
    WRONG = "wrong"
    TIMED_OUT = "timed out"  # or took all the memory it may have


class MathChecker:
    """Compares LaTeX answers by their meaning in up to `max_workers` processes, started when they are first needed.

    The `timeout_s` of a check are seconds of computing of its process: a busy machine makes no right answer wrong.
    """

    def __init__(self, max_workers: int = 4, timeout_s: float = 5.0) -> None:
        self.timeout_s = timeout_s
        self._slots: queue.LifoQueue[_Process | None] = queue.LifoQueue()
        for _ in range(max_workers):
            self._slots.put(None)

    async def check(self, right: str, given: str) -> Verdict:
        """Is `given` the same as `right`? Raises `RuntimeError` when no process can be started."""
        return await asyncio.to_thread(self._check, right, given)

    def _check(self, right: str, given: str) -> Verdict:
        process = self._slots.get()
        try:
            process = process or _Process()
            verdict = process.ask(right, given, self.timeout_s)
            if verdict is Verdict.TIMED_OUT:
                process.kill()
                process = None
            return verdict
        finally:
            self._slots.put(process)

    def __del__(self) -> None:
        while not self._slots.empty():
            if (process := self._slots.get_nowait()) is not None:
                process.kill()


class _Process:
    """One checking process."""

    def __init__(self) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        if self._read(BUSY_S) != "ready":
            self.kill()
            raise RuntimeError("the process that checks answers did not start: is math-verify installed?")

    def ask(self, right: str, given: str, timeout_s: float) -> Verdict:
        try:
            self.popen.stdin.write(json.dumps([right, given, timeout_s]).encode() + b"\n")
            self.popen.stdin.flush()
        except BrokenPipeError:
            return Verdict.TIMED_OUT
        answer = self._read(timeout_s + BUSY_S)
        return Verdict(answer) if answer else Verdict.TIMED_OUT

    def _read(self, timeout_s: float) -> str:
        """The next line, or "" when there is none in time or the process has ended."""
        poll = select.poll()  # not select.select, which fails from file descriptor 1024 on
        poll.register(self.popen.stdout, select.POLLIN)
        return self.popen.stdout.readline().decode().strip() if poll.poll(1e3 * timeout_s) else ""

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self.popen.stdin.close()
        self.popen.stdout.close()


def run_checks() -> None:
    """Answer what comes in on standard input until it closes; a question that takes too long ends the process."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    logging.disable(logging.CRITICAL)
    from math_verify import parse, verify  # seconds: only in the process that needs it

    _say("ready")
    for line in sys.stdin:
        *texts, timeout_s = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, timeout_s)  # its signal kills, whatever sympy is at
        try:
            right, given = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in texts)
            verdict = Verdict.RIGHT if verify(right, given, timeout_seconds=None) else Verdict.WRONG
        except MemoryError:
            verdict = Verdict.TIMED_OUT
        except Exception:  # whatever sympy makes of nonsense, it is not the right answer
            verdict = Verdict.WRONG
        signal.setitimer(signal.ITIMER_PROF, 0)
        _say(verdict.value)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    run_checks()
