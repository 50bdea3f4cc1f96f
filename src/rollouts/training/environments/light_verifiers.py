"""Imports `verifiers` without the `agents` library: a quarter of the import's time and memory for one function.

`verifiers` takes `agents.function_schema.function_schema`, which describes tools. While it is imported a stand-in takes
that module's place, whose function fetches the real one when it is called. Everybody else gets the real library.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any


@contextlib.contextmanager
def light_verifiers() -> Iterator[None]:
    """Whoever imports `verifiers` for the first time in here gets it without `agents`."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    """Finds `verifiers` where the other finders do, and puts our loader before theirs."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "verifiers" or "agents" in sys.modules:
            return None
        others = (finder for finder in sys.meta_path if not isinstance(finder, _Finder))
        spec = next((found for finder in others if (found := finder.find_spec(fullname, path, target))), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Executes a package beside the stand-ins; anew and as usual where it asks for more than they have."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        try:
            with _stand_ins():
                self._loader.exec_module(module)
        except Exception:
            for name in [name for name in sys.modules if name.startswith(module.__name__ + ".")]:
                del sys.modules[name]
            self._loader.exec_module(module)


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    package = module_from_spec(ModuleSpec("agents", None, is_package=True))
    module = module_from_spec(ModuleSpec("agents.function_schema", None))
    vars(package)["function_schema"], vars(module)["function_schema"] = module, _function_schema
    modules = {"agents": package, "agents.function_schema": module}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            sys.modules.pop(name, None)


def _function_schema(*args: Any, **kwargs: Any) -> Any:
    return importlib.import_module("agents.function_schema").function_schema(*args, **kwargs)
