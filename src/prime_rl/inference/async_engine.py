"""The engine as coroutines see it: answers to await, streams to iterate, and requests dropped with their client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import aclosing
from typing import Any, TypeVar

from prime_rl.inference.engine import BusyClock, Engine, EngineThread, Event, GenerationRequest, IntervalLog, Output

T = TypeVar("T")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Listener = Callable[[Event | BaseException], None]


class ClientGone(Exception):
    """The client has left before its answer was ready."""


class EngineBusy(Exception):
    """As many requests wait as may; the client should come back in a moment."""


class EngineFailed(RuntimeError):
    """The engine stopped with an error; nothing will be answered any more."""


class AsyncEngine:
    """One engine in its thread, used from one event loop (the one that calls `start`)."""

    def __init__(self, engine: Engine, log: IntervalLog | None = None, max_requests: int | None = None) -> None:
        self.engine = engine  # only attributes that are plain numbers may be read here
        self.max_requests = max_requests
        self.error: BaseException | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self._thread = EngineThread(engine, self._hear, self._fail, BusyClock(log))
        self._listeners: dict[GenerationRequest, Listener] = {}

    def start(self) -> None:
        """Start the thread; call it inside the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self._thread.close()

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Run `function` on the engine between two of its steps."""
        self._check()
        return await asyncio.wrap_future(self._thread.call(function))

    @property
    def num_requests(self) -> int:
        """Requests that are not answered yet."""
        return len(self._listeners)

    @property
    def paused(self) -> bool:
        """True while no token is drawn."""
        return self._thread.paused

    async def pause(self, abort: bool = False) -> None:
        """Draw nothing until `resume`; running requests keep their place, or end at once with `abort`."""
        self._check()
        await asyncio.wrap_future(self._thread.pause(abort))

    async def resume(self) -> None:
        """Go on after `pause`."""
        self._check()
        await asyncio.wrap_future(self._thread.resume())

    def check(self, requests: list[GenerationRequest]) -> None:
        """Before anything is answered: `ValueError` for what the engine cannot do, `EngineBusy` when it is full.

        Of several streams that pass at the same time, `stream` and `batches` still refuse the last ones so.
        """
        for request in requests:
            self.engine.check(request)
        self._check_room(len(requests))

    def _check_room(self, num_requests: int) -> None:
        if self.max_requests is not None and len(self._listeners) + num_requests > self.max_requests:
            raise EngineBusy(f"{len(self._listeners)} requests are running or waiting: try again in a moment")

    async def generate(self, requests: list[GenerationRequest], receive: Receive | None = None) -> list[Output]:
        """The outputs of `requests`, in their order.

        With `receive` (of ASGI) the client is watched: when it goes, its requests are cancelled, `ClientGone` raised.
        """
        done: asyncio.Future[None] = self._loop.create_future()
        outputs: dict[GenerationRequest, Output] = {}

        def hear(event: Event | BaseException) -> None:
            if done.done():
                return
            if isinstance(event, BaseException):
                done.set_exception(event)
            elif isinstance(event, Output):
                outputs[event.request] = event
                if len(outputs) == len(requests):
                    done.set_result(None)

        watcher = None if receive is None else self._loop.create_task(_wait_gone(receive, done))
        try:
            self._submit(requests, hear)
            await done
        finally:
            if watcher is not None:
                watcher.cancel()
            self._cancel(requests)
        return [outputs[request] for request in requests]

    async def stream(self, requests: list[GenerationRequest]) -> AsyncIterator[Event]:
        """Events of `requests` as they come, until each has ended; leaving the loop early cancels the rest."""
        async with aclosing(self.batches(requests)) as batches:
            async for events in batches:
                for event in events:
                    yield event

    async def batches(self, requests: list[GenerationRequest]) -> AsyncGenerator[list[Event]]:
        """The same, those that are there together: what a step of the engine drew."""
        queue: asyncio.Queue[Event | BaseException] = asyncio.Queue()
        left = len(requests)
        try:
            self._submit(requests, queue.put_nowait)
            while left:
                events = [await queue.get()]
                while not queue.empty():
                    events.append(queue.get_nowait())
                good = [event for event in events if not isinstance(event, BaseException)]
                left -= sum(isinstance(event, Output) for event in good)
                if good:
                    yield good
                if isinstance(events[-1], BaseException):  # nothing comes after a failure
                    raise events[-1]
        finally:
            self._cancel(requests)

    def _submit(self, requests: list[GenerationRequest], listener: Listener) -> None:
        self._check()
        self._check_room(len(requests))
        for request in requests:
            self._listeners[request] = listener
            self._thread.submit(request)

    def _cancel(self, requests: list[GenerationRequest]) -> None:
        """Forget those that have not finished."""
        for request in requests:
            if self._listeners.pop(request, None) is not None and self.error is None:
                self._thread.cancel(request)

    def _check(self) -> None:
        if self.error is not None:
            raise EngineFailed(f"the engine has failed: {self.error}") from self.error

    def _hear(self, events: list[Event]) -> None:
        self._loop.call_soon_threadsafe(self._dispatch, events)

    def _dispatch(self, events: list[Event]) -> None:
        for event in events:
            finished = isinstance(event, Output)
            listener = self._listeners.pop(event.request, None) if finished else self._listeners.get(event.request)
            if listener is not None:
                listener(event)

    def _fail(self, error: BaseException) -> None:
        self.error = error
        self._loop.call_soon_threadsafe(self._tell_failure, error)

    def _tell_failure(self, error: BaseException) -> None:
        listeners, self._listeners = self._listeners, {}
        for listener in set(listeners.values()):
            listener(EngineFailed(f"the engine has failed: {error}"))
        self.on_failure()


async def _wait_gone(receive: Receive, done: asyncio.Future[None]) -> None:
    """Break off `done` when the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
    if not done.done():
        done.set_exception(ClientGone())
