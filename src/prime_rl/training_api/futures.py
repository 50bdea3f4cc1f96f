"""Futures: requests that clients wait for. Results go to the request log, so that memory holds unfinished ones only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import orjson
from loguru import logger

from prime_rl.training_api.execution import Result
from prime_rl.training_api.request_log import ROW_BYTES, RequestLog

CLONE = 1_000_000_000
"""Clones of a sampling client number their requests from multiples of this."""


@dataclass(eq=False)
class Future:
    """One unfinished request."""

    request_id: str
    owner: str
    session_id: str
    target: str
    """Model or sampling session."""
    seq_id: int
    num_bytes: int
    """Size of the request."""
    kind: str = "asample"
    opened: float = field(default_factory=time.monotonic)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class Futures:
    """All unfinished requests of the server, by request id."""

    def __init__(self, log: RequestLog, observe: Callable[[Future, bytes | None], None]) -> None:
        self.by_id: dict[str, Future] = {}
        self.num_bytes = 0
        """Size of the unfinished requests."""
        self.num_result_bytes = 0
        """Size of the results since they were last trimmed."""
        self.fetched: list[str] = []
        """Results that were sent since the last cleanup; after a kill they count as not fetched."""
        self._log, self._observe = log, observe
        self._cursor = log.num_starts << 32

    def open(self, future: Future) -> None:
        """Register a future."""
        assert future.request_id not in self.by_id
        self.by_id[future.request_id] = future
        self.num_bytes += future.num_bytes

    async def run(self, future: Future, work: Callable[[], Awaitable[Result]]) -> None:
        """Complete a future with the result of `work`."""
        try:
            self.finish(future, await work())
        except asyncio.CancelledError:
            self.fail(future, ValueError("the request was canceled"))
            raise
        except Exception as error:
            self.fail(future, error)

    def finish(self, future: Future, result: Result, *, keep_request: bool = False) -> None:
        """Complete a future; its request is kept if it is replayed after a restart."""
        is_json = not isinstance(result, bytes)
        self._close(future, is_json, orjson.dumps(result) if is_json else result, None, None, keep_request)

    def fail(self, future: Future, error: Exception) -> None:
        """Fail a future: a `ValueError` is the client's, any other error the server's."""
        if isinstance(error, ValueError):
            self._close(future, True, None, str(error), "user", False)
        else:
            logger.opt(exception=error).error(f"{future.request_id} failed")
            self._close(future, True, None, f"{type(error).__name__}: {error}", "server", False)

    def _close(self, future: Future, is_json: bool, payload: Any, error: Any, category: Any, keep: bool) -> None:
        if self.by_id.get(future.request_id) is not future:  # it was canceled
            return
        self._forget(future)
        self._observe(future, payload if error is None else None)
        self._cursor += 1
        self.num_result_bytes += ROW_BYTES + len(payload or b"")
        self._log.put(
            "INSERT OR REPLACE INTO results VALUES (?, ?, ?, ?, ?, ?, 0, ?, ?, ?, ?)",
            future.request_id, future.session_id, future.owner, future.target, future.seq_id // CLONE, self._cursor,
            is_json, payload, error, category,
        )  # fmt: skip
        if not keep:
            self._log.remove_request(future.request_id)

    def _forget(self, future: Future) -> None:
        del self.by_id[future.request_id]
        self.num_bytes -= future.num_bytes
        future.done.set()

    def cancel(self, is_canceled: Callable[[Future], bool]) -> list[asyncio.Task[None]]:
        """Drop futures without a result, and cancel their tasks, which are returned."""
        dropped = [future for future in self.by_id.values() if is_canceled(future)]
        tasks = [future.task for future in dropped if future.task is not None]
        for future in dropped:
            self._forget(future)
        for task in tasks:
            task.cancel()
        return tasks
