"""Environments, examples and debug configurations that ship with the package."""

from __future__ import annotations

from pathlib import Path

FOLDERS = ("environments", "examples", "configs")
"""Folders of the repository that the wheel contains below `rollouts/shipped` (`pyproject.toml`)."""

_PACKAGE = Path(__file__).resolve().parents[1]


def shipped_dir(folder: str) -> Path:
    """Where one of `FOLDERS` is: in the installed package, or in the checkout from which this module is imported."""
    installed = _PACKAGE / "shipped" / folder
    return installed if installed.is_dir() else _PACKAGE.parents[1] / folder


def find_file(name: str) -> Path:
    """The path `name`, or the shipped file of that name (`examples/...`) if only that exists."""
    path = Path(name).expanduser()
    if path.exists() or path.is_absolute() or path.parts[:1] not in {(folder,) for folder in FOLDERS}:
        return path
    shipped = shipped_dir(path.parts[0]).joinpath(*path.parts[1:])
    return shipped if shipped.exists() else path
