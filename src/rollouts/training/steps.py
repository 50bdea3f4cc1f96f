"""What `step_N` means on disk: N completed steps, published whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

STABLE = "STABLE"
_STEP = re.compile(r"step_(\d+)")
_TMP = ".tmp-"


def step_path(root: Path, step: int) -> Path:
    """`root/step_N`, unpadded as every document draws it."""
    return Path(root) / f"step_{step}"


def parse_step(name: str) -> int | None:
    """N of `step_N`, or None when `name` is something else."""
    match = _STEP.fullmatch(name)
    return int(match.group(1)) if match else None


def is_complete(path: Path) -> bool:
    """A reader may trust `path`: its writer got as far as the marker."""
    return (Path(path) / STABLE).exists()


def complete_steps(root: Path, parts: Collection[str] = ()) -> list[int]:
    """All complete steps under `root`, ascending by number (9999 before 10000).

    With `parts` a step is complete when each `step_N/part` is: checkpoints are published one part per component.
    """
    if not Path(root).is_dir():
        return []
    steps = ((parse_step(p.name), p) for p in Path(root).iterdir())
    return sorted(s for s, path in steps if s is not None and all(map(is_complete, _part_paths(path, parts))))


def latest_step(root: Path, parts: Collection[str] = ()) -> int | None:
    """The highest complete step, or None."""
    steps = complete_steps(root, parts)
    return steps[-1] if steps else None


def publish_step(root: Path, step: int, write: Callable[[Path], None]) -> Path:
    """Let `write(dir)` fill a directory, then make it appear as `root/step_N` in one instant.

    Order matters: contents and marker reach the disk before the name does, so a crash at any point leaves either
    the whole step or none. An existing `step_N` is replaced.
    """
    return publish_dir(step_path(root, step), write)


def publish_dir(final: Path, write: Callable[[Path], None], *, sealed: bool = False) -> Path:
    """The same for a directory of any name, such as the part `checkpoints/step_N/trainer` of a step.

    Sealed, its marker lists every file with size and digest, which `find_damage` holds the files to.
    """
    tmp = begin_dir(final, uuid.uuid4().hex[:8])
    try:
        write(tmp)
        commit_dir(tmp, final, sealed=sealed)
    except BaseException:
        shutil.rmtree(tmp, ignore_errors=True)
        raise
    return final


def begin_dir(final: Path, token: str) -> Path:
    """An empty directory beside `final` that several writers may fill; `token` keeps attempts apart."""
    tmp = temporary_path(final, token)
    tmp.mkdir(parents=True)
    return tmp


def temporary_path(final: Path, token: str) -> Path:
    """Where `begin_dir` puts it."""
    return final.parent / f"{_TMP}{final.name}-{token}"


def commit_dir(tmp: Path, final: Path, *, sealed: bool = False) -> None:
    """Make what has been written to `tmp` appear as `final`, complete and on the disk, in one instant."""
    (tmp / STABLE).write_text(json.dumps(_describe_files(tmp), indent=1) if sealed else "", encoding="utf-8")
    _fsync_tree(tmp)
    if final.exists():
        _remove(final)
    os.rename(tmp, final)
    _fsync(final.parent)


def find_damage(path: Path) -> str | None:
    """What is wrong with a sealed directory: the first file that is missing, cut short or changed; None: nothing is.

    The seal may have been damaged too, down to an empty one.
    """
    seal = (Path(path) / STABLE).read_bytes()
    try:
        files: dict[str, list[Any]] = json.loads(seal)
        for name, (size, digest) in files.items():
            file = Path(path) / name
            if not file.is_file():
                return f"{file} is missing"
            if file.stat().st_size != size:
                return f"{file} has {file.stat().st_size} of {size} bytes"
            if _digest_file(file) != digest:
                return f"{file} is not what was written"
    except (ValueError, TypeError, AttributeError):
        return f"{Path(path) / STABLE} is not what was written"
    return None


def prune_steps(root: Path, keep: Callable[[int], bool], parts: Collection[str] = ()) -> list[int]:
    """Remove every complete step N of `root` for which not `keep(N)`; returns what was removed.

    With `parts` only these are removed, and the step's directory once nobody else's part is left in it. The rule is a
    function because a list of what to keep would be made of an earlier look at `root`: a step that is published between
    the two looks would be in neither, and be lost.
    """
    removed = [step for step in complete_steps(root, parts) if not keep(step)]
    for step in removed:
        path = step_path(root, step)
        for part in _part_paths(path, parts):
            _remove(part)
        if parts:
            with contextlib.suppress(OSError):  # others' parts are still there, or they were quicker
                path.rmdir()
    return removed


def remove_unfinished(root: Path, part: str | None = None) -> None:
    """Sweep away what a crashed writer left under `root`: of whole steps, or of one `part` of each step."""
    if Path(root).is_dir():
        for path in Path(root).glob(f"{_TMP}step_*" if part is None else f"step_*/{_TMP}{part}-*"):
            shutil.rmtree(path, ignore_errors=True)


def _describe_files(root: Path) -> dict[str, tuple[int, str]]:
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): (path.stat().st_size, _digest_file(path)) for path in files}


def _digest_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _part_paths(path: Path, parts: Collection[str]) -> list[Path]:
    return [path / part for part in parts] or [path]


def _remove(path: Path) -> None:
    """Take the name away first, so that nobody reads a directory while it is being emptied."""
    doomed = path.with_name(f"{_TMP}{path.name}-{uuid.uuid4().hex[:8]}")
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _fsync_tree(root: Path) -> None:
    for folder, _, files in os.walk(root):
        for name in files:
            _fsync(Path(folder) / name)
        _fsync(Path(folder))


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
