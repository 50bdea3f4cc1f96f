"""Per-process busy intervals from the timeline rows of `metrics.jsonl`, and their overlap."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Interval = tuple[float, float]


def busy_intervals(rows: Iterable[Mapping[str, Any]], process: str) -> list[Interval]:
    """Busy intervals of a process in unix seconds, sorted and merged; waits are excluded."""
    intervals = sorted(
        (row["timeline/start"], row["timeline/end"])
        for row in rows
        if row.get("process") == process and "timeline/what" in row and not row["timeline/what"].startswith("wait")
    )
    merged: list[Interval] = []
    for start, end in intervals:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def compute_overlap(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """Fraction of the run (first to last busy moment) in which trainer and engine are both busy.

    None if one of them has no timeline.
    """
    rows = list(rows)
    trainer, engine = busy_intervals(rows, "trainer"), busy_intervals(rows, "inference")
    if not trainer or not engine:
        return None
    both, i, j = 0.0, 0, 0
    while i < len(trainer) and j < len(engine):
        start, end = max(trainer[i][0], engine[j][0]), min(trainer[i][1], engine[j][1])
        both += max(0.0, end - start)
        if trainer[i][1] < engine[j][1]:
            i += 1
        else:
            j += 1
    span = max(trainer[-1][1], engine[-1][1]) - min(trainer[0][0], engine[0][0])
    return both / span
