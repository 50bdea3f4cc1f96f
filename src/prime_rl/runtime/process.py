"""Process supervision: start the processes of a run, show their output, and leave none behind.

Each child leads its own session and has a token in its environment (`process_tree`). A thread copies its redacted
output to `<logs_dir>/<name>.log` (`redacted_output`); the console follows the log files.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from prime_rl.runtime.process_tree import (
    TOKEN_VARIABLE,
    add_token,
    adopt_orphans,
    die_with_parent,
    find_run_processes,
    kill_run_processes,
    signal_group,
    start_guard,
)

TICK_S = 0.1
TAIL_LINES = 15
DRAIN_S = 1.0
WRONG_INPUT = 2


class ChildFailed(RuntimeError):
    """Required processes exited; the message has their names, exit status and the end of their logs."""

    def __init__(self, children: Sequence[Child]) -> None:
        self.children = tuple(children)
        super().__init__("\n".join(_describe_exit(child) for child in children))

    @property
    def wrong_input(self) -> str | None:
        """`process: message` if a child rejected its input (exit code 2 and a last `error: ...`)."""
        for child in self.children:
            lines = tail(child.log_path, start=child.log_start) if child.code == WRONG_INPUT else []
            starts = [i for i, line in enumerate(lines) if line.startswith("error: ")]
            if starts:
                return f"{child.name}: " + "\n".join(lines[starts[-1] : starts[-1] + 3]).removeprefix("error: ")
        return None


@dataclass(frozen=True)
class Restart:
    """How to restart a failed process, and how many restarts are left."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    tries_left: int


@dataclass
class Child:
    """One supervised process, with the console's position in its log."""

    name: str
    process: subprocess.Popen[bytes]
    log_path: Path
    log_start: int
    offset: int
    started: float
    partial: bytes = b""
    ended: float | None = None
    again: Restart | None = None
    output: threading.Thread | None = None
    """Copies the output to the log until the process and its descendants have closed the pipe."""

    def drain(self) -> None:
        """Wait until all output of an exited process is in the log."""
        if self.output is not None:
            self.output.join(DRAIN_S)

    @property
    def code(self) -> int | None:
        """Exit code, negative for a signal, None while it runs."""
        code = self.process.poll()
        if code is not None and self.ended is None:
            self.ended = time.monotonic()
        return code

    def describe_end(self) -> str:
        """Human-readable status: `exit code 3` or `signal SIGKILL`."""
        code = self.code
        if code is None:
            return "is still running"
        if code >= 0:
            return f"exit code {code}"
        try:
            return f"signal {signal.Signals(-code).name}"
        except ValueError:
            return f"signal {-code}"


@dataclass
class Supervisor:
    """A context manager for child processes, which are all stopped on exit.

    With `handle_signals`, the first Ctrl-C (or SIGTERM) raises `KeyboardInterrupt` (`SystemExit`) from the next wait
    and so stops the children cleanly; the second kills them. Must then be entered in the main thread. Signals that the
    caller ignores, such as SIGHUP under nohup, stay ignored.
    """

    logs_dir: Path
    console: TextIO | None = None
    format_line: Callable[[str, str], str | None] = "{:<12} | {}".format
    """Formats (process name, line) for the console; None hides the line."""
    handle_signals: bool = True
    grace_s: float = 10.0
    children: dict[str, Child] = field(default_factory=dict)
    _token: str = field(default_factory=lambda: uuid.uuid4().hex)
    _signals: list[int] = field(default_factory=list)
    _previous: dict[int, Any] = field(default_factory=dict)
    _guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Supervisor:
        self.logs_dir.mkdir(parents=True, exist_ok=True)
        if self.handle_signals:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._on_signal)
        adopt_orphans()
        self._guard = start_guard(self._token)
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.stop()
        finally:
            if self._guard is not None and self._guard.stdin is not None:
                self._guard.stdin.close()
                self._guard.wait(timeout=30)
            for number, handler in self._previous.items():
                signal.signal(number, handler)

    def start(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        max_restarts: int = 0,
        restart_options: Sequence[str] = (),
    ) -> Child:
        """Run `argv` with `env` on top of this process's environment; output goes to `<logs_dir>/<name>.log`.

        After a failure it is restarted up to `max_restarts` times with `restart_options` appended to `argv`.
        """
        from prime_rl.runtime.redacted_output import LOG_PIPE_VARIABLE, copy_redacted, describe_log_pipe

        log_path = self.logs_dir / f"{name}.log"
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **(env or {}), TOKEN_VARIABLE: add_token(self._token)}
        log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        offset = os.fstat(log).st_size
        source, sink = os.pipe()
        environment[LOG_PIPE_VARIABLE] = describe_log_pipe(sink, log_path)
        try:
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=die_with_parent(os.getpid()),
            )
        finally:
            os.close(sink)
            output = copy_redacted(source, log)
        child = Child(name, process, log_path, offset, offset, time.monotonic(), output=output)
        if max_restarts:
            child.again = Restart((*argv, *restart_options), dict(env or {}), max_restarts)
        self.children[name] = child
        return child

    def print(self, line: str, source: str = "rl") -> None:
        """Write one line to the console, if it is still open."""
        shown = self.format_line(source, line)
        if self.console is None or shown is None:
            return
        encoding = getattr(self.console, "encoding", None) or "utf-8"
        try:
            self.console.write(shown.encode(encoding, errors="replace").decode(encoding) + "\n")
            self.console.flush()
        except (OSError, ValueError):  # the reader exited (`rl ... | head`); the logs are complete
            self.console = None

    def check(self, may_end: Collection[str] = ()) -> None:
        """Follow the logs once; raise `ChildFailed` for an unexpected exit, or the exception of a received signal."""
        self._follow()
        if self._signals:
            if self._signals[0] == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(128 + self._signals[0])
        ended = [c for c in self.children.values() if c.code is not None and not (c.code == 0 and c.name in may_end)]
        if not ended:
            return
        for child in ended:
            child.drain()
        self._follow()
        final = [c for c in ended if c.again is None or c.code == WRONG_INPUT]
        if final:
            raise ChildFailed(final)
        for child in ended:
            self._restart(child)

    def _restart(self, child: Child) -> None:
        """Restart a failed process and print why it failed."""
        assert child.again is not None
        again, left = child.again, child.again.tries_left - 1
        self.print(_describe_exit(child))
        self.print(f"Restarting {child.name} ({left} restarts left)")
        new = self.start(child.name, again.argv, env=again.env)
        new.offset = child.offset
        new.again = replace(again, tries_left=left) if left else None

    def wait(self, names: Collection[str]) -> None:
        """Wait until every child in `names` has exited with 0; raises as `check` does."""
        for _ in self.poll(names):
            pass

    def poll(self, names: Collection[str]) -> Iterator[None]:
        """`wait`, yielding ten times per second."""
        while any(self.children[name].code is None for name in names):
            self.check(may_end=names)
            yield
            time.sleep(TICK_S)
        self.check(may_end=names)
        for name in names:
            self.children[name].drain()

    def find_pids(self) -> list[int]:
        """All processes of this run: children and their descendants."""
        return list(find_run_processes(self._token))

    def wait_for(self, ready: Callable[[], bool], *, timeout_s: float, what: str) -> None:
        """Wait until `ready()`; raises `TimeoutError` naming `what`, or as `check` does."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            self.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {timeout_s:.0f} s for {what}: see the logs in {self.logs_dir}")
            time.sleep(TICK_S)

    def stop(self) -> None:
        """SIGTERM to every group, SIGKILL after the grace period (or a second Ctrl-C), then the strays."""
        num_signals = len(self._signals)  # from here on, a Ctrl-C is the second one
        alive = [c for c in self.children.values() if c.code is None]
        for child in alive:
            signal_group(child.process.pid, signal.SIGTERM)
        deadline = time.monotonic() + self.grace_s
        with contextlib.suppress(KeyboardInterrupt):  # the second Ctrl-C, where the caller handles signals
            while any(c.code is None for c in alive) and time.monotonic() < deadline:
                if len(self._signals) > num_signals:
                    break
                self._follow()
                time.sleep(TICK_S / 2)
        for child in self.children.values():
            if child.code is None:
                signal_group(child.process.pid, signal.SIGKILL)
        for child in self.children.values():
            child.process.wait(timeout=30)
        kill_run_processes(self._token)
        for child in self.children.values():
            child.drain()
        self._follow(last=True)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._signals.append(number)

    def _follow(self, last: bool = False) -> None:
        """Print new output of the children."""
        for child in self.children.values() if self.console is not None else ():
            data, child.offset = _read_log(child.log_path, child.offset)
            *lines, child.partial = (child.partial + data).split(b"\n")
            if last and child.partial:
                lines, child.partial = [*lines, child.partial], b""
            for line in lines:  # only the last state of a progress bar
                self.print(line.rstrip(b"\r").rsplit(b"\r", 1)[-1].decode(errors="replace"), child.name)


def tail(path: Path, num_lines: int = TAIL_LINES, start: int = 0) -> list[str]:
    """The last lines of `path` after byte `start`."""
    data, _ = _read_log(path, start, 64 * 1024)
    return [line for line in data.decode(errors="replace").splitlines() if line.strip()][-num_lines:]


def _read_log(path: Path, start: int, limit: int | None = None) -> tuple[bytes, int]:
    """At most the last `limit` bytes of a log after byte `start`, and where they end.

    A log that is shorter was truncated and is read whole; one that was removed is empty: the run goes on.
    """
    try:
        with path.open("rb") as log:
            size = os.fstat(log.fileno()).st_size
            start = start if start <= size else 0
            log.seek(start if limit is None else max(start, size - limit))
            return log.read(), log.tell()
    except FileNotFoundError:
        return b"", start


def _describe_exit(child: Child) -> str:
    """Name, exit status, run time and last output of a failed process."""
    seconds = (child.ended or time.monotonic()) - child.started
    lines = [f"{child.name} ended with {child.describe_end()} after {seconds:.1f} s; the end of {child.log_path}:"]
    lines += [f"    {line}" for line in tail(child.log_path, start=child.log_start)] or ["    (it wrote nothing)"]
    if child.code == -signal.SIGKILL:
        lines.append(f"{child.name} was killed externally, possibly by the out-of-memory killer (see dmesg)")
    return "\n".join(lines)
