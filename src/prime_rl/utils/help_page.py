"""Help pages kept between starts: to render one takes every configuration class, to show it again takes none.

A page lies in the user's cache (`~/.cache/prime-rl/help`) under the stamps of the sources that it was rendered from. It
is read again as long as all of them stand. Where nothing can be written, it is rendered each time.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from rollouts.training.user_cache import user_cache_dir

SOURCES = ("prime_rl", "rollouts", "pydantic", "__main__")
"""Packages whose loaded modules make a page."""


def read_page(prog: str) -> str | None:
    """The page as `keep_page` was given it; None when there is none, or a source of it has changed since."""
    try:
        text = _page_path(prog).read_text(encoding="utf-8")
        stamps, _, page = text.partition("\n\n")
        current = _stamp(line.split(" ", 2)[2] for line in stamps.split("\n"))
    except (OSError, ValueError, IndexError, RuntimeError):
        return None
    return page if page and current == stamps else None


def keep_page(prog: str, page: str) -> None:
    """Keep a page that was rendered by the modules that are loaded now; silent where that cannot be."""
    loaded = [(name.partition(".")[0], getattr(module, "__file__", None)) for name, module in sys.modules.items()]
    sources = sorted({file for package, file in loaded if package in SOURCES and file})
    with suppress(OSError, ValueError, RuntimeError):  # a full disk, a path that is no UTF-8, a user without a home
        path = _page_path(prog)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            temporary.write_text(f"{_stamp(sources)}\n\n{page}", encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def colour(text: str) -> str:
    """The help with section titles in bold, where a terminal shows it and NO_COLOR is unset."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return "\n".join(f"\033[1m{line}\033[0m" if line[:1] == "[" else line for line in text.split("\n"))


def _page_path(prog: str) -> Path:
    """One page for each command of each installation; -OO has other texts."""
    installation = zlib.crc32(os.fsencode(f"{sys.version} {sys.flags.optimize} {sys.prefix} {__file__}"))
    return user_cache_dir("prime-rl") / "help" / f"{prog}-{installation:08x}"


def _stamp(sources: Iterable[str]) -> str:
    """A line per file with what Python's own bytecode cache goes by: when it was written, and its size."""
    found = [(os.stat(file), file) for file in sources]
    return "\n".join(f"{stat.st_mtime_ns} {stat.st_size} {file}" for stat, file in found)
