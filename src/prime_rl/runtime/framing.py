"""Length-prefixed messages over a socket between two processes of a run."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable

_HEAD = struct.Struct("<Q")
_CHUNK = 1 << 20


def send_frame(sock: socket.socket, payload: bytes) -> None:
    """Send one message (blocking)."""
    sock.sendall(_HEAD.pack(len(payload)) + payload)


def receive_frame(sock: socket.socket) -> bytes:
    """Receive the next message (blocking); raises `EOFError` if the peer closed the connection."""
    return _receive_exactly(sock, _HEAD.unpack(_receive_exactly(sock, _HEAD.size))[0])


def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(min(size - len(data), _CHUNK))
        if not piece:
            raise EOFError("the other process closed the connection")
        data += piece
    return bytes(data)


class FrameChannel:
    """Messages in an event loop: `on_frame` is called per message, `on_close` once when the peer disconnects."""

    def __init__(self, sock: socket.socket, on_frame: Callable[[bytes], None], on_close: Callable[[], None]) -> None:
        sock.setblocking(False)
        self._sock, self._on_frame, self._on_close = sock, on_frame, on_close
        self._incoming, self._outgoing = bytearray(), bytearray()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_writing = False

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Register the socket with this loop."""
        if loop is self._loop:
            return
        self._loop, self._is_writing = loop, False
        loop.add_reader(self._sock, self._read)
        self._write()

    def send(self, payload: bytes) -> None:
        """Send a message; buffer what the socket does not accept immediately."""
        self._outgoing += _HEAD.pack(len(payload)) + payload
        if not self._is_writing:
            self._write()

    def close(self) -> None:
        """Close the socket; the peer reads end-of-file."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
        self._loop = None
        self._sock.close()

    def _read(self) -> None:
        try:
            piece = self._sock.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if not piece:
            self.close()
            self._on_close()
            return
        self._incoming += piece
        for frame in self._pop_frames():
            self._on_frame(frame)

    def _pop_frames(self) -> list[bytes]:
        frames, at = [], 0
        while len(self._incoming) - at >= _HEAD.size:
            start = at + _HEAD.size
            end = start + _HEAD.unpack_from(self._incoming, at)[0]
            if len(self._incoming) < end:
                break
            frames.append(bytes(self._incoming[start:end]))
            at = end
        del self._incoming[:at]
        return frames

    def _write(self) -> None:
        if self._loop is None:
            return
        with contextlib.suppress(BlockingIOError):
            while self._outgoing:
                try:
                    sent = self._sock.send(self._outgoing[:_CHUNK])
                except BlockingIOError:
                    raise
                except OSError:  # the peer disconnected: the reader handles it
                    self._outgoing.clear()
                    break
                del self._outgoing[:sent]
        if bool(self._outgoing) == self._is_writing:
            return
        self._is_writing = bool(self._outgoing)
        if self._is_writing:
            self._loop.add_writer(self._sock, self._write)
        else:
            self._loop.remove_writer(self._sock)
