"""Cores that other processes leave to this one."""

from __future__ import annotations

import os
import time
from pathlib import Path

STAT = Path("/proc/stat")
IDLE, IO_WAIT = 4, 5
"""Columns of a core's line: idle, and waiting for input or output."""


class FreeCores:
    """Mean number of cores, of those that this process may use, that other processes did not use since the last call.

    0 where the system has no `/proc/stat`. Cores outside of the process's affinity do not count.
    """

    def __init__(self) -> None:
        self.cores = os.sched_getaffinity(0) if STAT.is_file() else frozenset()
        self._tick = 1 / os.sysconf("SC_CLK_TCK")
        self._last = self._read()

    def __call__(self) -> float:
        before, self._last = self._last, self._read()
        passed, idle, own = (now - then for now, then in zip(self._last, before, strict=True))
        return min((idle + own) / passed, float(len(self.cores))) if passed > 0 else 0.0

    def _read(self) -> tuple[float, float, float]:
        """Time, idle time of the cores, and CPU time of this process, in seconds."""
        if not self.cores:
            return time.monotonic(), 0.0, 0.0
        idle = 0
        for line in STAT.read_text().splitlines():
            name, *_ = fields = line.split()
            if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in self.cores:
                idle += int(fields[IDLE]) + int(fields[IO_WAIT])
        return time.monotonic(), idle * self._tick, time.process_time()
