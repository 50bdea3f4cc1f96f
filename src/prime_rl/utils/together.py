"""Chats that differ in nothing but their seed, asked for in one turn of the event loop, go out as one request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

MOST = 64  # seeds of one request: servers take a few hundred, and other requests want their turn

Open = dict[int, "asyncio.Future[bytes | None]"]
"""Who waits for which answer of a group; whoever was answered is not among them any more."""
Send = Callable[[bytes, Open], Awaitable[None]]
"""Sends a body and answers whom it can."""


class Together:
    """Collects what is asked for until the tasks that are ready now have all had their turn.

    Whatever a group leaves open is asked for alone, with all retries and errors of single requests: a group itself is
    sent once. A rollout that is cancelled leaves its group; with the last that waits the request itself is cancelled
    (until then the server draws on for all of them).
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._collected: dict[bytes, list[tuple[bytes, asyncio.Future[bytes | None]]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, body: dict[str, Any]) -> bytes | None:
        """The answer to `body`; None where it must be asked for alone."""
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
        asked = [(seed, future) for seed, future in self._collected.pop(key) if not future.done()]
        if len(asked) == 1:
            asked[0][1].set_result(None)
            return
        for at in range(0, len(asked), MOST):
            seeds, futures = zip(*asked[at : at + MOST], strict=True)
            waiting = dict(enumerate(futures))
            body = b'%s,"seeds":[%s]}' % (key[:-1], b",".join(seeds))
            task = asyncio.get_running_loop().create_task(self._run(body, waiting))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            for future in futures:
                future.add_done_callback(partial(_leave, task, waiting))

    async def _run(self, body: bytes, waiting: Open) -> None:
        try:
            await self._send(body, waiting)
        finally:
            for future in waiting.values():
                if not future.done():
                    future.set_result(None)


def _leave(task: asyncio.Task[None], waiting: Open, one: asyncio.Future[bytes | None]) -> None:
    """When nobody waits any more, the request ends; one that was answered in full is read to its end."""
    if waiting and all(future.done() for future in waiting.values()):
        task.cancel()
