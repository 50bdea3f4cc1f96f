"""The collector of an orchestrator: seldom, not over what was there, and afterwards as before."""

from __future__ import annotations

import gc

import pytest

from prime_rl.utils.collector import calm_collector


def test_it_looks_seldom_and_is_as_before_afterwards() -> None:
    threshold, frozen = gc.get_threshold(), gc.get_freeze_count()
    looks: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        looks.append(phase)

    gc.callbacks.append(note)
    try:
        with calm_collector():
            assert gc.get_freeze_count() > 1000
            kept = [[] for _ in range(20_000)]
            assert not looks and len(kept) == 20_000
            kept = [[] for _ in range(200_000)]
            assert looks, "cycles are still found"
        with pytest.raises(RuntimeError), calm_collector():
            raise RuntimeError
    finally:
        gc.callbacks.remove(note)
    assert gc.get_threshold() == threshold and gc.get_freeze_count() <= frozen
