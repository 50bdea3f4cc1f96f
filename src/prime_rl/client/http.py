"""A keep-alive HTTP/1.1 connection pool for hundreds of concurrent requests to one server.

httpx spends 1-5 ms of CPU on each of them, mostly in searching its pool; this one a fraction of a millisecond.
"""

from __future__ import annotations

import asyncio
import resource
import ssl
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import urlsplit

import httptools

from rollouts.training.proxies import KEEP_ALIVE

CONNECT_TIMEOUT_S = 10.0
SPARE_FILES = 128  # reserved for logs, files and pipes
MAX_CONNECTING = 128  # concurrent connection attempts: thousands would overflow the server's accept queue

OnLine = Callable[[bytes], None]
"""Callback for one line; raises `ValueError` for an invalid one."""


class Reply(NamedTuple):
    """Status and body of a response, and the seconds of its `retry-after`."""

    status: int
    body: bytes
    retry_after_s: float | None = None


class HttpPool:
    """Connections to one server, at most `max_connections`; further requests wait for a free one.

    Cancelling a request closes its connection, so that the server can abort it.
    """

    def __init__(self, url: str, *, max_connections: int, timeout_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an address: write it like http://localhost:8000/v1")
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.timeout_s = timeout_s
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host_header = parts.netloc.rpartition("@")[2]
        self._free = asyncio.Semaphore(max_connections)
        self._connecting = asyncio.Semaphore(MAX_CONNECTING)
        self._idle: list[_Connection] = []

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        timeout_s: float = 0,
        on_line: OnLine | None = None,
    ) -> Reply:
        """Return the response with any status; raises `ConnectionError` or `TimeoutError` without one.

        `on_line` receives the lines of a chunked 200 response as they arrive; the reply then has no body.
        """
        lines = [f"{method} {path} HTTP/1.1", f"host: {self._host_header}", f"content-length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        data = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body
        async with self._free:
            try:
                async with asyncio.timeout(timeout_s or self.timeout_s):
                    return await self._send(data, on_line)
            except TimeoutError as error:
                limit = timeout_s or self.timeout_s
                raise TimeoutError(f"{self.host}:{self.port} did not answer {path} within {limit:g} s") from error

    async def close(self) -> None:
        """Close the idle connections; running requests end on their own."""
        while self._idle:
            self._idle.pop().close()

    async def _send(self, data: bytes, on_line: OnLine | None) -> Reply:
        while self._idle:
            connection = self._idle.pop()
            if connection.alive:
                try:
                    return await self._exchange(connection, data, on_line)
                except _GoneBeforeReply:  # the server closed an idle connection as it was reused
                    continue
        return await self._exchange(await self._connect(), data, on_line)

    async def _exchange(self, connection: _Connection, data: bytes, on_line: OnLine | None) -> Reply:
        try:
            reply = await connection.send(data, on_line)
        except BaseException:
            connection.close()
            raise
        if connection.alive and connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return reply

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with self._connecting, asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(_Connection, self.host, self.port, ssl=self._tls)
        except TimeoutError as error:
            raise ConnectionError(f"no connection to {self.host}:{self.port} in {CONNECT_TIMEOUT_S:g} s") from error
        except OSError as error:
            raise ConnectionError(f"no connection to {self.host}:{self.port}: {error.strerror or error}") from error
        return connection


def read_retry_after(value: str | None) -> float | None:
    """The seconds of a `retry-after` header; None without one, and for a date."""
    return float(value) if value is not None and value.isdecimal() else None


def ensure_open_files(in_flight: int) -> str | None:
    """Raise the soft limit of open files to allow a socket for each request in flight.

    Returns advice if the hard limit is too low.
    """
    needed = in_flight + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return None
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit == needed:
        return None
    return (
        f"{needed} rollouts and files may be open at once but the limit is {limit}: "
        f"run `ulimit -n {needed}` first, or set max_concurrent = {max(limit - SPARE_FILES, 1)}"
    )


class _GoneBeforeReply(ConnectionError):
    """The connection closed before the first byte of a response."""


class _Connection(asyncio.Protocol):
    """One connection with one request at a time."""

    alive = False
    reusable = True

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._reply: asyncio.Future[Reply] | None = None

    async def send(self, data: bytes, on_line: OnLine | None) -> Reply:
        assert self._transport is not None
        self._response = _Response(on_line)
        self._reply = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        return await self._reply

    def close(self) -> None:
        self.alive = False
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.alive = transport, True
        own = transport.get_extra_info("socket")
        for option in KEEP_ALIVE:
            own.setsockopt(*option)

    def connection_lost(self, exc: Exception | None) -> None:
        self.alive = False
        if self._reply is None or self._reply.done():
            return
        if self._response.status and self._response.ends_with_connection:
            self._reply.set_result(self._response.reply)
        elif self._response.has_started:
            self._reply.set_exception(ConnectionError("the server closed the connection in the middle of its answer"))
        else:
            self._reply.set_exception(_GoneBeforeReply("the server closed the connection without an answer"))

    def data_received(self, data: bytes) -> None:
        if self._reply is None or self._reply.done():
            self.close()  # data without a request
            return
        try:
            self._response.feed(data)
        except (httptools.HttpParserError, ValueError) as error:
            self._reply.set_exception(ConnectionError(f"not an HTTP answer: {error}"))
            return
        if self._response.is_complete:
            self.reusable = self._response.keep_alive
            self._reply.set_result(self._response.reply)


class _Response:
    """A response that is being received; the `on_*` methods are called by the parser."""

    def __init__(self, on_line: OnLine | None) -> None:
        self.status = 0  # until the head of the final response is complete
        self.has_started = self.is_complete = self.keep_alive = False
        self.ends_with_connection = True  # no length is given: the body ends with the connection
        self._is_chunked = False
        self._body = bytearray()  # with `on_line`, the incomplete last line
        self._retry_after_s: float | None = None
        self._on_line = on_line
        self._parser = httptools.HttpResponseParser(self)

    @property
    def reply(self) -> Reply:
        return Reply(self.status, bytes(self._body), self._retry_after_s)

    def feed(self, data: bytes) -> None:
        """Parse `data`; raises `HttpParserError`, or `ValueError` from `on_line`."""
        self.has_started = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            if not self.is_complete:
                raise
            self.keep_alive = False  # data after the response
        if self._on_line is not None and self._is_chunked and self.status == 200:
            *lines, self._body = self._body.split(b"\n")
            for line in lines:
                self._on_line(bytes(line))
            if self.is_complete:
                self._body.clear()

    def on_message_begin(self) -> None:
        if self.is_complete:  # a second response
            self.keep_alive = False

    def on_header(self, name: bytes, value: bytes) -> None:
        field = name.lower()
        if field == b"transfer-encoding" and b"chunked" in value.lower():
            self._is_chunked = True
        elif field == b"retry-after":
            self._retry_after_s = read_retry_after(value.decode("latin-1"))
        self.ends_with_connection &= not self._is_chunked and field != b"content-length"

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 and not self.is_complete:  # informational responses precede the final one
            self.status, self.keep_alive = status, self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        if not self.is_complete:
            self._body += body

    def on_message_complete(self) -> None:
        self.is_complete = self.status > 0
