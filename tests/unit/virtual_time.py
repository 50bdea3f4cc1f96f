"""An asyncio loop in virtual time: for tests, and for benchmarks of the orchestrator's real code."""

from __future__ import annotations

import asyncio
import heapq


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer instead of waiting for it."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready:  # type: ignore[attr-defined]
            # A timer that nobody waits for any more is no reason to jump.
            while self._scheduled and self._scheduled[0]._cancelled:  # type: ignore[attr-defined]
                self._timer_cancelled_count -= 1  # type: ignore[attr-defined]
                heapq.heappop(self._scheduled)._scheduled = False  # type: ignore[attr-defined]
            if self._scheduled:  # type: ignore[attr-defined]
                self.now = max(self.now, self._scheduled[0]._when)  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]
