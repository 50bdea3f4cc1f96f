"""How far a long piece of work is: a bar with the time left on a terminal, now and then a line anywhere else."""

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


@dataclass
class Progress:
    """Work of which `total` pieces are known, or an unknown number; `advance` says that some are done."""

    what: str
    total: int | None = None
    done: int = 0
    lines: bool = True
    """Without a bar, say now and then in the log how far it is; off where the work says so itself."""
    bar: Callable[[int, str], None] | None = None
    _started: float = field(default_factory=lambda: time.monotonic())
    _said: float = field(default_factory=lambda: time.monotonic())
    _done_before: int = 0

    def __post_init__(self) -> None:
        self._done_before = self.done

    def advance(self, count: int = 1, note: str = "") -> None:
        """`count` more pieces are done; `note` is shown behind the bar."""
        self.reach(self.done + count, note)

    def reach(self, done: int, note: str = "") -> None:
        """This many pieces are done by now."""
        self.done = done
        if self.bar is not None:
            self.bar(done, note)
        elif self.lines and time.monotonic() - self._said > LINE_EVERY_S and done != self.total:
            self._said = time.monotonic()
            self._say(note)

    def _say(self, note: str) -> None:
        from loguru import logger

        of = f" of {self.total}" if self.total is not None else ""
        left = self.seconds_left()
        when = f", about {format_seconds(left)} left" if left is not None else ""
        logger.info(f"{self.what}: {self.done}{of}{when}{f' | {note}' if note else ''}")

    def seconds_left(self) -> float | None:
        """By the speed since the start; None before the first piece, or without a total."""
        new = self.done - self._done_before
        if self.total is None or new <= 0:
            return None
        return (time.monotonic() - self._started) / new * max(self.total - self.done, 0)


@contextmanager
def show_progress(
    what: str, total: int | None = None, done: int = 0, *, lines: bool = True, hidden: bool = False
) -> Iterator[Progress]:
    """Progress of `what` for the time of a block. What is logged or printed meanwhile goes above the bar.

    Without `lines` only a terminal shows anything, `hidden` shows nothing at all.
    """
    if hidden or not is_interactive():
        yield Progress(what, total, done, lines and not hidden)
        return
    bars = _build_bars()
    atexit.register(bars.stop)  # a block that is never left (an abandoned generator) must not keep the cursor
    try:
        with bars:
            task = bars.add_task(what, total=total, completed=done, note="")
            yield Progress(what, total, done, lines, lambda count, note: bars.update(task, completed=count, note=note))
    finally:
        atexit.unregister(bars.stop)


def _build_bars() -> Bars:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    return Bars(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        console=Console(file=sys.stdout),
        transient=True,
    )


def is_interactive() -> bool:
    """Whether somebody watches a terminal that can redraw a line: not a file, a pipe, CI or TERM=dumb."""
    return sys.stdout.isatty() and not os.environ.get("CI") and os.environ.get("TERM") != "dumb"


def format_seconds(seconds: float) -> str:
    """12 s, 3 min, 2.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
