"""Progress of long operations: a bar with the remaining time on a terminal, periodic log lines elsewhere."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from loguru import logger

LINE_EVERY_S = 30.0
RATE_PERIOD_S = 1800.0
"""The remaining time follows from the mean rate of this period (at most 1000 updates), from the first update on."""


class Progress:
    """Progress of `total` (None: unknown) items: a bar if `bar`, else a log line every 30 s if `lines`."""

    def __init__(
        self, what: str, total: int | None = None, done: int = 0, *, lines: bool = True, bar: bool = False
    ) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        self.bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=Console(file=sys.stdout),
            transient=True,
            speed_estimate_period=RATE_PERIOD_S,
            get_time=time.monotonic,
            disable=not bar,
        )
        self.bars.add_task(what, total=total, completed=done, note="")
        [self._task] = self.bars.tasks
        self.what, self.total, self._lines = what, total, lines and not bar
        self._logged_at = time.monotonic()

    @property
    def done(self) -> int:
        """Number of finished items."""
        return int(self._task.completed)

    @property
    def has_bar(self) -> bool:
        """Whether a bar with the remaining time is shown."""
        return not self.bars.disable

    def advance(self, count: int = 1, note: str = "") -> None:
        """Count `count` more finished items; `note` is shown after the bar."""
        self.set_done(self.done + count, note)

    def set_done(self, done: int, note: str = "") -> None:
        """Set the number of finished items."""
        self.bars.update(self._task.id, completed=done, note=note)
        if self._lines and time.monotonic() - self._logged_at > LINE_EVERY_S and done != self.total:
            self._logged_at = time.monotonic()
            of = "" if self.total is None else f" of {self.total}"
            left = self._task.time_remaining
            when = "" if left is None else f", about {format_seconds(left)} left"
            logger.info(f"{self.what}: {done}{of}{when}{f' | {note}' if note else ''}")


@contextmanager
def show_progress(
    what: str, total: int | None = None, done: int = 0, *, lines: bool = True, hidden: bool = False
) -> Iterator[Progress]:
    """Show the progress of `what` during a block; other output appears above the bar.

    Without `lines` progress is shown only on a terminal, with `hidden` not at all.
    """
    progress = Progress(what, total, done, lines=lines and not hidden, bar=not hidden and is_interactive())
    atexit.register(progress.bars.stop)  # restore the cursor even if the block is never left (an abandoned generator)
    try:
        with progress.bars:
            yield progress
    finally:
        atexit.unregister(progress.bars.stop)


def is_interactive() -> bool:
    """Whether stdout is a terminal that can redraw a line: not a file, a pipe, CI or TERM=dumb."""
    return sys.stdout.isatty() and not os.environ.get("CI") and os.environ.get("TERM") != "dumb"


def format_seconds(seconds: float) -> str:
    """12 s, 3 min, 2.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
