"""Progress of long operations: a bar with the remaining time on a terminal, periodic log lines elsewhere."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

LINE_EVERY_S = 30.0
MIN_INTERVALS = 3
"""Intervals between finished items before the remaining time is estimated."""

MARK_EVERY_S = 0.05
"""Items that finish closer together count as one interval."""

RECENT_INTERVALS, RECENT_S = 20, 60.0
"""The estimate uses at least this many intervals and this time span: concurrent items finish in bursts."""


@dataclass
class Progress:
    """Progress of `total` (None: unknown) items; `advance` counts finished ones."""

    what: str
    total: int | None = None
    done: int = 0
    lines: bool = True
    """Without a bar, log progress periodically; off if the caller logs it itself."""
    bar: Callable[[int, str, str], None] | None = None
    """Updates the bar: number of items, note, remaining time."""
    _marks: list[tuple[float, int]] = field(default_factory=list)
    """Time and item count of recent updates."""
    _logged_at: float = field(default_factory=lambda: time.monotonic())

    def advance(self, count: int = 1, note: str = "") -> None:
        """Count `count` more finished items; `note` is shown after the bar."""
        self.set_done(self.done + count, note)

    def set_done(self, done: int, note: str = "") -> None:
        """Set the number of finished items."""
        if done > self.done:
            self._mark(done)
        self.done = done
        if self.bar is not None:
            left = self.seconds_left()
            self.bar(done, note, "" if left is None else f"{format_seconds(left)} left")
        elif self.lines and time.monotonic() - self._logged_at > LINE_EVERY_S and done != self.total:
            self._logged_at = time.monotonic()
            self._log(note)

    def _log(self, note: str) -> None:
        from loguru import logger

        of = f" of {self.total}" if self.total is not None else ""
        left = self.seconds_left()
        when = f", about {format_seconds(left)} left" if left is not None else ""
        logger.info(f"{self.what}: {self.done}{of}{when}{f' | {note}' if note else ''}")

    def seconds_left(self) -> float | None:
        """Estimate from the recent rate; None without a total or with too few measurements.

        Measured from the first item finished here, which excludes start-up and resumed items.
        """
        if self.total is None or len(self._marks) <= MIN_INTERVALS:
            return None
        (start, first), (end, last) = self._marks[0], self._marks[-1]
        return (end - start) / (last - first) * max(self.total - self.done, 0)

    def _mark(self, done: int) -> None:
        now = time.monotonic()
        if len(self._marks) > 1 and now - self._marks[-2][0] < MARK_EVERY_S:
            del self._marks[-1]
        self._marks.append((now, done))
        while len(self._marks) > RECENT_INTERVALS + 1 and self._marks[1][0] < now - RECENT_S:
            del self._marks[0]


@contextmanager
def show_progress(
    what: str, total: int | None = None, done: int = 0, *, lines: bool = True, hidden: bool = False
) -> Iterator[Progress]:
    """Show the progress of `what` during a block; other output appears above the bar.

    Without `lines` progress is shown only on a terminal, with `hidden` not at all.
    """
    if hidden or not is_interactive():
        yield Progress(what, total, done, lines and not hidden)
        return
    bars = _build_bars()
    atexit.register(bars.stop)  # restore the cursor even if the block is never left (an abandoned generator)
    try:
        with bars:
            task = bars.add_task(what, total=total, completed=done, note="", left="")

            def update(count: int, note: str, left: str) -> None:
                bars.update(task, completed=count, note=note, left=left)

            yield Progress(what, total, done, lines, update)
    finally:
        atexit.unregister(bars.stop)


def _build_bars() -> Bars:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    return Bars(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        TextColumn("{task.fields[note]}", markup=False),
        console=Console(file=sys.stdout),
        transient=True,
    )


def is_interactive() -> bool:
    """Whether stdout is a terminal that can redraw a line: not a file, a pipe, CI or TERM=dumb."""
    return sys.stdout.isatty() and not os.environ.get("CI") and os.environ.get("TERM") != "dumb"


def format_seconds(seconds: float) -> str:
    """12 s, 3 min, 2.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
