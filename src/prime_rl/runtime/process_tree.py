"""All processes of a run, children of children included: find them, kill them, let none outlive the launcher.

A token in the environment identifies them: torchrun starts its workers in their own sessions, so killing a process
group does not reach them, and processes must never be killed by name. When the launcher itself is killed, the kernel
kills its direct children (parent-death signal), and a guard process, which runs this file, kills all others.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

TOKEN_VARIABLE = "RL_RUN_TOKENS"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of orphaned grandchildren, so that they can be reaped."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def add_token(token: str) -> str:
    """The value of TOKEN_VARIABLE for a child: the tokens of this process and `token`."""
    return ":".join(filter(None, (os.environ.get(TOKEN_VARIABLE), token)))


def find_run_processes(token: str) -> Iterator[int]:
    """Ids of other processes with `token` in their environment."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:  # exited meanwhile, or owned by another user
            continue
        marks = (e for e in environment.split(b"\0") if e.startswith(TOKEN_VARIABLE.encode() + b"="))
        if any(token.encode() in mark for mark in marks) and int(entry.name) != os.getpid():
            yield int(entry.name)


def kill_run_processes(token: str) -> None:
    """SIGKILL every process with `token` in its environment, until none is left (Linux)."""
    deadline = time.monotonic() + 10
    while (pids := list(find_run_processes(token))) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)
        for pid in pids:
            try:
                os.waitpid(pid, os.WNOHANG)  # an adopted orphan; direct children are reaped by their Popen
            except (ChildProcessError, PermissionError):
                continue


def signal_group(pid: int, number: int) -> None:
    """Signal the process group led by `pid`, if it still exists."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def start_guard(token: str) -> subprocess.Popen[bytes] | None:
    """Start a process that kills all processes with `token` after this one ends."""
    if not Path("/proc/self/environ").exists():
        return None
    environment = {key: value for key, value in os.environ.items() if key != TOKEN_VARIABLE}
    command = [sys.executable, "-I", "-S", str(Path(__file__).resolve()), token]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env=environment)


def _guard_until_parent_ends(token: str) -> None:
    """Wait until the parent ends, which closes standard input."""
    while os.read(0, 1):
        pass
    kill_run_processes(token)


def die_with_parent(parent: int) -> Callable[[], None] | None:
    """A `preexec_fn` that makes the kernel kill the child when the parent ends."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)  # loaded before the fork: little is async-signal-safe after it

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before prctl
            os._exit(1)

    return prepare


def set_parent_death_signal(parent: int) -> None:
    """Make the kernel kill this process when `parent` ends, for children without a supervisor."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":
    _guard_until_parent_ends(sys.argv[1])
