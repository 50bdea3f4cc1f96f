"""The cache of converted models: complete directories only, whatever happens while one is written."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from rollouts.kernels.build_cache import user_cache_dir

CONVERTER_VERSION = 2
"""Raise it when `convert_gguf` writes other files for the same GGUF file: cached ones are then converted again."""


def models_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/prime_rl/models`, else below `~/.cache`."""
    return user_cache_dir("prime_rl") / "models"


def build_once(directory: Path, build: Callable[[Path], None]) -> Path:
    """`directory`, filled by `build` if it is missing; several processes may do so at once, and the first one wins."""
    if directory.is_dir():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        build(temporary)
        temporary.chmod(0o755)
        try:
            temporary.rename(directory)
        except OSError:
            if not directory.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return directory


def resolve_gguf(path: Path) -> Path:
    """The Hugging Face directory of a GGUF file, converted once for each size, time of modification and converter."""
    from prime_rl.pretrained.gguf_reader import convert_gguf

    path = path.resolve()
    stat = path.stat()
    identity = f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\0{CONVERTER_VERSION}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return build_once(models_cache_dir() / f"{path.stem}-{key}", lambda directory: convert_gguf(path, directory))
