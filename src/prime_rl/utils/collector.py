"""How Python's garbage collector treats a process that keeps thousands of rollouts at the same time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG = 50_000
"""Objects between two looks (Python's own: 700): by then most of a rollout's are gone by themselves, without a look."""


@contextmanager
def calm_collector() -> Iterator[None]:
    """What is loaded now is never walked over, what comes later seldom; afterwards all is as it was.

    Otherwise the work per rollout grows with the rollouts that are kept: the collector walks over all of them.
    """
    threshold = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(YOUNG, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*threshold)
        gc.unfreeze()
