"""Training time of a run, and an estimate of what remains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

RECENT = 20
TRAINERS = ("trainer", "sft")


@dataclass(frozen=True)
class Timing:
    """Times of a run. None where the run does not show it.

    `seconds` is the training time without pauses between the attempts of a resumed run, up to the unix time `until`;
    `finish` the estimated unix time of the last step.
    """

    seconds: float = 0.0
    until: float | None = None
    finish: float | None = None


@dataclass
class Stopwatch:
    """Collects the times of one process from its metric rows."""

    _spans: dict[Any, tuple[float, float]] = field(default_factory=dict)
    _steps: dict[Any, list[tuple[int, float]]] = field(default_factory=dict)

    def add(self, attempt: Any, step: int, start: float, end: float, *, is_interval: bool) -> None:
        """Add a row of `attempt` from unix second `start` to `end`; an interval of a timeline completes no step.

        Rows after the start of a later attempt do not count: a resume may repeat the validation of a step.
        """
        if any((other or 0) > (attempt or 0) and begun <= end for other, (begun, _) in self._spans.items()):
            return
        first, last = self._spans.get(attempt, (start, end))
        self._spans[attempt] = (min(first, start), max(last, end))
        if not is_interval and step:
            steps = self._steps.setdefault(attempt, [])
            steps.append((step, end))
            del steps[: -RECENT - 1]

    def read(self, max_steps: int | None) -> Timing | None:
        """The times so far; None without rows."""
        if not self._spans:
            return None
        newest = max(self._spans, key=lambda attempt: self._spans[attempt][1])
        until = self._spans[newest][1]
        seconds = sum(last - first for first, last in self._spans.values())
        pairs = pairwise(self._steps.get(newest, ()))
        paces = [(later - earlier) / (b - a) for (a, earlier), (b, later) in pairs if b > a]
        if not paces or max_steps is None:
            return Timing(seconds, until)
        step, at = self._steps[newest][-1]
        return Timing(seconds, until, at + max(max_steps - step, 0) * median(paces))


@dataclass
class RunClock:
    """The times of a run: those of its trainer, else of its orchestrator. Evaluations may be later and do not count.

    Rows of the log of attempts tell when an attempt began that has no metrics yet.
    """

    _trainer: Stopwatch = field(default_factory=Stopwatch)
    _orchestrator: Stopwatch = field(default_factory=Stopwatch)

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row of metrics or of the log of attempts; rows of other processes and without a time are ignored."""
        process, end = row.get("process"), row.get("timestamp")
        if not isinstance(end, (int, float)) or not (process in TRAINERS or process == "orchestrator"):
            return
        watch = self._trainer if process in TRAINERS else self._orchestrator
        start, step = row.get("timeline/start"), row.get("step")
        step = int(step) if isinstance(step, (int, float)) else 0
        is_interval = start is not None or not any("/" in name for name in row)
        watch.add(row.get("attempt"), step, end if start is None else start, end, is_interval=is_interval)

    def read(self, max_steps: int | None) -> Timing:
        """The times so far."""
        limit = max_steps if isinstance(max_steps, int) else None
        return self._trainer.read(limit) or self._orchestrator.read(limit) or Timing()


def find_timing(rows: Iterable[Mapping[str, Any]], max_steps: int | None = None) -> Timing:
    """The times of a run from the rows of its log of attempts and all its metric rows."""
    clock = RunClock()
    for row in rows:
        clock.add(row)
    return clock.read(max_steps)
