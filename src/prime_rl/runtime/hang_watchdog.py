"""Hang detection: each process reports what it waits for, and the launcher prints the chain of waiting processes.

launcher: no progress for hang_timeout --SIGUSR1--> each process: <output_dir>/hang/<process>.{json,stacks}
    ^                                                              |
    +-- "trainer waits for ...; orchestrator waits for ..." <------+
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from prime_rl.runtime.process import Child, tail
from prime_rl.runtime.redaction import redact_fields
from prime_rl.runtime.run_dir import RunDir

NUM_MESSAGES = 20
ANSWER_S = 3.0


@dataclass(frozen=True)
class WaitStatus:
    """Current activity of a process: `what` it waits for or does, `on` which process, since when."""

    what: str
    on: str | None = None
    since_s: float | None = None
    queues: Mapping[str, Any] = field(default_factory=dict)


def explain_on_signal(process: str, output_dir: Path, describe: Callable[[], WaitStatus]) -> None:
    """Install a SIGUSR1 handler that writes a report of this process; call it in the main thread.

    `<process>.stacks` has the stacks of all threads, even if native code blocks; `<process>.json` has `describe()`,
    the stacks of asyncio tasks and the last messages.
    """
    from loguru import logger

    folder = RunDir(output_dir).hang
    folder.mkdir(parents=True, exist_ok=True)
    messages = deque[str](maxlen=NUM_MESSAGES)
    logger.add(lambda line: messages.append(str(line).rstrip()), format="{time:HH:mm:ss} {level} {message}")
    stacks = (folder / f"{process}.stacks").open("w", encoding="utf-8")

    def write(number: int, frame: object) -> None:
        report = {
            "process": process,
            "pid": os.getpid(),
            "time": time.time(),
            **asdict(describe()),
            "tasks": _task_stacks(),
            "messages": list(messages),
        }
        report = redact_fields(json.loads(json.dumps(report, default=str)))
        path = folder / f"{process}.json"
        path.with_suffix(".tmp").write_text(json.dumps(report, indent=1), encoding="utf-8")
        path.with_suffix(".tmp").rename(path)

    signal.signal(signal.SIGUSR1, write)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True, chain=True)
    (folder / f"{process}.pid").write_text(str(os.getpid()))  # last: its existence permits sending the signal


def _task_stacks() -> list[str]:
    import asyncio  # lazy: `rl` has no event loop and starts 10 % faster without it

    try:
        tasks = asyncio.all_tasks(asyncio.get_running_loop())
    except RuntimeError:  # no loop runs in this thread
        return []
    stacks = []
    for task in tasks:
        text = StringIO()
        task.print_stack(limit=8, file=text)
        stacks.append(text.getvalue())
    return sorted(stacks)


class HangWatchdog:
    """Logs an explanation once after `timeout_s` seconds without progress (None: disabled)."""

    def __init__(
        self,
        output_dir: Path,
        timeout_s: float | None,
        children: Callable[[], Mapping[str, Child]],
        pids: Callable[[], Collection[int]],
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run_dir, self.timeout_s = RunDir(output_dir), timeout_s
        self._children, self._pids, self._log, self._clock = children, pids, log, clock
        self._stamps: object = None
        self._last_progress = clock()
        self._signaled_at: float | None = None
        self._reported = False

    def check(self) -> None:
        """Check once (non-blocking); call it periodically."""
        if self.timeout_s is None:
            return
        run = self.run_dir
        now, stamps = self._clock(), tuple(map(_stamp, (run.metrics, run.samples, *run.step_dirs)))
        if stamps != self._stamps:
            self._stamps, self._last_progress, self._signaled_at, self._reported = stamps, now, None, False
        elif self._signaled_at is None and now - self._last_progress >= self.timeout_s:
            self._request_reports()
            self._signaled_at = now
        elif self._signaled_at is not None and not self._reported and now - self._signaled_at >= ANSWER_S:
            self._reported = True
            self._log(f"no progress for {now - self._last_progress:.0f} s: {self.explain()}")
            self._log(f"stacks, queues and last messages of each process: {run.hang}")

    def _request_reports(self) -> None:
        """Signal the processes of this run that handle it; SIGUSR1 would kill others, such as vLLM's own."""
        ours = self._pids()
        for path in self.run_dir.hang.glob("*.pid"):
            path.with_suffix(".json").unlink(missing_ok=True)
            pid = int(path.read_text() or 0)
            if pid in ours and catches(pid, signal.SIGUSR1):
                os.kill(pid, signal.SIGUSR1)

    def explain(self) -> str:
        """The chain of waiting processes, from the trainer to the blocking one."""
        children, parts, visited = self._children(), list[str](), set[str]()
        name: str | None = "trainer" if "trainer" in children else next(iter(children), None)
        while name is not None and name in children and name not in visited:
            visited.add(name)
            report = read_report(self.run_dir.root, name) or read_report(self.run_dir.root, f"{name}_rank0")
            if report is None:
                return "; ".join([*parts, describe_unresponsive(children[name])])
            duration = "" if report["since_s"] is None else f" for {report['since_s']:.0f} s"
            parts.append(f"{name} {report['what']}{duration}")
            name = report["on"]
        return "; ".join(parts)


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal (always False outside Linux)."""
    mask = _status(pid).get("SigCgt")
    return mask is not None and bool(int(mask, 16) >> (number - 1) & 1)


def read_report(output_dir: Path, process: str) -> dict[str, Any] | None:
    """The report of a process; None if there is none."""
    try:
        report: dict[str, Any] = json.loads((RunDir(output_dir).hang / f"{process}.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return report


def describe_unresponsive(child: Child) -> str:
    """Why a process did not report, according to the operating system."""
    pid = child.process.pid
    if child.code is not None:
        return f"{child.name} has ended with {child.describe_end()}"
    state = _status(pid).get("State", "?")[:1]
    if state in "Tt":
        return f"{child.name} is stopped by a signal: `kill -CONT {pid}` continues it"
    if state == "D":
        return f"{child.name} is blocked in disk or device I/O (pid {pid})"
    if not catches(pid, signal.SIGUSR1):
        last = tail(child.log_path, 1, child.log_start)
        return f"{child.name} is still starting; last output: {last[0] if last else 'none'}"
    return f"{child.name} is unresponsive (blocked in native code): see {child.name}.stacks (pid {pid})"


def _status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns
