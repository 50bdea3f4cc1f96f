"""A minimal keep-alive HTTP/1.1 connection pool that costs a fraction of a millisecond per request."""

from __future__ import annotations

import asyncio
import resource
import ssl
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

CONNECT_TIMEOUT_S = 10.0
SPARE_FILES = 128  # reserved for logs, files and pipes
MAX_CONNECTING = 128  # concurrent connection attempts: thousands would overflow the server's accept queue


OnLine = Callable[[bytes], None]
"""Callback for one line; raises `ValueError` for an invalid one."""


class Reply(NamedTuple):
    """Status and body of a response."""

    status: int
    body: bytes


class HttpPool:
    """Connections to one server, at most `max_connections`; further requests wait for a free one.

    General clients spend 1-5 ms of CPU on each of hundreds of concurrent requests, mostly in searching their pool.
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


def needs_proxy(url: str) -> bool:
    """Whether the environment (HTTP_PROXY, NO_PROXY, ...) configures a proxy for `url`."""
    parts = urlsplit(url)
    return parts.scheme in getproxies() and not proxy_bypass(parts.hostname or "")


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
        self._reset()

    def _reset(self) -> None:
        self._buffer = bytearray()
        self._status = 0  # 0: the head is not complete yet
        self._length = 0  # bytes of the body; -1: chunked; -2: everything until the end of the connection
        self._on_line: OnLine | None = None
        self._line = b""  # an incomplete line

    async def send(self, data: bytes, on_line: OnLine | None) -> Reply:
        assert self._transport is not None
        self._reset()
        self._on_line = on_line
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

    def connection_lost(self, exc: Exception | None) -> None:
        self.alive = False
        if self._reply is None or self._reply.done():
            return
        if self._status and self._length == -2:
            self._finish(bytes(self._buffer))
        elif self._status or self._buffer:
            self._reply.set_exception(ConnectionError("the server closed the connection in the middle of its answer"))
        else:
            self._reply.set_exception(_GoneBeforeReply("the server closed the connection without an answer"))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._reply is None or self._reply.done():
            return
        try:
            self._advance()
        except ValueError as error:
            self._reply.set_exception(ConnectionError(f"not an HTTP answer: {error}"))

    def _advance(self) -> None:
        while not self._status:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            self._read_head(bytes(self._buffer[:end]))
            del self._buffer[: end + 4]
        if self._length >= 0:
            if len(self._buffer) >= self._length:
                self._finish(bytes(self._buffer[: self._length]))
        elif self._length == -1 and self._on_line is not None and self._status == 200:
            self._pass_lines(self._on_line)
        elif self._length == -1 and (body := _unchunk(self._buffer)) is not None:
            self._finish(body)

    def _pass_lines(self, on_line: OnLine) -> None:
        """Pass on complete lines and buffer the rest."""
        pieces, used, ended = _read_pieces(self._buffer)
        del self._buffer[:used]
        *lines, self._line = (self._line + b"".join(pieces)).split(b"\n")
        for line in lines:
            on_line(line)
        if ended:
            self._finish(b"")

    def _read_head(self, head: bytes) -> None:
        status_line, *lines = head.decode("latin-1").split("\r\n")
        version, status = status_line.split(" ", 2)[:2]
        if not version.startswith("HTTP/1."):
            raise ValueError(status_line)
        if 100 <= int(status) < 200:  # informational responses precede the final one
            return
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self._status = int(status)
        self.reusable = version == "HTTP/1.1" and fields.get("connection", "").lower() != "close"
        if "chunked" in fields.get("transfer-encoding", "").lower():
            self._length = -1
        elif self._status in (204, 304):
            self._length = 0
        else:
            self._length = int(fields["content-length"]) if "content-length" in fields else -2

    def _finish(self, body: bytes) -> None:
        assert self._reply is not None
        self._reply.set_result(Reply(self._status, body))


def _unchunk(data: bytearray) -> bytes | None:
    """The body of a chunked response, or None while it is incomplete."""
    pieces, _, ended = _read_pieces(data)
    return b"".join(pieces) if ended else None


def _read_pieces(data: bytearray) -> tuple[list[bytes], int, bool]:
    """The complete chunks at the start of `data`, their size in bytes, and whether they end the response."""
    pieces: list[bytes] = []
    at = 0
    while (end := data.find(b"\r\n", at)) >= 0:
        size = int(bytes(data[at:end]).split(b";")[0], 16)
        start = end + 2
        if size == 0:  # trailer fields may follow; the empty line ends them
            return pieces, at, data[start : start + 2] == b"\r\n" or data.find(b"\r\n\r\n", start) >= 0
        if len(data) < start + size + 2:
            break
        pieces.append(bytes(data[start : start + size]))
        at = start + size + 2
    return pieces, at, False
