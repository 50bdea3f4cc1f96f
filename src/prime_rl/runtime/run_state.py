"""`run_state.json` in the run directory: which process executes the run, and how it ended.

A process that is killed cannot record its end. The file therefore identifies the process (host, boot, PID namespace,
PID and start time), so that a reader can check whether it still exists, and its modification time is a heartbeat for
readers on other hosts.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType

from prime_rl.runtime.interrupts import SUDDEN_END
from prime_rl.runtime.process import ChildFailed
from prime_rl.runtime.run_dir import RunDir
from rollouts.training.files import replace_file

HEARTBEAT_S = 10.0
GUESTS = ("eval", "synthesize")
"""Commands that may run in the directory of another one, whose state they leave alone."""

MAX_REASON = 200
"""Characters of a reason."""


@dataclass(frozen=True)
class ProcessIdentity:
    """A process, distinguished from a later one with the same PID. Fields are None on systems without /proc."""

    pid: int
    started: int | None
    """Start time in clock ticks since boot."""
    host: str
    boot: str | None
    namespace: str | None
    """PID namespace, in which the PID is valid."""


@dataclass(frozen=True)
class RunState:
    """Content of the state file."""

    status: str
    """running, finished, interrupted or failed."""
    command: str
    process: ProcessIdentity
    started: float
    """Unix seconds."""
    ended: float | None = None
    reason: str | None = None


def identify_process() -> ProcessIdentity:
    """The identity of this process."""
    boot, namespace = _boot_and_namespace()
    return ProcessIdentity(os.getpid(), _start_ticks(os.getpid()), platform.node(), boot, namespace)


def is_alive(process: ProcessIdentity) -> bool | None:
    """Whether `process` still exists; None if it belongs to another host or PID namespace."""
    boot, namespace = _boot_and_namespace()
    if process.host != platform.node():
        return None
    if process.boot != boot:
        return False  # the machine restarted
    if process.namespace != namespace:
        return None
    if process.started is not None:
        return _start_ticks(process.pid) == process.started
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def read_run_state(output_dir: Path) -> RunState | None:
    """The recorded state; None if there is none."""
    try:
        state = json.loads(RunDir(output_dir).state.read_bytes())
        return RunState(**{**state, "process": ProcessIdentity(**state["process"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


class StateRecorder:
    """Context manager that records the state of a run: running inside the block, then how it ended.

    No-op if a living process already records the run, as `rl` does for its trainer, and for `GUESTS` in the directory
    of another command. A rejected start (`ValueError` before the first metric) restores the record of the earlier run.
    Write errors do not fail the run.
    """

    def __init__(self, output_dir: Path, command: str) -> None:
        self._run_dir = RunDir(output_dir)
        self._path = self._run_dir.state
        self._state = RunState("running", command, identify_process(), time.time())
        self._is_owner = False
        self._ended = threading.Event()
        self._before: tuple[bytes | None, int] = (None, 0)

    def __enter__(self) -> StateRecorder:
        self._is_owner = self._may_record(read_run_state(self._run_dir.root))
        self._before = (_read(self._path), self._num_logged())
        self._write(self._encode())
        SUDDEN_END.append(self._interrupt)
        if self._is_owner:
            threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        return self

    def _may_record(self, recorded: RunState | None) -> bool:
        is_guest = self._state.command in GUESTS
        if recorded is None:
            return not (is_guest and self._run_dir.metrics.exists())  # of a run that records no state
        if is_guest != (recorded.command in GUESTS):
            return not is_guest
        return recorded.status != "running" or not is_alive(recorded.process)

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_S):
            with contextlib.suppress(OSError):
                os.utime(self._path)

    def _interrupt(self) -> None:
        self.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        SUDDEN_END.remove(self._interrupt)
        self._ended.set()
        current = read_run_state(self._run_dir.root)
        if current is not None and (current.command, current.process) != (self._state.command, self._state.process):
            return  # it has taken over
        status, reason = describe_end(error)
        self._state = replace(self._state, status=status, reason=reason, ended=time.time())
        earlier, num_logged = self._before
        is_refused = isinstance(error, ValueError) and self._num_logged() == num_logged
        self._write(earlier if is_refused and earlier is not None else self._encode())

    def _encode(self) -> bytes:
        return json.dumps(asdict(self._state)).encode()

    def _num_logged(self) -> int:
        """Size of the metrics file in bytes."""
        try:
            return self._run_dir.metrics.stat().st_size
        except OSError:
            return 0

    def _write(self, content: bytes) -> None:
        if not self._is_owner:
            return
        with contextlib.suppress(OSError):
            replace_file(self._path, content)


def describe_end(error: BaseException | None) -> tuple[str, str | None]:
    """Status and reason of a run that ended with this exception."""
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return "finished", None
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", None
    if isinstance(error, SystemExit):
        is_signal = isinstance(error.code, int) and error.code > 128
        return ("interrupted", None) if is_signal else ("failed", f"exit code {error.code}")
    if isinstance(error, ChildFailed):
        return "failed", ", ".join(f"{child.name}: {child.describe_end()}" for child in error.children)
    first = (str(error).splitlines() or [""])[0]
    reason = first if type(error) is ValueError else f"{type(error).__name__}: {first}"  # ours are in the user's words
    return "failed", reason[:MAX_REASON]


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _boot_and_namespace() -> tuple[str | None, str | None]:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return boot, os.readlink("/proc/self/ns/pid")
    except OSError:
        return None, None


def _start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None if it has exited, including zombies."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
