"""Code outside `src` that no test runs, such as benchmarks: what it imports from our packages exists."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = (
    "benchmarks",
    "dev",
    "scripts",
    "environments",
    "examples",
    "experiments",
    "tests/integration",
    "tests/fakes",
)
PACKAGES = ("prime_rl", "rollouts", "nanochat")


def list_imports(folder: str) -> Iterator[tuple[str, str, str]]:
    """File and line, module and name of each `from <one of our packages> import`."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PACKAGES:
                for alias in node.names:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node.module, alias.name


def exists(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name) or bool(importlib.import_module(f"{module}.{name}"))
    except ModuleNotFoundError as error:
        return (error.name or "").split(".")[0] not in PACKAGES  # an optional package is missing


@pytest.mark.parametrize("folder", FOLDERS)
def test_imported_names_exist(folder: str) -> None:
    missing = [f"{where}: {module}.{name}" for where, module, name in list_imports(folder) if not exists(module, name)]
    assert not missing
