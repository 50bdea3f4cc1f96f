"""When nothing moves: every process writes down what it waits for, and the launcher says who holds up whom.

launcher: nothing moved for hang_timeout --SIGUSR1--> each process: <output_dir>/hang/<process>.{json,stacks}
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

from prime_rl.utils.process import Child, tail

HANG_DIR = "hang"
NUM_MESSAGES = 20
ANSWER_S = 3.0
MOVING = ("metrics.jsonl", "samples.jsonl", "weights", "broadcasts", "rollouts", "checkpoints")
"""What changes below output_dir while a run gets on: a file that grows, a directory that something appears in."""


@dataclass(frozen=True)
class Wait:
    """What a process does now: `what` it waits for or is busy with, `on` which process, since when."""

    what: str
    on: str | None = None
    since_s: float | None = None
    queues: Mapping[str, Any] = field(default_factory=dict)


def explain_on_signal(process: str, output_dir: Path, describe: Callable[[], Wait]) -> None:
    """From now on SIGUSR1 makes this process write down what it does; call it in the main thread.

    `<process>.stacks` has the stacks of all threads, also when no Python runs; `<process>.json` has `describe()`, the
    stacks of asyncio's tasks and the last messages.
    """
    from loguru import logger

    folder = Path(output_dir) / HANG_DIR
    folder.mkdir(parents=True, exist_ok=True)
    messages = deque[str](maxlen=NUM_MESSAGES)
    logger.add(lambda line: messages.append(str(line).rstrip()), format="{time:HH:mm:ss} {level} {message}")
    stacks = (folder / f"{process}.stacks").open("w", encoding="utf-8")

    def write(number: int, frame: object) -> None:
        told = {
            "process": process,
            "pid": os.getpid(),
            "time": time.time(),
            **asdict(describe()),
            "tasks": _task_stacks(),
            "messages": list(messages),
        }
        path = folder / f"{process}.json"
        path.with_suffix(".tmp").write_text(json.dumps(told, indent=1, default=str), encoding="utf-8")
        path.with_suffix(".tmp").rename(path)

    signal.signal(signal.SIGUSR1, write)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True, chain=True)
    (folder / f"{process}.pid").write_text(str(os.getpid()))  # last: whoever reads it may send the signal


def _task_stacks() -> list[str]:
    import asyncio  # here: `rl` watches without a loop, and starts a tenth sooner

    try:
        tasks = asyncio.all_tasks(asyncio.get_running_loop())
    except RuntimeError:  # no loop runs in this thread
        return []
    found = []
    for task in tasks:
        text = StringIO()
        task.print_stack(limit=8, file=text)
        found.append(text.getvalue())
    return sorted(found)


class HangWatch:
    """Looks whether a run moves; after `timeout_s` seconds without, says once why. `None`: never."""

    def __init__(
        self,
        output_dir: Path,
        timeout_s: float | None,
        children: Callable[[], Mapping[str, Child]],
        pids: Callable[[], Collection[int]],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.output_dir, self.timeout_s = Path(output_dir), timeout_s
        self._children, self._pids, self._say, self._clock = children, pids, say, clock
        self._seen: object = None
        self._moved = clock()
        self._asked: float | None = None
        self._told = False

    def look(self) -> None:
        """Called again and again; never blocks."""
        if self.timeout_s is None:
            return
        now, seen = self._clock(), tuple(_stamp(self.output_dir / name) for name in MOVING)
        if seen != self._seen:
            self._seen, self._moved, self._asked, self._told = seen, now, None, False
        elif self._asked is None and now - self._moved >= self.timeout_s:
            self._ask()
            self._asked = now
        elif self._asked is not None and not self._told and now - self._asked >= ANSWER_S:
            self._told = True
            text = f"nothing has moved for {now - self._moved:.0f} s: {self.explain()}"
            self._say(text)
            self._say(f"stacks, queues and last messages of each process: {self.output_dir / HANG_DIR}")

    def _ask(self) -> None:
        """Signal the processes of this run that are prepared for it: others, such as vLLM's own, would die of it."""
        ours = self._pids()
        for path in (self.output_dir / HANG_DIR).glob("*.pid"):
            path.with_suffix(".json").unlink(missing_ok=True)
            pid = int(path.read_text() or 0)
            if pid in ours and catches(pid, signal.SIGUSR1):
                os.kill(pid, signal.SIGUSR1)

    def explain(self) -> str:
        """The chain of who waits for whom, from the trainer to the one that holds all up."""
        children, parts, seen = self._children(), list[str](), set[str]()
        name: str | None = "trainer" if "trainer" in children else next(iter(children), None)
        while name is not None and name in children and name not in seen:
            seen.add(name)
            told = read_report(self.output_dir, name) or read_report(self.output_dir, f"{name}_rank0")
            if told is None:
                return "; ".join([*parts, describe_silence(children[name])])
            since = "" if told["since_s"] is None else f" since {told['since_s']:.0f} s"
            parts.append(f"{name} {told['what']}{since}")
            name = told["on"]
        return "; ".join(parts)


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal (Linux; elsewhere nobody is asked)."""
    mask = _status(pid).get("SigCgt")
    return mask is not None and bool(int(mask, 16) >> (number - 1) & 1)


def read_report(output_dir: Path, process: str) -> dict[str, Any] | None:
    """What a process wrote down; None when it has not."""
    try:
        told: dict[str, Any] = json.loads((output_dir / HANG_DIR / f"{process}.json").read_bytes())
    except (OSError, ValueError):
        return None
    return told


def describe_silence(child: Child) -> str:
    """Why a process has not answered, as far as the system knows."""
    pid = child.process.pid
    if child.code is not None:
        return f"{child.name} has ended with {child.describe_end()}"
    state = _status(pid).get("State", "?")[:1]
    if state in "Tt":
        return f"{child.name} is stopped by a signal: `kill -CONT {pid}` lets it go on"
    if state == "D":
        return f"{child.name} waits for a disk or a device that does not answer (pid {pid})"
    if not catches(pid, signal.SIGUSR1):
        last = tail(child.log_path, 1, child.log_start)
        return f"{child.name} is still starting; the last it said: {last[0] if last else 'nothing'}"
    return f"{child.name} does not answer, it is busy outside Python: see {child.name}.stacks (pid {pid})"


def _status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
