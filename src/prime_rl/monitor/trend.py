"""Whether a metric moved by more than its own noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from prime_rl.monitor.series import Series

MIN_POINTS = 10
"""Minimum number of points for a trend."""

MAX_WINDOW = 20
Z = 3.0
"""Standard errors that a change must exceed."""


@dataclass(frozen=True)
class Trend:
    """Means of the first and the last steps, and whether they differ by more than noise: rose, fell or unchanged."""

    verb: str
    first: float
    last: float


def find_trend(points: Series) -> Trend | None:
    """The trend of a series; None with too few points.

    The noise of a point is estimated from the differences of neighbors, which a slow trend hardly contributes to.
    """
    values = [value for _, value in points]
    if len(values) < MIN_POINTS:
        return None
    window = min(max(len(values) // 5, 3), MAX_WINDOW)
    first, last = fmean(values[:window]), fmean(values[-window:])
    noise = math.sqrt(fmean((b - a) ** 2 for a, b in pairwise(values)) / 2)
    if abs(last - first) <= Z * noise * math.sqrt(2 / window):
        return Trend("unchanged", first, last)
    return Trend("rose" if last > first else "fell", first, last)
