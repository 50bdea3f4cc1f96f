"""SFT and RL training loops in one process."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Name -> module, imported lazily.
_MODULES = {
    "run_sft_training": "sft_loop",
    "prepare_sft_batch": "sft_loop",
    "run_rl_training": "rl_loop",
    "prepare_grpo_batch": "rl_loop",
    "compute_reward": "rl_loop",
    "compute_advantages": "rl_loop",
}

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers: {', '.join(sorted(_MODULES))}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
