"""Metric rows as series over steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Series = list[tuple[int, float]]
Row = Mapping[str, Any]

PREFERRED = ("trainer", "sft", "orchestrator", "inference")
"""Precedence of processes for metrics that several of them log, such as `time/step`."""

_NOT_METRICS = ("step", "timestamp", "process", "attempt")


def read_series(rows: Iterable[Row]) -> dict[str, dict[str, Series]]:
    """Process -> metric -> (step, value) by step; the last value of a repeated step applies."""
    table: dict[str, dict[str, dict[int, float]]] = {}
    for row in rows:
        step = row.get("step")
        if not isinstance(step, (int, float)) or "timeline/what" in row:
            continue
        metrics = table.setdefault(str(row.get("process", "run")), {})
        for name, value in row.items():
            if name in _NOT_METRICS or name.startswith("_") or isinstance(value, bool):
                continue
            if isinstance(value, (int, float)) and value == value:  # not NaN
                metrics.setdefault(name, {})[int(step)] = float(value)
    return {
        process: {name: sorted(points.items()) for name, points in metrics.items()}
        for process, metrics in table.items()
        if metrics
    }


def join_processes(table: Mapping[str, Mapping[str, Series]]) -> dict[str, Series]:
    """Metric -> series, by process precedence."""
    order = sorted(table, key=lambda name: (PREFERRED.index(name) if name in PREFERRED else len(PREFERRED), name))
    joined: dict[str, Series] = {}
    for process in order:
        for name, points in table[process].items():
            joined.setdefault(name, points)
    return joined


def smooth(points: Sequence[tuple[int, float]], weight: float = 0.8) -> Series:
    """Bias-corrected exponential moving average."""
    mean, mass, out = 0.0, 0.0, []
    for step, value in points:
        mean, mass = weight * mean + (1 - weight) * value, weight * mass + (1 - weight)
        out.append((step, mean / mass))
    return out
