"""Functions that a configuration names."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def import_function(path: str, key: str) -> Callable[..., Any]:
    """The function at `package.module:name`, the value of configuration key `key`; `ValueError` if there is none.

    Modules may be in the working directory, which a console script does not have on its path.
    """
    if (folder := os.getcwd()) not in sys.path:
        sys.path.append(folder)
    module, _, name = path.partition(":")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{key} = {path!r} cannot be imported ({error}): write it as package.module:name") from error
    if not callable(function):
        raise ValueError(f"{key} = {path!r} is a {type(function).__name__}, not a function")
    return function


def check_arguments(
    function: Callable[..., Any],
    path: str,
    key: str,
    arguments: Mapping[str, Any],
    positional: Sequence[str] = ("inputs",),
) -> None:
    """Raise `ValueError` unless the function takes the `positional` and the keyword `arguments`.

    It is called without await, so a coroutine function raises, too.
    """
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"{key} = {path!r} is async: write it with def, not async def")
    try:
        inspect.signature(function).bind(*positional, **arguments)
    except TypeError as error:
        names = ", ".join([*positional, *arguments])
        raise ValueError(f"{key} = {path!r} does not take the arguments ({names}): {error}") from error
