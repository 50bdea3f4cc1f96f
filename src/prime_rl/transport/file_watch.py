"""Wait for files: notified by the operating system, with periodic re-checks as a fallback."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.to_thread

T = TypeVar("T")

RECHECK_S = 0.5  # some file systems (network mounts, containers) deliver no notifications
BLIND_RECHECK_S = 0.05
STEP_MS = 10  # polling interval of the watcher's stop flag
DEBOUNCE_MS = 20  # a burst of writes causes one notification


async def wait_for(condition: Callable[[], T | None], root: Path, *, timeout_s: float | None, what: str) -> T:
    """Wait until `condition()` is not None and return it; re-evaluated whenever something below `root` changes.

    `root` need not exist yet. Raises `TimeoutError` naming `what` after `timeout_s` seconds (None: wait forever).
    Cancelling the task ends the wait within one re-check.
    """
    stop = threading.Event()
    try:
        return await anyio.to_thread.run_sync(
            lambda: wait_for_blocking(condition, root, timeout_s=timeout_s, what=what, stop=stop),
            abandon_on_cancel=True,
        )
    finally:
        stop.set()


def wait_for_blocking(
    condition: Callable[[], T | None],
    root: Path,
    *,
    timeout_s: float | None,
    what: str,
    stop: threading.Event | None = None,
) -> T:
    """`wait_for` for threads; setting `stop` ends the wait with `InterruptedError`."""
    root = Path(root)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    stop = stop or threading.Event()
    while not stop.is_set():
        if (value := condition()) is not None:
            return value
        left = RECHECK_S if deadline is None else min(RECHECK_S, deadline - time.monotonic())
        if left <= 0:
            raise TimeoutError(f"waited {timeout_s:g} s for {what} (below {root})")
        value = _until_change(condition, root, left, stop)
        if value is not None:
            return value
    raise InterruptedError(f"stopped waiting for {what}")


def _until_change(condition: Callable[[], T | None], root: Path, seconds: float, stop: threading.Event) -> T | None:
    """Sleep until something below `root` changes, at most `seconds`.

    The condition is evaluated once more after the watch is set up, which closes the gap between check and watch.
    """
    from watchfiles._rust_notify import RustNotify, WatchfilesRustInternalError

    watched = root
    while not watched.is_dir():  # until root exists, watch its nearest parent
        watched = watched.parent
    try:
        notify = RustNotify([str(watched)], False, False, 300, watched == root, True)
    except (OSError, WatchfilesRustInternalError):
        # Out of inotify watches or instances, or the directory vanished: rely on the re-check.
        stop.wait(min(seconds, BLIND_RECHECK_S))
        return None
    with notify:
        if (value := condition()) is not None:
            return value
        if notify.watch(DEBOUNCE_MS, STEP_MS, max(1, int(seconds * 1000)), stop) == "signal":
            raise KeyboardInterrupt
    return None
