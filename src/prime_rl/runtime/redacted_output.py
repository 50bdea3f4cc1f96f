"""Redacted output: streams of this process, and pipes from its child processes."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from prime_rl.runtime.redaction import load_redactor, redact

CHUNK = 1 << 16
LOG_PIPE_VARIABLE = "RL_LOG_PIPE"
"""`device:inode:log file` of the pipe that a launcher copies to the log file, like systemd's JOURNAL_STREAM."""


class StreamRedactor:
    """Redacts a byte stream; a secret may be split between reads."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, piece: bytes) -> bytes:
        """Add data; returns the part that is ready to be written."""
        done, self._pending = load_redactor().split(self._pending + piece)
        return done

    def close(self) -> bytes:
        """Return the rest."""
        rest, self._pending = self._pending, b""
        return load_redactor().redact_bytes(rest)


class RedactedStream:
    """A text stream that redacts what is written; everything else is delegated."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write the redacted `text`; returns the length of `text`."""
        self._stream.write(redact(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several pieces."""
        for line in lines:
            self.write(line)


def protect_output() -> None:
    """Redact stdout and stderr of this process, including tracebacks."""
    for name in ("stdout", "stderr"):
        if not isinstance(stream := getattr(sys, name), RedactedStream):
            setattr(sys, name, RedactedStream(stream))


@contextmanager
def plain_output() -> Iterator[None]:
    """Restore the original streams for a block, so that a library can patch them and sees only redacted text."""
    protected = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (getattr(s, "_stream", s) if isinstance(s, RedactedStream) else s for s in protected)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = protected


def copy_redacted(source: int, sink: int) -> threading.Thread:
    """Copy the pipe `source` redacted to the descriptor `sink` in a thread, which closes both at end-of-file.

    Write errors (a full disk, a closed terminal) are ignored so that the writer of the pipe does not block.
    """

    def forward(data: bytes) -> None:
        with suppress(OSError):
            while data:
                data = data[os.write(sink, data) :]

    def copy() -> None:
        stream = StreamRedactor()
        with open(source, "rb", buffering=0) as pipe, open(sink, "wb", buffering=0):
            while piece := pipe.read(CHUNK):
                forward(stream.feed(piece))
            forward(stream.close())

    thread = threading.Thread(target=copy, name="output", daemon=True)
    thread.start()
    return thread


def describe_log_pipe(fd: int, path: Path) -> str:
    """The value of `RL_LOG_PIPE` for a child process that writes to the pipe `fd`."""
    status = os.fstat(fd)
    return f"{status.st_dev}:{status.st_ino}:{path.resolve()}"


def is_log_pipe(stream: TextIO, path: Path) -> bool:
    """Whether the launcher copies `stream` to the log file `path`."""
    try:
        return os.environ.get(LOG_PIPE_VARIABLE) == describe_log_pipe(stream.fileno(), path)
    except (OSError, ValueError):  # captured output has no descriptor
        return False
