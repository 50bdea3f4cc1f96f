"""Futures: results that clients fetch by request id."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from loguru import logger

MAX_KEPT_BYTES = 256 * 2**20
"""Results that clients have fetched are kept for repeated requests until all kept results exceed this."""


@dataclass(eq=False)
class Future:
    """One request: `payload` is protobuf or a JSON value, `error` a message with the party at fault."""

    request_id: str
    owner: str
    group: str
    """Session that ends the future when it ends."""
    queue: tuple[str, int] | None = None
    """Sampling session and its clone, for polls of many futures."""
    payload: Any = None
    error: tuple[str, Literal["user", "server"]] | None = None
    fetched: bool = False
    done: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    @property
    def num_bytes(self) -> int:
        """Size of a protobuf payload."""
        return len(self.payload) if isinstance(self.payload, bytes) else 256


class Futures:
    """All futures of the server, by request id."""

    def __init__(self) -> None:
        self.by_id: OrderedDict[str, Future] = OrderedDict()
        self.num_pending = 0
        self._kept_bytes = 0
        self._completed: dict[tuple[str, int], deque[tuple[int, Future]]] = {}
        self._cursors: dict[tuple[str, int], int] = {}
        self._arrived: dict[tuple[str, int], asyncio.Event] = {}

    def open(self, future: Future) -> None:
        """Register a pending future."""
        assert future.request_id not in self.by_id
        self.by_id[future.request_id] = future
        self.num_pending += 1

    async def run(self, future: Future, work: Callable[[], Awaitable[Any]]) -> None:
        """Complete a future with the result of `work`; a `ValueError` is the client's, any other error the server's."""
        try:
            self.close(future, await work(), None)
        except asyncio.CancelledError:
            self.close(future, None, ("the request was canceled", "user"))
            raise
        except ValueError as error:
            self.close(future, None, (str(error), "user"))
        except Exception as error:
            logger.exception(f"{future.request_id} failed")
            self.close(future, None, (f"{type(error).__name__}: {error}", "server"))

    def close(self, future: Future, payload: Any, error: tuple[str, Literal["user", "server"]] | None) -> None:
        """Complete a future."""
        if future.done.is_set():
            return
        future.payload, future.error = payload, error
        self.num_pending -= 1
        if future.request_id in self.by_id:
            self._kept_bytes += future.num_bytes
        if future.queue is not None:
            cursor = self._cursors[future.queue] = self._cursors.get(future.queue, 0) + 1
            self._completed.setdefault(future.queue, deque()).append((cursor, future))
            self._arrived.setdefault(future.queue, asyncio.Event()).set()
        future.done.set()

    def mark_fetched(self, future: Future) -> None:
        """Allow a fetched result to be dropped when memory is needed."""
        future.fetched = True
        while self._kept_bytes > MAX_KEPT_BYTES:
            oldest = next((f for f in self.by_id.values() if f.fetched), None)
            if oldest is None:
                return
            self.forget(oldest)

    def forget(self, future: Future) -> None:
        """Drop a future and its result."""
        if self.by_id.pop(future.request_id, None) is not None and future.done.is_set():
            self._kept_bytes -= future.num_bytes

    async def poll(self, queue: tuple[str, int], after: int, timeout_s: float) -> tuple[list[Future], int]:
        """Futures of a queue that completed after the cursor `after`, and the new cursor; waits for one."""
        completed = self._completed.setdefault(queue, deque())
        while completed and completed[0][0] <= after:
            completed.popleft()
        if not completed and timeout_s > 0:
            arrived = self._arrived.setdefault(queue, asyncio.Event())
            arrived.clear()
            try:
                await asyncio.wait_for(arrived.wait(), timeout_s)
            except TimeoutError:
                return [], after
        found = [(cursor, future) for cursor, future in completed if cursor > after]
        return [future for _, future in found], max((cursor for cursor, _ in found), default=after)

    def end_group(self, group: str) -> None:
        """Cancel and drop all futures of a session."""
        for future in [f for f in self.by_id.values() if f.group == group]:
            if future.task is not None:
                future.task.cancel()
            self.close(future, None, ("its session has ended", "user"))
            self.forget(future)
            if future.queue is not None:
                for table in (self._completed, self._cursors, self._arrived):
                    table.pop(future.queue, None)
