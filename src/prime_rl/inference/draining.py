"""A web server that, at its end, answers the requests that do not finish in time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import uvicorn

ANSWER_S = 1.0
"""Time for the answers of requests that were failed; then uvicorn cancels what still runs."""


class DrainingServer(uvicorn.Server):
    """Waits `drain_timeout_s` for running requests when it stops, then calls `end_requests`."""

    def __init__(self, settings: uvicorn.Config, drain_timeout_s: float, end_requests: Callable[[], None]) -> None:
        super().__init__(settings)
        self._drain_timeout_s, self._end_requests = drain_timeout_s, end_requests

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections and wait for the requests."""
        timer = asyncio.get_running_loop().call_later(self._drain_timeout_s, self._end_requests)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
