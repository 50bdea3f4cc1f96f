"""Slow readers: unread responses are dropped, and streams do not accumulate."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn
from running_server import DEADLINE_S, wait_until

from prime_rl.inference import async_engine
from prime_rl.inference.async_engine import AsyncEngine, ReaderTooSlow
from prime_rl.inference.engine import Event, GenerationRequest, Output, SamplingParams, StreamUpdate
from prime_rl.runtime.http_deadlines import build_protocol

PIECE = b"x" * 2**20


class App:
    """Answers with 64 MB at once, or in pieces; `open` answers are not finished."""

    def __init__(self) -> None:
        self.open = 0
        self.sent = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.open += 1
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            if scope["path"] == "/whole":
                await send({"type": "http.response.body", "body": PIECE * 64})
                return
            for _ in range(64):
                await send({"type": "http.response.body", "body": PIECE, "more_body": True})
                self.sent += 1
            await send({"type": "http.response.body", "body": b""})
        finally:
            self.open -= 1


@pytest.fixture
def running() -> Iterator[tuple[App, uvicorn.Server, int]]:
    app = App()
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, http=build_protocol(0.3), lifespan="off", log_level="critical", log_config=None)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    yield app, server, listener.getsockname()[1]
    server.should_exit = True
    thread.join(DEADLINE_S)


@pytest.mark.parametrize("path", ["/whole", "/pieces"])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_an_unread_response_is_dropped(running: tuple[App, uvicorn.Server, int], path: str, version: str) -> None:
    app, server, port = running
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as raw:
        raw.sendall(f"GET {path} HTTP/{version}\r\nhost: localhost\r\n\r\n".encode())
        wait_until(lambda: bool(server.server_state.connections), "the connection")
        wait_until(lambda: not server.server_state.connections, "the connection to be closed")
        wait_until(lambda: app.open == 0, "the application to end")


def test_a_slowly_read_response_is_sent_completely(running: tuple[App, uvicorn.Server, int]) -> None:
    _, _, port = running
    received, start = 0, time.monotonic()
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as raw:
        raw.sendall(b"GET /pieces HTTP/1.0\r\n\r\n")
        while data := raw.recv(2**21):  # at least 15 pauses
            received += len(data)
            if received < 2**25:
                time.sleep(0.03)
    assert received > 64 * 2**20 and time.monotonic() - start > 0.3


def build_engine() -> tuple[AsyncEngine, list[GenerationRequest]]:
    """An engine whose events the test delivers, and its requests that were not cancelled."""
    engine = AsyncEngine.__new__(AsyncEngine)
    held: list[GenerationRequest] = []

    class Thread:
        submit = staticmethod(held.append)
        cancel = staticmethod(held.remove)

    engine.error, engine.max_requests, engine.stopping = None, None, False
    engine._listeners, engine._thread = {}, Thread()  # type: ignore[assignment]
    return engine, held


def test_an_unread_stream_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_engine, "MAX_BACKLOG", 100)
    request = GenerationRequest([1], SamplingParams(1000), True)

    def progress(i: int) -> Event:
        return StreamUpdate(request, i, [5], [-1.0], [[(5, -1.0)] * 9])

    async def read(deliver: Callable[[AsyncEngine], None]) -> int:
        engine, held = build_engine()
        batches = engine.batches([request])
        first = asyncio.create_task(anext(batches))
        await asyncio.sleep(0)
        engine._dispatch([progress(0)])
        count = len(await first)
        deliver(engine)
        with contextlib.suppress(StopAsyncIteration):
            async for events in batches:
                count += len(events)
        assert (not held and not engine._listeners) or count == 9
        return count

    def good(engine: AsyncEngine) -> None:
        engine._dispatch([*map(progress, range(1, 8)), Output(request, [5] * 8, [], [], [], "length")])

    assert asyncio.run(read(good)) == 9
    with pytest.raises(ReaderTooSlow, match="read faster"):
        asyncio.run(read(lambda engine: engine._dispatch([progress(i) for i in range(1, 1000)])))
