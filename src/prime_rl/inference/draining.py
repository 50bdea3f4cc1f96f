"""The web server of `inference`: at its end, it answers the requests that do not finish in time."""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from loguru import logger

from prime_rl.inference.async_engine import AsyncEngine

ANSWER_S = 1.0
"""Time for the answers of requests that were failed; then uvicorn cancels what still runs."""


class DrainingServer(uvicorn.Server):
    """Waits `drain_timeout_s` for running requests when it stops, then fails them."""

    def __init__(self, settings: uvicorn.Config, engine: AsyncEngine, drain_timeout_s: float) -> None:
        super().__init__(settings)
        self._engine, self._drain_timeout_s = engine, drain_timeout_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections and wait for the requests."""
        timer = asyncio.get_running_loop().call_later(self._drain_timeout_s, self._fail_requests)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def _fail_requests(self) -> None:
        if num_failed := self._engine.refuse():
            logger.info(f"Stopping after {self._drain_timeout_s:g} s (server.drain_timeout): {num_failed} unfinished")
