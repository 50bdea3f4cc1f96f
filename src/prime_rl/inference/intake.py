"""Request intake: limits on body size, read time and total memory, and worker threads for parsing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request

from prime_rl.inference.async_engine import ClientGone
from prime_rl.inference.request_parsing import ApiError, Json, parse_body

T = TypeVar("T")
MAX_RESERVED_BYTES = 256 * 2**20
"""Limit on the total size of all bodies being received or processed."""

MIN_BYTES_PER_S = 2**16
INLINE_BYTES = 8192
"""Bodies up to this size are processed on the event loop, in about 3 ms at most."""
SMALL_BYTES = 2**17
"""Bodies above this size have their own worker thread, so that smaller ones do not wait for them."""

RESERVED = "prime_rl.reserved"
RETRY_AFTER_S = 1


@dataclass
class Reservation:
    """Memory reserved for the body of one request."""

    limit: BodyLimit
    num_bytes: int = 0

    def grow(self, num_bytes: int) -> None:
        """Reserve more; `ApiError` if the limit of the request or the total limit is exceeded."""
        self.num_bytes += num_bytes
        self.limit.reserved += num_bytes
        if self.num_bytes > self.limit.max_bytes:
            raise self.limit.too_long()
        if self.limit.reserved > max(self.limit.max_reserved, self.limit.max_bytes):
            raise ApiError("too many request bodies in flight: try again", status=503, retry_after_s=RETRY_AFTER_S)

    def release(self) -> None:
        """Release the reservation."""
        self.limit.reserved -= self.num_bytes
        self.num_bytes = 0


class BodyLimit:
    """ASGI middleware: rejects bodies that are too large (413), too slow (408), or too many at a time (503).

    A body must arrive within `read_timeout_s`, extended while it averages `MIN_BYTES_PER_S`. Received bytes count
    until the response is sent or the handler has parsed the body (`release_body`). Errors name the keys in `section`.
    """

    def __init__(
        self,
        app: Any,
        max_bytes: int,
        read_timeout_s: float,
        answer_error: Any,
        max_reserved: int = MAX_RESERVED_BYTES,
        section: str = "server",
    ) -> None:
        self.app, self.max_bytes, self.read_timeout_s, self.section = app, max_bytes, read_timeout_s, section
        self.answer_error, self.max_reserved, self.reserved = answer_error, max_reserved, 0

    def too_long(self) -> ApiError:
        """The error for a body above the limit."""
        return ApiError(f"the body exceeds {self.max_bytes} bytes ({self.section}.max_request_mb)", status=413)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        content_length = dict(scope["headers"]).get(b"content-length", b"0")
        if not content_length.isdigit() or len(content_length) > 18 or int(content_length) > self.max_bytes:
            await self.answer_error(Request(scope), self.too_long())(scope, receive, send)
            return
        reservation = scope[RESERVED] = Reservation(self)
        loop = asyncio.get_running_loop()
        start, complete, started = loop.time(), False, False

        async def limited_receive() -> Any:
            nonlocal complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout_at(start + self.read_timeout_s + reservation.num_bytes / MIN_BYTES_PER_S):
                    message = await receive()
            except TimeoutError as error:
                raise ApiError(f"the body did not arrive in time ({self.section}.read_timeout)", status=408) from error
            if message["type"] == "http.request":
                reservation.grow(len(message.get("body", b"")))
            complete = not message.get("more_body", False)
            return message

        async def tracked_send(message: Any) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, limited_receive, tracked_send)
        except ApiError as error:
            if started:
                raise
            await self.answer_error(Request(scope), error)(scope, receive, send)
        finally:
            reservation.release()


@dataclass
class Workers:
    """Worker threads for requests whose validation would block the event loop for too long.

    One for medium and one for large bodies, which bounds the memory of parsing to two requests.
    """

    _medium: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "requests"))
    _large: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "large-requests"))

    async def run(self, num_bytes: int, function: Callable[[], T]) -> T:
        """Call `function` for a body of `num_bytes`, in a thread unless the body is small."""
        if num_bytes <= INLINE_BYTES:
            return function()
        pool = self._medium if num_bytes <= SMALL_BYTES else self._large
        return await asyncio.get_running_loop().run_in_executor(pool, function)

    def close(self) -> None:
        """Shut down without waiting; queued calls are canceled."""
        for pool in (self._medium, self._large):
            pool.shutdown(wait=False, cancel_futures=True)


async def read_json(request: Request, workers: Workers, build: Callable[[Json], T]) -> T:
    """Parse the JSON body, apply `build`, and release the body's memory."""
    data = await read_body(request)
    check_json_type(request, data)
    built = await workers.run(len(data), lambda: build(parse_body(data)))
    release_body(request)
    return built


def release_body(request: Request) -> None:
    """Release the memory reserved for a body once it is parsed, before the generation, which may take minutes."""
    if RESERVED in request.scope:
        request.scope[RESERVED].release()


async def read_body(request: Request) -> bytes:
    """Read the whole body; `ClientGone` if the client disconnects first."""
    data = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        data += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(data)


def check_json_type(request: Request, data: bytes) -> None:
    """`ApiError` for a non-JSON content type, which a web page could send without a CORS preflight.

    A missing content type is accepted: browsers send `Origin` with such a request.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if data and kind not in ("", "application/json"):
        raise ApiError("send the body as JSON, with the header content-type: application/json", status=415)
