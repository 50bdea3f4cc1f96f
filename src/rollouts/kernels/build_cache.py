"""The user's cache directory."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache_dir(name: str) -> Path:
    """`$XDG_CACHE_HOME/name`, else `~/.cache/name`; `RuntimeError` for a user without a home directory.

    A relative path in the variable is ignored (XDG Base Directory Specification).
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / name
