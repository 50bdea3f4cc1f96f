"""Trends are claimed only beyond the noise."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from prime_rl.monitor.trend import exceeds, find_trend


def noisy(num: int, slope: float, seed: int) -> list[tuple[int, float]]:
    rng = random.Random(seed)
    return [(step, 0.5 + slope * step + rng.gauss(0, 0.05)) for step in range(1, num + 1)]


def correlated(num: int, rho: float, seed: int) -> list[tuple[int, float]]:
    rng = random.Random(seed)
    points, value = [], rng.gauss(0, 1)
    for step in range(num):
        points.append((step, value))
        value = rho * value + (1 - rho**2) ** 0.5 * rng.gauss(0, 1)
    return points


def test_few_steps_support_no_trend() -> None:
    assert find_trend([(1, 0.555), (2, 0.55), (3, 0.575)]) is None
    assert find_trend(noisy(9, 1.0, 0)) is None


@pytest.mark.parametrize(("rho", "most"), [(0.0, 2), (0.6, 9)])
def test_noise_rarely_shows_a_trend(rho: float, most: int) -> None:
    series = [correlated(num, rho, seed) for seed in range(100) for num in (12, 20, 50)]
    false = sum(find_trend(points).verb != "unchanged" for points in series)  # type: ignore[union-attr]
    assert false <= most, f"{false} of 300 series of noise"


def test_a_trend_beyond_the_noise_is_found() -> None:
    for seed in range(50):
        rising, falling = find_trend(noisy(30, 0.02, seed)), find_trend(noisy(30, -0.02, seed))
        assert rising is not None and falling is not None
        assert (rising.verb, falling.verb) == ("rose", "fell")
        assert 0.01 < rising.error < 0.2 < rising.last - rising.first


def test_verdicts_do_not_change_at_every_step() -> None:
    """Values around the limit: a test of the last mean alone changes its verdict many times."""
    rng = random.Random(0)
    values = [0.1 + rng.gauss(0, 0.02) for _ in range(300)]
    verdicts = [exceeds(values[:n], 0.095) for n in range(10, 300)]
    means = [sum(values[n - 10 : n]) / 10 > 0.095 for n in range(10, 300)]
    assert sum(a != b for a, b in pairwise(verdicts)) <= 4 < sum(a != b for a, b in pairwise(means))
    rising = [noisy(80, 0.002, 3)[:n] for n in range(12, 81)]
    verbs = [find_trend(points).verb for points in rising]  # type: ignore[union-attr]
    assert sum(a != b for a, b in pairwise(verbs)) <= 1 and verbs[-1] == "rose"


def test_exact_values() -> None:
    assert find_trend([(step, 0.0) for step in range(20)]).verb == "unchanged"  # type: ignore[union-attr]
    trend = find_trend([(step, float(step)) for step in range(1, 21)])
    assert trend is not None and (trend.verb, trend.first, trend.last) == ("rose", 2.5, 18.5)
