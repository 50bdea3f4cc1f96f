"""Step directories: `step_N` holds the state after N steps and is published atomically."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import re
import shutil
import sys
import uuid
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

STABLE = "STABLE"
_STEP = re.compile(r"step_(\d+)")
_TMP = ".tmp-"


def step_path(root: Path, step: int) -> Path:
    """`root/step_N`, without zero padding."""
    return Path(root) / f"step_{step}"


def parse_step(name: str) -> int | None:
    """N of `step_N`, or None when `name` is something else."""
    match = _STEP.fullmatch(name)
    return int(match.group(1)) if match else None


def is_complete(path: Path) -> bool:
    """Whether `path` has the completion marker."""
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


def is_due(step: int, interval: int | None, last: int | None) -> bool:
    """Whether something is due after this step: every `interval` steps (None: never), and after the last one."""
    return step == last or (interval is not None and step % interval == 0)


def publish_step(root: Path, step: int, write: Callable[[Path], object]) -> Path:
    """Write a temporary directory with `write(dir)`, then rename it to `root/step_N`.

    Contents and marker are synced to disk before the rename, so a crash leaves either the complete step or none. An
    existing `step_N` is replaced.
    """
    return publish_dir(step_path(root, step), write)


def publish_dir(final: Path, write: Callable[[Path], object], *, sealed: bool = False) -> Path:
    """`publish_step` for any directory, such as the part `checkpoints/step_N/trainer` of a step.

    With `sealed`, the marker lists every file with size and digest, which `find_damage` verifies.
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
    """Create a temporary directory next to `final` for one or several writers; `token` identifies the attempt."""
    tmp = temporary_path(final, token)
    tmp.mkdir(parents=True)
    return tmp


def temporary_path(final: Path, token: str) -> Path:
    """The path of `begin_dir`."""
    return final.parent / f"{_TMP}{final.name}-{token}"


def commit_dir(tmp: Path, final: Path, *, sealed: bool = False, described: Mapping[str, Any] | None = None) -> None:
    """Sync `tmp` to disk and rename it to `final`, with the completion marker; what is there is replaced at once.

    `described`: `describe_files` of other writers, whose files are not read again.
    """
    others = described or {}
    seal = json.dumps({**others, **describe_files(tmp, skip=others)}, indent=1) if sealed else ""
    (tmp / STABLE).write_text(seal, encoding="utf-8")
    _fsync_tree(tmp)
    if final.exists() and _exchange(tmp, final):
        _fsync(final.parent)
        shutil.rmtree(tmp, ignore_errors=True)
        return
    if final.exists():
        _remove(final)
    os.rename(tmp, final)
    _fsync(final.parent)


def can_exchange() -> bool:
    """Whether this system can exchange two directories at once (`renameat2` of Linux); not all file systems can."""
    return sys.platform == "linux" and hasattr(ctypes.CDLL(None), "renameat2")


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two directories at once; returns whether it was possible.

    Two renames would leave neither for a moment, and after a crash at that moment for good.
    """
    if not can_exchange():
        return False
    current_directory, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    paths = os.fsencode(one), os.fsencode(other)
    done: int = ctypes.CDLL(None).renameat2(current_directory, paths[0], current_directory, paths[1], exchange)
    return done == 0


def find_damage(path: Path) -> str | None:
    """The first missing, truncated or changed file of a sealed directory; None if it is intact.

    The seal itself may be damaged or empty.
    """
    seal = (Path(path) / STABLE).read_bytes()
    try:
        files: dict[str, list[Any]] = json.loads(seal)
        for name, (size, digest) in files.items():
            file = Path(path) / name
            if not file.resolve().is_relative_to(Path(path).resolve()):
                return f"{file} leads out of the checkpoint"
            if not file.is_file():
                return f"{file} is missing"
            if file.stat().st_size != size:
                return f"{file} has {file.stat().st_size} of {size} bytes"
            if _digest_file(file) != digest:
                return f"{file} is not what was written"
    except (ValueError, TypeError, AttributeError, RecursionError):
        return f"{Path(path) / STABLE} is not what was written"
    return None


def prune_steps(root: Path, keep: Callable[[int], bool], parts: Collection[str] = ()) -> list[int]:
    """Remove every complete step N of `root` unless `keep(N)`; returns the removed steps.

    With `parts`, only these are removed, and then the step's directory if it is empty. `keep` is a function because a
    precomputed list would miss steps published in the meantime.
    """
    removed = [step for step in complete_steps(root, parts) if not keep(step)]
    for step in removed:
        path = step_path(root, step)
        for part in _part_paths(path, parts):
            _remove(part)
        if parts:
            with contextlib.suppress(OSError):  # not empty, or removed by another process
                path.rmdir()
    return removed


def prune_commits(root: Path, keep: int | None, parts: Collection[str]) -> list[int]:
    """Remove `parts` of every step below the `keep` newest complete steps; returns the steps that lost a part.

    A step is complete if all `parts` are. Newer incomplete steps do not count, so the last resumable state remains
    until the next one is complete. `keep` None: nothing is removed.
    """
    newest = [] if keep is None else complete_steps(root, parts)[-keep:]
    if not newest:
        return []
    removed = [prune_steps(root, lambda step: step >= newest[0], (part,)) for part in parts]
    return sorted({step for steps in removed for step in steps})


def remove_unfinished(root: Path, part: str | None = None) -> None:
    """Remove incomplete directories of crashed writers below `root`: of steps, or of one `part` of each step."""
    if Path(root).is_dir():
        for path in Path(root).glob(f"{_TMP}step_*" if part is None else f"step_*/{_TMP}{part}-*"):
            shutil.rmtree(path, ignore_errors=True)


def describe_files(root: Path, pattern: str = "*", skip: Collection[str] = ()) -> dict[str, tuple[int, str]]:
    """Size and digest of the files below `root` that match `pattern`, by relative path, without those of `skip`."""
    files = {str(path.relative_to(root)): path for path in sorted(root.rglob(pattern)) if path.is_file()}
    return {name: (path.stat().st_size, _digest_file(path)) for name, path in files.items() if name not in skip}


def _digest_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _part_paths(path: Path, parts: Collection[str]) -> list[Path]:
    return [path / part for part in parts] or [path]


def _remove(path: Path) -> None:
    """Rename before deleting, so that readers never see a partially deleted directory."""
    removed = path.with_name(f"{_TMP}{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        os.rename(path, removed)
    except FileNotFoundError:  # another process removed it first
        return
    shutil.rmtree(removed, ignore_errors=True)


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
