"""Reads `.env` files as fallback for environment variables."""

from __future__ import annotations

import os
from pathlib import Path

ENV_FILE = Path(".env")


def read_env_file(path: Path = ENV_FILE) -> dict[str, str]:
    """NAME=VALUE lines of an optional file; quotes, a leading `export` and empty values are dropped."""
    if not path.is_file():
        return {}
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        name, sign, value = line.strip().removeprefix("export ").partition("=")
        if not sign or name.startswith("#"):
            continue
        value = value.strip()
        quoted = value[:1] in ("'", '"') and value[:1] in value[1:]
        value = value[1 : value.index(value[0], 1)] if quoted else value.partition(" #")[0].strip()
        if value:
            found[name.strip()] = value
    return found


def read_variable(name: str) -> str | None:
    """The environment's value, else that of `.env` in the working directory; None if missing or empty."""
    return os.environ.get(name) or read_env_file().get(name)
