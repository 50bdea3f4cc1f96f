"""Who was busy when: the timeline rows of `metrics.jsonl` as intervals, and how far two processes overlapped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Interval = tuple[float, float]


def busy_intervals(rows: Iterable[Mapping[str, Any]], process: str) -> list[Interval]:
    """When a process computed, in unix seconds, in order and merged; waiting is not computing."""
    found = sorted(
        (row["timeline/start"], row["timeline/end"])
        for row in rows
        if row.get("process") == process and "timeline/what" in row and not row["timeline/what"].startswith("wait")
    )
    merged: list[Interval] = []
    for start, end in found:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def compute_overlap(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """Share of the run, from the first to the last busy moment, in which trainer and engine are both busy.

    None when one of them left no timeline.
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
