"""Trends are claimed only beyond the noise."""

from __future__ import annotations

import random

from prime_rl.monitor.trend import find_trend


def noisy(num: int, slope: float, seed: int) -> list[tuple[int, float]]:
    rng = random.Random(seed)
    return [(step, 0.5 + slope * step + rng.gauss(0, 0.05)) for step in range(1, num + 1)]


def test_few_steps_support_no_trend() -> None:
    assert find_trend([(1, 0.555), (2, 0.55), (3, 0.575)]) is None
    assert find_trend(noisy(9, 1.0, 0)) is None


def test_noise_is_no_trend_and_a_trend_is_none_of_noise() -> None:
    false = sum(find_trend(noisy(num, 0.0, seed)).verb != "unchanged" for seed in range(200) for num in (10, 30, 100))  # type: ignore[union-attr]
    assert false <= 12, f"{false} of 600 series of noise"
    for seed in range(50):
        rising, falling = find_trend(noisy(30, 0.02, seed)), find_trend(noisy(30, -0.02, seed))
        assert rising is not None and falling is not None
        assert (rising.verb, falling.verb) == ("rose", "fell")


def test_exact_values() -> None:
    assert find_trend([(step, 0.0) for step in range(20)]).verb == "unchanged"  # type: ignore[union-attr]
    trend = find_trend([(step, float(step)) for step in range(1, 21)])
    assert trend is not None and (trend.verb, trend.first, trend.last) == ("rose", 2.5, 18.5)
