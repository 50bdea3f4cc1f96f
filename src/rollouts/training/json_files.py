"""Reads untrusted JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json_file(path: Path) -> dict[str, Any]:
    """The JSON object in a file; `ValueError` names the file when it holds none, or is nested too deeply to parse."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None
    except ValueError as error:  # also bytes that are no UTF-8
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return found
