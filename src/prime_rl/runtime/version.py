"""Version of the installed package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def find_version() -> str:
    """The version; "unknown" for sources on the path without an installation."""
    try:
        return version("prime-rl")
    except PackageNotFoundError:
        return "unknown"
