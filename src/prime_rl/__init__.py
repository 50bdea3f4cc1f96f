"""Asynchronous RL, SFT, evaluation and synthesis for language models: processes, configurations and launchers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prime_rl.training import train

__all__ = ["__version__", "train"]

__version__: str


def __getattr__(name: str) -> Any:
    """Load `train` and `__version__` when they are first used: every process imports this package."""
    if name == "train":
        from prime_rl.training import train

        return train
    if name == "__version__":
        from prime_rl.runtime.version import find_version

        return find_version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
