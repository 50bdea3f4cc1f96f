"""Files that are written as a whole."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Write a file, or replace it in one step: readers, and a start after a crash, find the old or the new content.

    `mode`: permissions of a new file, before the umask.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.touch(mode)
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
