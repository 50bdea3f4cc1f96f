"""Puts a mutation into a process that has imported the module already, by replacing the code of its functions."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType

OPTIMIZED = 0x1  # flag of functions, which modules and classes have not
Place = tuple[str, int]
Codes = dict[Place, CodeType]


def changed_codes(path: Path, original: bytes, mutated: bytes) -> Codes | None:
    """Code of the functions that differ, by qualified name and line; None where that is not all of the difference.

    A mutation of what runs at import, as defaults do, needs a process that has not imported the module.
    """
    before, after = compile(original, str(path), "exec"), compile(mutated, str(path), "exec")
    old, new = dict(_functions(before)), dict(_functions(after))
    if new.keys() - old.keys() or _import_code(before) != _import_code(after):
        return None
    changed = {place: code for place, code in new.items() if code != old[place]}
    if any(code.co_freevars != old[place].co_freevars for place, code in changed.items()):
        return None
    return changed or None


def _functions(code: CodeType) -> Iterator[tuple[Place, CodeType]]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield (inner.co_qualname, inner.co_firstlineno), inner
            yield from _functions(inner)


def _import_code(code: CodeType) -> list[object]:
    """What runs at import: the module and the bodies of its classes, without the code of functions."""
    found: list[object] = [code.co_code, code.co_names]
    for inner in code.co_consts:
        if not isinstance(inner, CodeType):
            found.append((type(inner), inner))
        elif not inner.co_flags & OPTIMIZED:
            found.append(_import_code(inner))
    return found


class LiveFunctions:
    """All functions of this process, by file, qualified name and line."""

    def __init__(self) -> None:
        self._found: dict[str, dict[Place, list[FunctionType]]] = {}
        for function in gc.get_objects():
            if type(function) is FunctionType:
                code = function.__code__
                by_place = self._found.setdefault(code.co_filename, {})
                by_place.setdefault((code.co_qualname, code.co_firstlineno), []).append(function)
        gc.freeze()  # shared by the forks

    def patch(self, path: Path, codes: Codes) -> None:
        """Give them their new code; a module that is not there yet will be imported with the mutation."""
        for place, code in codes.items():
            for function in self._found.get(str(path), {}).get(place, []):
                function.__code__ = code
