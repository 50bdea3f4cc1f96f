"""Whether a metric moved by more than its own noise."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from prime_rl.monitor.series import Series

MIN_POINTS = 10
"""Minimum number of points for a trend."""

MAX_WINDOW = 20
START_Z, STOP_Z = 4.0, 2.0
"""Standard errors that a change must exceed to become a trend, and below which it is none any more."""

SHORT = 6
"""The noise of n points is itself uncertain: `START_Z` grows by the factor 1 + SHORT / n."""

CONFIRMATIONS = 3
"""Consecutive points at which a change must exceed `START_Z`."""

HISTORY = 60
"""Points at which the trend is tested again, so that it does not depend on the last one alone."""

MAX_CORRELATION = 0.9
MIN_EVIDENCE = 5
RECENT = 20


@dataclass(frozen=True)
class Trend:
    """Means of the first and the last steps, the standard error of their difference, and whether it is a trend.

    `verb` is rose, fell or unchanged.
    """

    verb: str
    first: float
    last: float
    error: float


def find_trend(points: Series) -> Trend | None:
    """The trend of a series; None with too few points.

    In simulations of 12 to 50 points, 0.1 % of series of independent noise show a trend, and 2 % of noise whose
    neighbors are correlated by 0.6.
    """
    values = np.array([value for _, value in points])
    if len(values) < MIN_POINTS:
        return None
    lengths = range(max(MIN_POINTS, len(values) - HISTORY), len(values) + 1)
    changes = [(abs(_test(values[:n])), START_Z * (1 + SHORT / n)) for n in lengths]
    first, last, error = _compare_ends(values)
    is_trend = has_started(((z > start, z < STOP_Z) for z, start in changes), CONFIRMATIONS)
    return Trend(("rose" if last > first else "fell") if is_trend else "unchanged", first, last, error)


def has_started(tests: Iterable[tuple[bool, bool]], confirmations: int = 1) -> bool:
    """Hysteresis over (starts, stops): on after `confirmations` starts in a row, off at the first stop."""
    is_on, num_starts = False, 0
    for starts, stops in tests:
        num_starts = num_starts + 1 if starts else 0
        is_on = (is_on or num_starts >= confirmations) and not stops
    return is_on


def exceeds(values: Sequence[float], limit: float) -> bool:
    """Whether the mean of the last values is above `limit`, with hysteresis.

    It starts two standard errors above the limit and ends one below it, so that it does not change at every step.
    """

    def test(recent: Sequence[float]) -> tuple[bool, bool]:
        mean, error = float(np.mean(recent)), float(np.std(recent, ddof=1)) / math.sqrt(len(recent))
        return mean - 2 * error > limit, mean + error < limit

    return has_started(test(values[max(0, end - RECENT) : end]) for end in range(MIN_EVIDENCE, len(values) + 1))


def _test(values: NDArray[np.float64]) -> float:
    """The change from the first to the last steps in standard errors."""
    first, last, error = _compare_ends(values)
    change = last - first
    return change / error if error else math.copysign(math.inf, change) if change else 0.0


def _compare_ends(values: NDArray[np.float64]) -> tuple[float, float, float]:
    """Means of the first and last steps, and the standard error of their difference.

    The noise is what a smooth curve in t leaves: a combination of 1, t, t^2, log t and 1/t. Neighbors are correlated
    by `rho`, so that w of them are worth only w (1 - rho) / (1 + rho) independent points.
    """
    window = min(max(len(values) // 5, 3), MAX_WINDOW)
    curves = _smooth_curves(len(values))
    rest = values - curves @ (curves.T @ values)
    variance = float(rest @ rest) / (len(values) - curves.shape[1])
    rho = 0.0
    if variance > 0:
        found = float(rest[1:] @ rest[:-1]) / float(rest @ rest)
        rho = min(max(found + (1 + 3 * found) / len(values), 0.0), MAX_CORRELATION)  # Kendall's correction of its bias
    error = math.sqrt(variance * (1 + rho) / (1 - rho) * 2 / window)
    exact = 1e-12 * max(float(np.abs(values).max()), 1e-300)  # rounding of the fit
    return float(values[:window].mean()), float(values[-window:].mean()), error if error > exact else 0.0


@lru_cache(2 * HISTORY)
def _smooth_curves(length: int) -> NDArray[np.float64]:
    """Orthonormal smooth curves over `length` points, shape [length, 5]."""
    time = np.arange(1, length + 1) / length
    return np.asarray(np.linalg.qr(np.stack([time**0, time, time**2, np.log(time), 1 / time], axis=1))[0])
