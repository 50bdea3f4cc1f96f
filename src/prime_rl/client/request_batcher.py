"""Coalesces concurrent chat requests that differ only in their seed into one batched request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

MAX_SEEDS = 64  # per request: servers accept a few hundred, but other requests must not starve

PendingResponses = dict[int, "asyncio.Future[bytes | None]"]
"""Index in the group -> future of its response; answered ones are removed."""
Send = Callable[[bytes, PendingResponses], Awaitable[None]]
"""Sends a body and resolves the futures of the responses."""


class RequestBatcher:
    """Collects requests during one iteration of the event loop.

    Requests that the batch does not answer are retried individually; the batch itself is never retried. A cancelled
    rollout leaves its group; the batched request is cancelled with the last one (until then the server generates for
    all of them).
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._collected: dict[bytes, list[tuple[bytes, asyncio.Future[bytes | None]]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def request(self, body: dict[str, Any]) -> bytes | None:
        """The response to `body`; None if it must be requested individually."""
        key = msgspec.json.encode({name: value for name, value in body.items() if name != "seed"})
        seed = msgspec.json.encode(body.get("seed"))
        loop = asyncio.get_running_loop()
        if key not in self._collected:
            self._collected[key] = []
            loop.call_soon(self._flush, key)
        future: asyncio.Future[bytes | None] = loop.create_future()
        self._collected[key].append((seed, future))
        return await future

    def _flush(self, key: bytes) -> None:
        requests = [(seed, future) for seed, future in self._collected.pop(key) if not future.done()]
        if len(requests) == 1:
            requests[0][1].set_result(None)
            return
        for start in range(0, len(requests), MAX_SEEDS):
            seeds, futures = zip(*requests[start : start + MAX_SEEDS], strict=True)
            waiting = dict(enumerate(futures))
            body = b'%s,"seeds":[%s]}' % (key[:-1], b",".join(seeds))
            task = asyncio.get_running_loop().create_task(self._run(body, waiting))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            for future in futures:
                future.add_done_callback(partial(_cancel_if_unused, task, waiting))

    async def _run(self, body: bytes, waiting: PendingResponses) -> None:
        try:
            await self._send(body, waiting)
        finally:
            for future in waiting.values():
                if not future.done():
                    future.set_result(None)


def _cancel_if_unused(task: asyncio.Task[None], waiting: PendingResponses, _: asyncio.Future[bytes | None]) -> None:
    """Cancel the request once all pending futures are done; a completely answered one is read to its end."""
    if waiting and all(future.done() for future in waiting.values()):
        task.cancel()
