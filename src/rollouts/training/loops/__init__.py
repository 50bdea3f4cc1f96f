"""The whole road in one process: fine-tuning and reinforcement learning, each loop on one screen."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# name -> module, imported when the name is first asked for
_HOME = {
    "run_sft_training": "sft_loop",
    "prepare_sft_batch": "sft_loop",
    "run_rl_training": "rl_loop",
    "prepare_grpo_batch": "rl_loop",
    "compute_reward": "rl_loop",
    "compute_advantages": "rl_loop",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers: {', '.join(sorted(_HOME))}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
