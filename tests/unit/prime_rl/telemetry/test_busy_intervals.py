"""Busy intervals and their overlap in closed form."""

from __future__ import annotations

from typing import Any

import pytest

from prime_rl.telemetry.busy_intervals import busy_intervals, compute_overlap


def row(process: str, start: float, end: float, what: str = "work") -> dict[str, Any]:
    return {"process": process, "step": 1, "timeline/what": what, "timeline/start": start, "timeline/end": end}


def test_intervals_are_merged_and_waiting_does_not_count() -> None:
    rows = [row("trainer", 4, 5), row("trainer", 1, 2), row("trainer", 2, 3), row("trainer", 3, 4, "wait_for_batch")]
    assert busy_intervals([*rows, {"process": "trainer", "step": 1, "loss/mean": 0.5}], "trainer") == [(1, 3), (4, 5)]


@pytest.mark.parametrize(
    "trainer, engine, share",
    [
        ([(0, 10)], [(0, 10)], 1.0),
        ([(0, 5)], [(5, 10)], 0.0),
        ([(0, 6)], [(4, 10)], 0.2),
        ([(0, 2), (4, 6), (8, 10)], [(1, 5)], 0.2),
    ],
)
def test_overlap_is_the_share_of_the_run_in_which_both_are_busy(
    trainer: list[tuple[float, float]], engine: list[tuple[float, float]], share: float
) -> None:
    rows = [row("trainer", *t) for t in trainer] + [row("inference", *e) for e in engine]
    assert compute_overlap(rows) == pytest.approx(share)
    assert compute_overlap(iter(rows)) == pytest.approx(share)


def test_no_timeline_no_overlap() -> None:
    assert compute_overlap([row("trainer", 0, 1)]) is None
