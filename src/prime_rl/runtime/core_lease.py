"""Cores shared by the computing processes of a run on one machine: one that waits leaves its cores to the others.

A process locks a file of its own while it computes. The system releases the lock of a process that ends, however it
ends. `DIRECTORY_VARIABLE` names the directory of the files; `rl` sets it where processes share the cores of a machine.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prime_rl.runtime.machine import num_cores

DIRECTORY_VARIABLE = "PRIME_RL_CORE_LEASES"

MIN_PARAMETERS = 20_000_000
"""Models with fewer parameters use one thread: most of their time is Python's, which threads cannot share."""


class CoreLease:
    """The lease of this process; without a directory no process shares the cores, and leases have no effect."""

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        self._path = None if directory is None else directory / str(os.getpid())
        self._file = None if self._path is None else self._path.open("w")

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the lease while this process computes."""
        self._lock(fcntl.LOCK_EX)
        try:
            yield
        finally:
            self._lock(fcntl.LOCK_UN)

    @contextmanager
    def leave(self) -> Iterator[None]:
        """Leave the cores to the other processes while this one waits; the lease is held from then on."""
        self._lock(fcntl.LOCK_UN)
        try:
            yield
        finally:
            self._lock(fcntl.LOCK_EX)

    def count_threads(self) -> int:
        """This process's share of the cores, which it shares equally with those that compute now; at least 1."""
        others = [] if self.directory is None else [path for path in self.directory.iterdir() if path != self._path]
        return max(1, num_cores() // (1 + sum(map(_is_held, others))))

    def _lock(self, operation: int) -> None:
        if self._file is not None:
            fcntl.flock(self._file, operation)


def open_core_lease() -> CoreLease:
    """The lease of this process."""
    directory = os.environ.get(DIRECTORY_VARIABLE)
    return CoreLease(Path(directory) if directory else None)


def _is_held(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
