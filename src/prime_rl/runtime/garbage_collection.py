"""Garbage collector settings for a process with thousands of concurrent rollouts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG = 50_000
"""Generation-0 threshold (default: 700): most objects of a rollout are freed by reference counting before."""


@contextmanager
def relaxed_gc() -> Iterator[None]:
    """Freeze existing objects and collect new ones rarely during a block; restore the settings afterwards.

    Otherwise the cost per rollout grows with the number of live rollouts, all of which the collector traverses.
    """
    threshold = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(YOUNG, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*threshold)
        gc.unfreeze()
