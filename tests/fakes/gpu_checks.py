"""Checks that pass, miss their bound, or end in every bad way, for tests of the GPU checks' runner."""

from __future__ import annotations

import os
import time

from dev.gpu.context import Context, Measured, Skipped


def measure(context: Context, number: float) -> Measured:
    """A given number."""
    return Measured(number, "as given", {"tiny": float(context.tiny)})


def fail(context: Context) -> Measured:
    """Raise."""
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more")


def crash(context: Context) -> Measured:
    """End the process."""
    os.abort()


def hang(context: Context) -> Measured:
    """Not return in time."""
    time.sleep(60)
    return Measured(0)


def skip(context: Context) -> Measured:
    """Something is missing that only the check can find."""
    raise Skipped("needs a number")
