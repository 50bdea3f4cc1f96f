"""Asynchronous RL, SFT, evaluation and synthesis for language models: processes, configurations and launchers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prime_rl.training import train

__all__ = ["__version__", "train"]

__version__: str

# Rounds for which a thread of OpenMP waits for others before it sleeps, read when torch is loaded. By default it waits
# for milliseconds: while another program uses one of two cores, two threads then generate a third as fast, not half.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def __getattr__(name: str) -> Any:
    """Load `train` and `__version__` when they are first used: every process imports this package."""
    if name == "train":
        from prime_rl.training import train

        return train
    if name == "__version__":
        from prime_rl.runtime.version import find_version

        return find_version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
