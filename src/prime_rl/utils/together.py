"""Chats that differ in nothing but their seed, asked for in one turn of the event loop, go out as one request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

MOST = 64  # seeds of one request: servers take a few hundred, and other requests want their turn

Send = Callable[[bytes, list["asyncio.Future[bytes | None]"]], Awaitable[None]]
"""Sends a body and resolves one future per seed; those it leaves open are asked for one by one."""


class Together:
    """Collects what is asked for until the tasks that are ready now have all had their turn.

    A rollout that is cancelled leaves its group; with the last of them the request itself is cancelled.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._open: dict[bytes, list[tuple[int | None, asyncio.Future[bytes | None]]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, body: dict[str, Any]) -> bytes | None:
        """The answer to `body`; None where nothing was gained, and it must be asked for alone."""
        key = msgspec.json.encode({name: value for name, value in body.items() if name != "seed"})
        loop = asyncio.get_running_loop()
        if key not in self._open:
            self._open[key] = []
            loop.call_soon(self._flush, key)
        future: asyncio.Future[bytes | None] = loop.create_future()
        self._open[key].append((body.get("seed"), future))
        return await future

    def _flush(self, key: bytes) -> None:
        asked = [(seed, future) for seed, future in self._open.pop(key) if not future.done()]
        if len(asked) == 1:
            asked[0][1].set_result(None)
            return
        for at in range(0, len(asked), MOST):
            part = asked[at : at + MOST]
            seeds = msgspec.json.encode([seed for seed, _ in part])
            futures = [future for _, future in part]
            body = b'%s,"seeds":%s}' % (key[:-1], seeds)
            task = asyncio.get_running_loop().create_task(self._run(body, futures))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            for future in futures:
                future.add_done_callback(partial(_leave, task, futures))

    async def _run(self, body: bytes, futures: list[asyncio.Future[bytes | None]]) -> None:
        try:
            await self._send(body, futures)
        except Exception as error:
            for future in futures:
                if not future.done():
                    future.set_exception(error)
        finally:
            for future in futures:
                if not future.done():
                    future.set_result(None)


def _leave(
    task: asyncio.Task[None], futures: list[asyncio.Future[bytes | None]], one: asyncio.Future[bytes | None]
) -> None:
    """When nobody waits any more, the request ends; one that was answered is read to its end."""
    if one.cancelled() and all(future.done() for future in futures):
        task.cancel()
