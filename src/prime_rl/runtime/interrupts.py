"""Ctrl-C (SIGINT) and SIGTERM end a command with one line and exit code 130 or 143, from the moment that it parses
its arguments.

Python's own handler raises `KeyboardInterrupt` at an arbitrary instruction. While a module is imported, callbacks and C
extensions lose that exception or wrap it in another one, so the process exits at once instead. Where a destructor
loses it, the signal comes again. Only the standard library is imported here: `python -m prime_rl` installs the handlers
before anything else.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

LINE = "Interrupted"
SUDDEN_END: list[Callable[[], None]] = []
"""Called before an exit without unwinding, which runs no `finally`."""
_received: list[int] = []
_unwinding: list[bool] = []
"""Non-empty inside `unwind_on_signals`."""
AGAIN_S = 0.02
"""After which a swallowed signal comes again."""


def end_on_signals() -> None:
    """Install the handlers; a signal that the caller ignores (nohup, a background job of a script) stays ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _pass_to_interrupt)
    sys.unraisablehook = _send_again


@contextmanager
def unwind_on_signals() -> Iterator[None]:
    """Raise `KeyboardInterrupt` for a signal inside the block, unless a module is being imported."""
    _unwinding.append(True)
    try:
        yield
    finally:
        _unwinding.pop()


@contextmanager
def cancel_on_signals() -> Iterator[None]:
    """Let `asyncio.run` in this block cancel its task for a signal: it does so only in place of Python's handler."""
    if signal.getsignal(signal.SIGINT) is not _end:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _end)


def report_interrupt(stop: KeyboardInterrupt) -> int:
    """Print the message of `stop`, or one line; returns the exit code: 128 and the number of the first signal."""
    sys.stderr.write(f"{str(stop) or LINE}\n")
    return _exit_code()


def was_interrupted() -> bool:
    """Whether one of the handlers has received a signal."""
    return bool(_received)


def _end(number: int, frame: FrameType | None) -> None:
    _received.append(number)
    if _unwinding and not _imports(frame):
        raise KeyboardInterrupt
    for action in reversed(SUDDEN_END):
        with suppress(Exception):
            action()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os.write(2, f"{LINE}\n".encode())
    os._exit(_exit_code())


def _exit_code() -> int:
    return 128 + (_received[0] if _received else signal.SIGINT)


def _pass_to_interrupt(number: int, frame: FrameType | None) -> None:
    """Do what Ctrl-C does now, with the exit code of this signal."""
    _received.append(number)
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):
        handler = _end
    handler(signal.SIGINT, frame)


def _send_again(unraisable: sys.UnraisableHookArgs) -> None:
    """Python's own hook, but an interrupt that a destructor or a callback of C code swallows comes again."""
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
        return
    from threading import Thread

    Thread(target=_wait_and_send, name="interrupt", daemon=True).start()


def _wait_and_send() -> None:
    """Send the signal once the main thread has left the hook, which would swallow it again."""
    import threading

    def is_in_hook() -> bool:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None and frame.f_code is not _send_again.__code__:
            frame = frame.f_back
        return frame is not None

    time.sleep(AGAIN_S)
    while is_in_hook():
        time.sleep(AGAIN_S)
    os.kill(os.getpid(), signal.SIGINT)


def _imports(frame: FrameType | None) -> bool:
    """Whether a module is being imported below `frame`."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
