"""Rows of metrics as series over steps, whichever process logged them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Series = list[tuple[int, float]]
Row = Mapping[str, Any]

PREFERRED = ("trainer", "sft", "orchestrator", "inference")
"""Several processes log `time/step` and `perf/throughput`: a bare name means the first of these that has it."""

_NOT_METRICS = ("step", "timestamp", "process")


def read_series(rows: Iterable[Row]) -> dict[str, dict[str, Series]]:
    """Process -> metric -> (step, value) in order of steps; of a step that was logged twice the last counts."""
    table: dict[str, dict[str, dict[int, float]]] = {}
    for row in rows:
        step = row.get("step")
        if not isinstance(step, (int, float)) or "timeline/what" in row:
            continue
        metrics = table.setdefault(str(row.get("process", "run")), {})
        for name, value in row.items():
            if name in _NOT_METRICS or name.startswith("_") or isinstance(value, bool):
                continue
            if isinstance(value, (int, float)) and value == value:  # NaN is not equal to itself
                metrics.setdefault(name, {})[int(step)] = float(value)
    return {
        process: {name: sorted(points.items()) for name, points in metrics.items()}
        for process, metrics in table.items()
        if metrics
    }


def join_processes(table: Mapping[str, Mapping[str, Series]]) -> dict[str, Series]:
    """Metric -> series, by the process whose word counts."""
    order = sorted(table, key=lambda name: (PREFERRED.index(name) if name in PREFERRED else len(PREFERRED), name))
    joined: dict[str, Series] = {}
    for process in order:
        for name, points in table[process].items():
            joined.setdefault(name, points)
    return joined


def smooth(points: Sequence[tuple[int, float]], weight: float = 0.8) -> Series:
    """Exponential moving average without the pull towards the first value."""
    mean, mass, out = 0.0, 0.0, []
    for step, value in points:
        mean, mass = weight * mean + (1 - weight) * value, weight * mass + (1 - weight)
        out.append((step, mean / mass))
    return out
