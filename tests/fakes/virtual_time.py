"""An asyncio loop in virtual time: for tests, and for benchmarks of the orchestrator's real code."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable
from typing import Any

import anyio


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer instead of waiting for it."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready:  # type: ignore[attr-defined]
            # Skip cancelled timers.
            while self._scheduled and self._scheduled[0]._cancelled:  # type: ignore[attr-defined]
                self._timer_cancelled_count -= 1  # type: ignore[attr-defined]
                heapq.heappop(self._scheduled)._scheduled = False  # type: ignore[attr-defined]
            if self._scheduled:  # type: ignore[attr-defined]
                self.now = max(self.now, self._scheduled[0]._when)  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def run(main: Callable[[], Awaitable[Any]], backend: str = "asyncio") -> Any:
    """Run `main` in virtual time."""
    if backend == "asyncio":
        return anyio.run(main, backend_options={"loop_factory": VirtualLoop})
    import pytest

    trio_testing = pytest.importorskip("trio.testing")
    return anyio.run(main, backend="trio", backend_options={"clock": trio_testing.MockClock(autojump_threshold=0)})
