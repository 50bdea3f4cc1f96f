"""Saying what is waited for while nothing happens, and measuring when the event loop itself is what is late."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio
from loguru import logger

REMIND_S = 30.0
LAG_EVERY_S = 0.25


class Reminder:
    """Says every `REMIND_S` seconds what is waited for, and since when."""

    def __init__(self) -> None:
        self._describe: Callable[[float], str | None] = lambda waited: None
        self._since = 0.0

    @contextmanager
    def waiting(self, describe: Callable[[float], str | None]) -> Iterator[None]:
        """The body waits; `describe(seconds waited)` says for what, None says nothing."""
        self._describe, self._since = describe, anyio.current_time()
        try:
            yield
        finally:
            self._describe = lambda waited: None

    async def run(self) -> None:
        """Remind until cancelled."""
        while True:
            await anyio.sleep(REMIND_S)
            waited = anyio.current_time() - self._since
            if waited >= REMIND_S and (line := self._describe(waited)) is not None:
                logger.info(line)


class LagMeter:
    """How late the event loop wakes a task that asked to be woken: more than a few ms means the loop is overloaded."""

    def __init__(self) -> None:
        self._lags: list[float] = []

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            due = anyio.current_time() + LAG_EVERY_S
            await anyio.sleep_until(due)
            self._lags.append(max(anyio.current_time() - due, 0.0))

    def take_metrics(self) -> dict[str, float]:
        """Mean and maximum in seconds since the last call."""
        lags, self._lags = self._lags or [0.0], []
        return {"event_loop_lag/mean": sum(lags) / len(lags), "event_loop_lag/max": max(lags)}
