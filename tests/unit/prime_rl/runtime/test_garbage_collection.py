"""Garbage collection of the orchestrator: rare, without earlier objects, and restored afterwards."""

from __future__ import annotations

import gc

import pytest

from prime_rl.runtime.garbage_collection import relaxed_gc


def test_thresholds_are_relaxed_and_restored() -> None:
    threshold, frozen = gc.get_threshold(), gc.get_freeze_count()
    looks: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        looks.append(phase)

    gc.callbacks.append(note)
    try:
        with relaxed_gc():
            assert gc.get_freeze_count() > 1000
            kept = [[] for _ in range(20_000)]
            assert not looks and len(kept) == 20_000
            kept = [[] for _ in range(200_000)]
            assert looks, "cycles are still found"
        with pytest.raises(RuntimeError), relaxed_gc():
            raise RuntimeError
    finally:
        gc.callbacks.remove(note)
    assert gc.get_threshold() == threshold and gc.get_freeze_count() <= frozen
