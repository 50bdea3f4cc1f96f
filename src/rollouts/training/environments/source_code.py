"""The Python files that an environment consists of, and their digest."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from rollouts.training.environments.resolve import EnvSource

INSTALLED = ("site-packages", "dist-packages")


@cache
def digest_code(source: EnvSource) -> str:
    """Hash of the files of `find_code`, computed once per process."""
    digest = hashlib.sha256()
    for file in find_code(source):
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def find_code(source: EnvSource) -> list[Path]:
    """The file of an environment and the files beside it that it imports, directly or not, in order of paths.

    Beside it are the files of its folder, or of the folder that holds its package. Of installed packages only its own
    counts.
    """
    if source.file is None:
        return []
    root = source.file.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    inside = root / source.file.relative_to(root).parts[0] if root.name in INSTALLED else root
    found: set[Path] = set()
    todo = [source.file]
    while todo:
        file = todo.pop()
        if file in found or not file.is_file() or not file.is_relative_to(inside):
            continue
        found.add(file)
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):
            continue
        todo += [module for node in ast.walk(tree) for module in _find_modules(node, file.parent, root)]
    return sorted(found)


def _find_modules(node: ast.AST, folder: Path, root: Path) -> Iterator[Path]:
    """Files that an import in a file of `folder` may load, whether or not they exist."""
    if isinstance(node, ast.Import):
        names, folders = [alias.name for alias in node.names], [folder, root]
    elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module or ''}.{alias.name}".lstrip(".") for alias in node.names]
        folders = [folder.joinpath(*[".."] * (node.level - 1)).resolve()] if node.level else [folder, root]
    else:
        return
    for name in names:
        parts = name.split(".")
        for path in (base.joinpath(*parts[:n]) for base in folders for n in range(1, len(parts) + 1)):
            yield path.with_suffix(".py")
            yield path / "__init__.py"
