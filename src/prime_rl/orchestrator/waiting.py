"""Periodic wait messages and event-loop lag."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio
from loguru import logger

LOG_INTERVAL_S = 30.0
LAG_INTERVAL_S = 0.25


class WaitLogger:
    """Logs every `LOG_INTERVAL_S` seconds what the loop waits for and for how long."""

    def __init__(self) -> None:
        self._describe: Callable[[float], str | None] = lambda waited: None
        self._since = 0.0

    @contextmanager
    def waiting(self, describe: Callable[[float], str | None]) -> Iterator[None]:
        """Context of a wait; `describe(seconds waited)` returns the message, None for no message."""
        self._describe, self._since = describe, anyio.current_time()
        try:
            yield
        finally:
            self._describe = lambda waited: None

    async def run(self) -> None:
        """Log until cancelled."""
        while True:
            await anyio.sleep(LOG_INTERVAL_S)
            waited = anyio.current_time() - self._since
            if waited >= LOG_INTERVAL_S and (line := self._describe(waited)) is not None:
                logger.info(line)


class EventLoopLagMonitor:
    """Delay of timer wake-ups: more than a few ms means that the event loop is overloaded."""

    def __init__(self) -> None:
        self._lags: list[float] = []

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            due = anyio.current_time() + LAG_INTERVAL_S
            await anyio.sleep_until(due)
            self._lags.append(max(anyio.current_time() - due, 0.0))

    def take_metrics(self) -> dict[str, float]:
        """Mean and maximum in seconds since the last call."""
        lags, self._lags = self._lags or [0.0], []
        return {"event_loop_lag/mean": sum(lags) / len(lags), "event_loop_lag/max": max(lags)}
