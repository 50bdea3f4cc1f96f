"""Functions that a configuration names."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def import_function(path: str, key: str) -> Callable[..., Any]:
    """The function at `package.module:name`, the value of configuration key `key`; `ValueError` if there is none."""
    module, _, name = path.partition(":")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{key} = {path!r} cannot be imported ({error}): write it as package.module:name") from error
    if not callable(function):
        raise ValueError(f"{key} = {path!r} is a {type(function).__name__}, not a function")
    return function
