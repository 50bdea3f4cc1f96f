"""The face of the training library: the documented names, each imported when it is first asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# name -> module; a name is listed once its module exists, so `from rollouts.training import X` never half works.
_HOME = {
    "Sample": "types",
    "Status": "types",
    "RolloutBatch": "types",
    "MetricsLogger": "metrics",
    "JSONLLogger": "metrics",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers: {', '.join(sorted(_HOME))}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
