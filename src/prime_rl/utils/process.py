"""Start a run's processes, show what they say, and leave none behind however the run ends.

Each child leads its own session, writes straight to `<logs_dir>/<name>.log` (no pipe that could fill up or break) and
carries a token in its environment. The console follows the log files. The token is how strays are found: torchrun
starts its workers in sessions of their own, so killing a process group does not reach them, and a name must never
be used to end a process. When the launcher itself is killed, the kernel ends its direct children (parent-death signal)
and a small guard process ends whatever else carries the token.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

TOKEN_VARIABLE = "RL_RUN_TOKENS"
TICK_S = 0.1
TAIL_LINES = 15
WRONG_INPUT = 2
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class ChildFailed(RuntimeError):
    """Processes ended while they were still needed; the message says which, how, and shows the end of their logs."""

    def __init__(self, children: Sequence[Child]) -> None:
        self.children = tuple(children)
        super().__init__("\n".join(_obituary(child) for child in children))

    @property
    def wrong_input(self) -> str | None:
        """`process: what it said`, when a child refused its input (exit code 2 and a last `error: ...`)."""
        for child in self.children:
            lines = tail(child.log_path, start=child.log_start) if child.code == WRONG_INPUT else []
            starts = [i for i, line in enumerate(lines) if line.startswith("error: ")]
            if starts:
                return f"{child.name}: " + "\n".join(lines[starts[-1] : starts[-1] + 3]).removeprefix("error: ")
        return None


@dataclass(frozen=True)
class Restart:
    """How a process that falls is started again, and how often still; without tries left its end ends the run."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    tries_left: int


@dataclass
class Child:
    """One supervised process and how far the console has followed its log."""

    name: str
    process: subprocess.Popen[bytes]
    log_path: Path
    log_start: int
    offset: int
    started: float
    partial: bytes = b""
    ended: float | None = None
    again: Restart | None = None

    @property
    def code(self) -> int | None:
        """Exit code, negative for a signal, None while it runs."""
        code = self.process.poll()
        if code is not None and self.ended is None:
            self.ended = time.monotonic()
        return code

    def describe_end(self) -> str:
        """`exit code 3` or `signal SIGKILL`, for people."""
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
    """A context in which children run: leaving it, in whatever way, stops them all.

    With `handle_signals`, the first Ctrl-C (or SIGTERM) raises `KeyboardInterrupt` (`SystemExit`) from the next wait
    and so stops the children cleanly; the second ends them at once. Must then be entered in the main thread.
    """

    logs_dir: Path
    console: TextIO | None = None
    format_line: Callable[[str, str], str | None] = "{:<12} | {}".format
    """Process name and line -> what the console shows of it; None: nothing."""
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
                self._previous[number] = signal.signal(number, self._on_signal)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphaned grandchildren come to us, so that they can be reaped
        self._guard = _start_guard(self._token)
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
        """Run `argv` with `env` on top of this process's environment; its output goes to `<logs_dir>/<name>.log`.

        When it falls it is started again, `max_restarts` times at most, with `restart_options` behind `argv`.
        """
        log_path = self.logs_dir / f"{name}.log"
        tokens = ":".join(filter(None, (os.environ.get(TOKEN_VARIABLE), self._token)))
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **(env or {}), TOKEN_VARIABLE: tokens}
        with log_path.open("ab") as log:
            offset = log.tell()
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=_die_with_parent(os.getpid()),
            )
        child = Child(name, process, log_path, offset, offset, time.monotonic())
        if max_restarts:
            child.again = Restart((*argv, *restart_options), dict(env or {}), max_restarts)
        self.children[name] = child
        return child

    def say(self, line: str, source: str = "rl") -> None:
        """Write one line to the console, if there is one that still listens."""
        shown = self.format_line(source, line)
        if self.console is None or shown is None:
            return
        try:
            self.console.write(shown + "\n")
            self.console.flush()
        except (OSError, ValueError):  # the reader went away (`rl ... | head`): the logs still have everything
            self.console = None

    def check(self, may_end: Collection[str] = ()) -> None:
        """Follow the logs once; raise `ChildFailed` when a child ended that should not have, or what a signal asks."""
        self._follow()
        if self._signals:
            if self._signals[0] == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(128 + self._signals[0])
        ended = [c for c in self.children.values() if c.code is not None and not (c.code == 0 and c.name in may_end)]
        if not ended:
            return
        self._follow()
        final = [c for c in ended if c.again is None or c.code == WRONG_INPUT]
        if final:
            raise ChildFailed(final)
        for child in ended:
            self._restart(child)

    def _restart(self, child: Child) -> None:
        """Start a fallen process again, and say why it fell."""
        assert child.again is not None
        again, left = child.again, child.again.tries_left - 1
        self.say(_obituary(child))
        self.say(f"{child.name} is started again ({left} more times if it falls)")
        new = self.start(child.name, again.argv, env=again.env)
        new.offset = child.offset
        new.again = replace(again, tries_left=left) if left else None

    def wait(self, names: Collection[str], on_tick: Callable[[], None] = lambda: None) -> None:
        """Return when every child in `names` has exited with 0; raise as `check` does as soon as that cannot happen.

        `on_tick` is called ten times a second meanwhile.
        """
        while any(self.children[name].code is None for name in names):
            self.check(may_end=names)
            on_tick()
            time.sleep(TICK_S)
        self.check(may_end=names)

    def find_pids(self) -> list[int]:
        """All processes of this run: children, their workers, and whatever these started."""
        return list(find_marked(self._token))

    def wait_for(self, ready: Callable[[], bool], *, timeout_s: float, what: str) -> None:
        """Return when `ready()`; raise `TimeoutError` naming `what`, or as `check` does."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            self.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {timeout_s:.0f} s for {what}: see the logs in {self.logs_dir}")
            time.sleep(TICK_S)

    def stop(self) -> None:
        """SIGTERM to every group, SIGKILL after the grace period (or a second Ctrl-C), then the strays."""
        alive = [c for c in self.children.values() if c.code is None]
        for child in alive:
            _signal_group(child.process.pid, signal.SIGTERM)
        deadline = time.monotonic() + self.grace_s
        asked = len(self._signals)
        with contextlib.suppress(KeyboardInterrupt):  # the second Ctrl-C, where the caller handles signals
            while any(c.code is None for c in alive) and time.monotonic() < deadline and len(self._signals) <= asked:
                self._follow()
                time.sleep(TICK_S / 2)
        for child in self.children.values():
            if child.code is None:
                _signal_group(child.process.pid, signal.SIGKILL)
        for child in self.children.values():
            child.process.wait(timeout=30)
        end_marked(self._token)
        self._follow(last=True)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._signals.append(number)

    def _follow(self, last: bool = False) -> None:
        """Show what the children wrote since the last look."""
        for child in self.children.values() if self.console is not None else ():
            with child.log_path.open("rb") as log:
                log.seek(child.offset)
                data = log.read()
            child.offset += len(data)
            *lines, child.partial = (child.partial + data).split(b"\n")
            if last and child.partial:
                lines, child.partial = [*lines, child.partial], b""
            for line in lines:  # of a progress bar only its last state
                self.say(line.rstrip(b"\r").rsplit(b"\r", 1)[-1].decode(errors="replace"), child.name)


def check_port_free(host: str | None, port: int, key: str = "inference.server.port") -> None:
    """Raise `ValueError` naming `key` and the cure when nobody can listen on `port` any more."""
    import socket

    address = host or "localhost"
    try:
        with socket.create_server((address, port)):
            pass
    except OSError as error:
        raise ValueError(
            f"{key}: port {port} on {address} cannot be used ({os.strerror(error.errno or 0).lower()}); "
            f"stop the server that holds it or choose another one, e.g. --{key} {find_free_port()}"
        ) from error


def find_free_port(host: str = "localhost") -> int:
    """A port that nobody listens on right now."""
    import socket

    with socket.create_server((host, 0)) as server:
        return int(server.getsockname()[1])


def is_healthy(host: str | None, port: int) -> bool:
    """`GET /health` answers 200 within a second."""
    import http.client

    connection = http.client.HTTPConnection(host or "localhost", port, timeout=1)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def find_gpus() -> list[int]:
    """Ids of the NVIDIA GPUs that processes may use, without asking any driver library."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = sorted(int(p.name[6:]) for p in Path("/dev").glob("nvidia[0-9]*") if p.name[6:].isdigit())
    if wanted is None:
        return present
    return [int(gpu) for gpu in wanted.split(",") if gpu.strip().isdigit() and int(gpu) in present]


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def end_marked(token: str) -> None:
    """SIGKILL every process that carries `token` in its environment, until none is left (Linux)."""
    deadline = time.monotonic() + 10
    while (pids := list(find_marked(token))) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)
        for pid in pids:
            try:
                os.waitpid(pid, os.WNOHANG)  # an adopted orphan; a child of ours is reaped by its Popen
            except (ChildProcessError, PermissionError):
                continue


def find_marked(token: str) -> Iterator[int]:
    """Process ids, other than ours, whose environment carries `token`."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:  # ended meanwhile, or somebody else's
            continue
        marks = (e for e in environment.split(b"\0") if e.startswith(TOKEN_VARIABLE.encode() + b"="))
        if any(token.encode() in mark for mark in marks) and int(entry.name) != os.getpid():
            yield int(entry.name)


def tail(path: Path, num_lines: int = TAIL_LINES, start: int = 0) -> list[str]:
    """The last lines of `path` after byte `start`."""
    with path.open("rb") as log:
        log.seek(max(start, path.stat().st_size - 64 * 1024))
        return [line for line in log.read().decode(errors="replace").splitlines() if line.strip()][-num_lines:]


def _obituary(child: Child) -> str:
    """Which process fell, how, when, and its last words."""
    seconds = (child.ended or time.monotonic()) - child.started
    lines = [f"{child.name} ended with {child.describe_end()} after {seconds:.1f} s; the end of {child.log_path}:"]
    lines += [f"    {line}" for line in tail(child.log_path, start=child.log_start)] or ["    (it wrote nothing)"]
    if child.code == -signal.SIGKILL:
        lines.append(f"{child.name} was killed from outside: if nobody did, the machine ran out of memory (see dmesg)")
    return "\n".join(lines)


def _start_guard(token: str) -> subprocess.Popen[bytes] | None:
    """A process that outlives this one just long enough to end what carries `token`."""
    if not Path("/proc/self/environ").exists():
        return None
    environment = {key: value for key, value in os.environ.items() if key != TOKEN_VARIABLE}
    command = [sys.executable, "-I", "-S", str(Path(__file__).resolve()), token]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env=environment)


def _guard_until_parent_ends(token: str) -> None:
    """Standard input closes when the parent ends, in whatever way."""
    while os.read(0, 1):
        pass
    end_marked(token)


def _signal_group(pid: int, number: int) -> None:
    """Signal the process group that `pid` leads; nothing when it has gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _die_with_parent(parent: int) -> Callable[[], None] | None:
    """Runs in the child before exec: the kernel is to kill it when the parent ends."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)  # loaded before the fork: little is safe after it

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the line above
            os._exit(1)

    return prepare


def die_with(parent: int) -> None:
    """Called in a child that was started without our supervisor: the kernel is to kill it when `parent` ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":
    _guard_until_parent_ends(sys.argv[1])
