"""Asyncio interface to an engine: awaitable completions, streams, and cancellation on client disconnect."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import aclosing
from typing import Any, TypeVar

from prime_rl.inference.engine import (
    BusyIntervalLogger,
    EngineFailed,
    EngineThread,
    Event,
    GenerationEngine,
    GenerationRequest,
    IntervalLog,
    Output,
)

T = TypeVar("T")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Listener = Callable[[Event | BaseException], None]
MAX_BACKLOG = 2**18
"""Maximum number of buffered log-probs per stream, about 25 MB."""


class ClientGone(Exception):
    """The client disconnected before its response was ready."""


class EngineBusy(Exception):
    """The request queue is full; the client should retry."""


class EngineStopping(EngineFailed):
    """The server stops; the client should retry with another, or after its restart."""

    def __init__(self) -> None:
        super().__init__("the server is stopping")


class ReaderTooSlow(Exception):
    """The client reads a stream so slowly that its buffer is full."""


class AsyncEngine:
    """One engine in its thread, used from one event loop (the one that calls `start`)."""

    def __init__(
        self, engine: GenerationEngine, log: IntervalLog | None = None, max_requests: int | None = None
    ) -> None:
        self.engine = engine  # owned by the engine thread: only plain numeric attributes may be read here
        self.max_requests = max_requests
        self.error: BaseException | None = None
        self.stopping = False
        self.on_failure: Callable[[], None] = lambda: None
        self._thread = EngineThread(engine, self.deliver, self._fail, BusyIntervalLogger(log))
        self._listeners: dict[GenerationRequest, Listener] = {}

    def start(self) -> None:
        """Start the thread; call inside the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self._thread.close()

    def refuse(self) -> int:
        """Fail unfinished requests and all later ones with `EngineStopping`; returns the number of unfinished ones."""
        self.stopping = True
        requests, listeners = list(self._listeners), set(self._listeners.values())
        self._cancel(requests)
        for listener in listeners:
            listener(EngineStopping())
        return len(requests)

    async def call(self, function: Callable[[GenerationEngine], T]) -> T:
        """Run `function` on the engine between two of its steps."""
        self._check()
        return await asyncio.wrap_future(self._thread.call(function))

    def deliver(self, events: list[Event]) -> None:
        """Pass events of the engine to its requests; called in the engine thread."""
        self._loop.call_soon_threadsafe(self._dispatch, events)

    async def remove_adapter(self, name: str) -> None:
        """Unload an adapter and abort its requests, also while generation is paused."""
        await self.call(lambda engine: self.deliver(engine.remove_adapter(name)))

    @property
    def num_requests(self) -> int:
        """Number of unfinished requests."""
        return len(self._listeners)

    @property
    def paused(self) -> bool:
        """Whether generation is paused."""
        return self._thread.paused

    async def pause(self, abort: bool = False) -> None:
        """Pause generation until `resume`; running requests are kept, or aborted with `abort`."""
        self._check()
        await asyncio.wrap_future(self._thread.pause(abort))

    async def resume(self) -> None:
        """Resume after `pause`."""
        self._check()
        await asyncio.wrap_future(self._thread.resume())

    def check(self, requests: list[GenerationRequest]) -> None:
        """Validate before responding: `ValueError` for unsupported requests, `EngineBusy` if the queue is full.

        `stream` and `batches` check the queue again, since concurrent requests may have filled it.
        """
        for request in requests:
            self.engine.check(request)
        self._check_capacity(len(requests))

    def _check_capacity(self, num_requests: int) -> None:
        if self.max_requests is not None and len(self._listeners) + num_requests > self.max_requests:
            raise EngineBusy(f"{len(self._listeners)} requests are running or queued: try again")

    async def generate(self, requests: list[GenerationRequest], receive: Receive | None = None) -> list[Output]:
        """Return the outputs of `requests`, in order.

        With ASGI's `receive`, a client disconnect cancels the requests and raises `ClientGone`.
        """
        done: asyncio.Future[None] = self._loop.create_future()
        outputs: dict[GenerationRequest, Output] = {}

        def on_event(event: Event | BaseException) -> None:
            if done.done():
                return
            if isinstance(event, BaseException):
                done.set_exception(event)
            elif isinstance(event, Output):
                outputs[event.request] = event
                if len(outputs) == len(requests):
                    done.set_result(None)

        watcher = None if receive is None else self._loop.create_task(_wait_for_disconnect(receive, done))
        try:
            self._submit(requests, on_event)
            await done
        finally:
            if watcher is not None:
                watcher.cancel()
            self._cancel(requests)
        return [outputs[request] for request in requests]

    async def stream(self, requests: list[GenerationRequest]) -> AsyncIterator[Event]:
        """Yield the events of `requests` until all have finished; leaving the loop early cancels the rest."""
        async with aclosing(self.batches(requests)) as batches:
            async for events in batches:
                for event in events:
                    yield event

    async def batches(self, requests: list[GenerationRequest]) -> AsyncGenerator[list[Event]]:
        """Like `stream`, but yield all available events (usually those of one engine step) as a list."""
        queue: asyncio.Queue[Event | BaseException] = asyncio.Queue()
        remaining = len(requests)
        backlog: float = 0

        def on_event(event: Event | BaseException) -> None:
            nonlocal backlog
            backlog += 0 if isinstance(event, BaseException) else _count_entries(event)
            if backlog <= MAX_BACKLOG:
                queue.put_nowait(event)
            elif backlog < math.inf:
                backlog = math.inf  # drops all further events
                self._cancel(requests)
                queue.put_nowait(ReaderTooSlow(f"stream buffer full ({MAX_BACKLOG} log-probs): read faster"))

        try:
            self._submit(requests, on_event)
            while remaining:
                events = [await queue.get()]
                while not queue.empty():
                    events.append(queue.get_nowait())
                backlog = 0 if backlog <= MAX_BACKLOG else backlog
                received = [event for event in events if not isinstance(event, BaseException)]
                remaining -= sum(isinstance(event, Output) for event in received)
                if received:
                    yield received
                if isinstance(events[-1], BaseException):  # an error is always the last event
                    raise events[-1]
        finally:
            self._cancel(requests)

    def _submit(self, requests: list[GenerationRequest], listener: Listener) -> None:
        self._check()
        self._check_capacity(len(requests))
        for request in requests:
            self._listeners[request] = listener
            self._thread.submit(request)

    def _cancel(self, requests: list[GenerationRequest]) -> None:
        """Cancel unfinished requests."""
        for request in requests:
            if self._listeners.pop(request, None) is not None and self.error is None:
                self._thread.cancel(request)

    def _check(self) -> None:
        if self.stopping:
            raise EngineStopping
        if self.error is not None:
            raise EngineFailed(f"engine failed: {self.error}") from self.error

    def _dispatch(self, events: list[Event]) -> None:
        for event in events:
            finished = isinstance(event, Output)
            listener = self._listeners.pop(event.request, None) if finished else self._listeners.get(event.request)
            if listener is not None:
                listener(event)

    def _fail(self, error: BaseException) -> None:
        self.error = error
        self._loop.call_soon_threadsafe(self._notify_failure, error)

    def _notify_failure(self, error: BaseException) -> None:
        listeners, self._listeners = self._listeners, {}
        for listener in set(listeners.values()):
            listener(EngineFailed(f"engine failed: {error}"))
        self.on_failure()


def _count_entries(event: Event) -> int:
    """Number of log-probs in an event."""
    if isinstance(event, Output):  # only its last tokens have not been streamed
        return 0
    return len(event.token_ids) + sum(map(len, event.top_logprobs))


async def _wait_for_disconnect(receive: Receive, done: asyncio.Future[None]) -> None:
    """Fail `done` with `ClientGone` when the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
    if not done.done():
        done.set_exception(ClientGone())
