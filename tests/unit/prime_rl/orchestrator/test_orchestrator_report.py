"""Step reports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from prime_rl.orchestrator.report import WINDOW_STEPS, Reporter


def test_throughput_covers_the_steps_in_which_it_was_generated() -> None:
    """Two batches that are generated together are ready together: the second takes no time of its own."""
    reporter = Reporter(cast(Any, SimpleNamespace()))
    assert reporter._throughput(1000, 10.0) == 100
    assert reporter._throughput(1000, 0.0) == 200
    for _ in range(WINDOW_STEPS):
        last = reporter._throughput(1000, 20.0)
    assert last == 50
