"""Reads `.env` files as fallback for environment variables."""

from __future__ import annotations

import os
import re
from pathlib import Path

ENV_FILE = ".env"


def find_env_file() -> Path:
    """`.env` of the working directory, else of the nearest parent up to the checkout.

    The checkout is the nearest folder with .git, or the nearest parent with pyproject.toml, which folders of
    environments have, too. Outside of one, no parent is read.
    """
    here = Path.cwd()
    parents: list[Path] = []
    for folder in (here, *here.parents):
        parents.append(folder)
        if (folder / ".git").exists() or (folder != here and (folder / "pyproject.toml").exists()):
            break
    else:
        parents = [here]
    return next((path for folder in parents if (path := folder / ENV_FILE).is_file()), here / ENV_FILE)


def read_env_file(path: Path | None = None) -> dict[str, str]:
    """NAME=VALUE lines of an optional file, by default `find_env_file()`; quotes, a leading `export` and empty values
    are dropped. Raises `ValueError` for a file that is not UTF-8.
    """
    path = path or find_env_file()
    if not path.is_file():
        return {}
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors of Windows begin a file with a mark
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text file in UTF-8: save it as UTF-8") from None
    found = {}
    for line in text.splitlines():
        name, sign, value = line.strip().removeprefix("export ").partition("=")
        if not sign or name.startswith("#"):
            continue
        text = value.strip()
        quoted = text[:1] in ("'", '"') and text[:1] in text[1:]
        value = text[1 : text.index(text[0], 1)] if quoted else re.split(r"\s#", value)[0].strip()
        if value:
            found[name.strip()] = value
    return found


def read_variable(name: str) -> str | None:
    """The environment's value, else that of `.env` (`find_env_file`); None if missing or empty."""
    return os.environ.get(name) or read_env_file().get(name)
