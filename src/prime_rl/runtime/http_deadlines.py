"""uvicorn's HTTP/1.1 protocol with limits for clients that send or read slowly, or never complete a request head."""

from __future__ import annotations

import asyncio
import resource
from enum import Enum, auto
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 2**16
LINGER_S = 5.0
"""Time for the rest of a request body after the response was sent."""

MIN_READ_BYTES_PER_S = 2**14
"""Minimum read rate of a client while the server waits for it; slower clients are disconnected."""

SPARE_FILES = 128  # for weights, logs and the server's own sockets


class _Reading(Enum):
    """The next expected part on a connection."""

    HEAD = auto()
    BODY = auto()
    NOTHING = auto()  # until the response is complete or the client sends another request


def build_protocol(read_timeout_s: float) -> type[DeadlineProtocol]:
    """The protocol with `read_timeout_s` for a request head and for each progress check of a slow reader."""
    return type("BoundedProtocol", (DeadlineProtocol,), {"read_timeout_s": read_timeout_s})


class DeadlineProtocol(HttpToolsProtocol):
    """Closes connections whose client does not send a request head, or does not read the response, in time.

    The application enforces deadlines of request bodies; this class only of body data after the response.
    """

    read_timeout_s: ClassVar[float] = 20.0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._reading = _Reading.HEAD
        self._head_bytes = 0
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._unsent = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline of the first head; close the connection beyond the limit of open files."""
        super().connection_made(transport)
        if len(self.connections) > _max_connections():
            transport.abort()
            return
        self._set_deadline(self.read_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all deadlines."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        for timer in (self._timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._timer = self._write_timer = None

    def data_received(self, data: bytes) -> None:
        """Parse the data; reject a head that is too long."""
        if self._reading is _Reading.NOTHING and self._answered():
            self._start_head()
        if self._reading is _Reading.HEAD:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._reading is _Reading.HEAD and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(b"431 Request Header Fields Too Large", b"the head of the request is too long")

    def on_message_begin(self) -> None:
        """Start of a head."""
        super().on_message_begin()
        if self._reading is not _Reading.HEAD:
            self._start_head()

    def on_headers_complete(self) -> None:
        """End of a head: the application reads the body."""
        super().on_headers_complete()
        self._reading, self._head_bytes, self._deadline = _Reading.BODY, 0, None

    def on_message_complete(self) -> None:
        """End of a request."""
        super().on_message_complete()
        self._reading, self._deadline = _Reading.NOTHING, None

    def on_response_complete(self) -> None:
        """Limit the time for the rest of the request, and for the client to read the response."""
        super().on_response_complete()
        if self._reading is _Reading.BODY:
            self._set_deadline(min(LINGER_S, self.read_timeout_s))
        self._watch_writing()

    def pause_writing(self) -> None:
        """The client reads slower than the server writes."""
        super().pause_writing()
        self._watch_writing()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection and discard unread data."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def _answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _start_head(self) -> None:
        self._reading, self._head_bytes = _Reading.HEAD, 0
        self._set_deadline(self.read_timeout_s)

    def _set_deadline(self, delay_s: float) -> None:
        """Set the deadline; one timer per connection checks it, since a timer per request is too expensive."""
        now = self.loop.time()
        self._deadline = now + delay_s
        if self._timer is None or self._timer.when() > self._deadline:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self.loop.call_at(self._deadline, self._check_deadline)

    def _check_deadline(self) -> None:
        self._timer = None
        if self._deadline is None or self.transport.is_closing():
            return
        if self.loop.time() < self._deadline:
            self._timer = self.loop.call_at(self._deadline, self._check_deadline)
        elif self.flow.read_paused:  # the server itself paused reading
            self._set_deadline(self.read_timeout_s)
        elif self._reading is _Reading.HEAD and self._head_bytes and self._answered():
            self._refuse(b"408 Request Timeout", b"the head of the request did not arrive in time")
        else:
            self.transport.abort()

    def _refuse(self, status: bytes, words: bytes) -> None:
        """Send an error response outside of any request, and close."""
        body = b'{"error": {"message": "%s", "type": "invalid_request_error", "param": null, "code": %s}}' % (
            words,
            status[:3],
        )
        self.transport.write(
            b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
            % (status, len(body), body)
        )
        self._reading, self._deadline = _Reading.NOTHING, None
        self.transport.close()
        self._watch_writing()

    def _watch_writing(self) -> None:
        """Abort unless the client reads at `MIN_READ_BYTES_PER_S`."""
        self._unsent = self.transport.get_write_buffer_size()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        if self._unsent:
            self._write_timer = self.loop.call_later(self.read_timeout_s, self._check_writing)

    def _check_writing(self) -> None:
        self._write_timer = None
        before, self._unsent = self._unsent, self.transport.get_write_buffer_size()
        if not self._unsent or not (self.flow.write_paused or self._answered()):
            return
        if before - self._unsent < MIN_READ_BYTES_PER_S * self.read_timeout_s:
            self.transport.abort()
            return
        self._write_timer = self.loop.call_later(self.read_timeout_s, self._check_writing)


def _max_connections() -> int:
    """The limit of open files, less a reserve."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(soft - SPARE_FILES, soft // 2) if soft != resource.RLIM_INFINITY else 2**31
