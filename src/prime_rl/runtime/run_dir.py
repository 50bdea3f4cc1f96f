"""The run directory: its folders, leftovers of earlier runs, and attempts."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from rollouts.training.steps import complete_steps, latest_step, parse_step, step_path

AVERAGE_DIR = "average"
"""Directory of published EMA weights."""

BROADCASTS_DIR = "broadcasts"
"""Directory of announcements of versions that servers receive over a process group."""

WEIGHTS_DIR, ROLLOUTS_DIR, CHECKPOINTS_DIR = "weights", "rollouts", "checkpoints"
STEP_DIRS = (ROLLOUTS_DIR, WEIGHTS_DIR, BROADCASTS_DIR, AVERAGE_DIR, CHECKPOINTS_DIR)
VERSION_DIRS = (WEIGHTS_DIR, BROADCASTS_DIR, AVERAGE_DIR)
"""Folders in which a step implies an optimizer step."""

ARCHIVE_DIR = "attempts"
"""Files of abandoned attempts are moved to `attempts/N`; nothing reads them."""

ATTEMPTS_FILE = "attempts.jsonl"
RESUME_OPTION = "--ckpt.resume-step -1"


def find_steps(root: Path) -> list[int]:
    """Every `step_N` below `root`, complete or not, ascending."""
    return sorted(step for path in Path(root).glob("step_*") if (step := parse_step(path.name)) is not None)


def find_used(out: Path, names: Iterable[str] = STEP_DIRS) -> dict[str, list[int]]:
    """The existing steps by folder; folders without steps are omitted."""
    return {name: steps for name in names if (steps := find_steps(Path(out) / name))}


def check_resumable(out: Path, parts: Collection[str], options: str = "") -> None:
    """Raise `ValueError` if a resumed run would start from the beginning in a directory with trained steps.

    Without a complete checkpoint a resumed run starts from the beginning. That is correct in a new directory or after
    a run without optimizer steps, and would overwrite any other run.
    """
    trained = find_used(out, VERSION_DIRS) or complete_steps(Path(out) / CHECKPOINTS_DIR, ("trainer",))
    if trained and not complete_steps(Path(out) / CHECKPOINTS_DIR, parts):
        raise ValueError(describe_used(out, parts, options=options))


def describe_used(out: Path, parts: Collection[str], *, resume: str = RESUME_OPTION, options: str = "") -> str:
    """Why a run must not start in `out`, and how to fix it; `options` are further fixes of the command."""
    listed = ", ".join(f"{name} up to step_{steps[-1]}" for name, steps in find_used(out).items())
    commit, version = latest_step(Path(out) / CHECKPOINTS_DIR, parts), latest_step(Path(out) / WEIGHTS_DIR)
    if commit is not None:
        missing, cure = "", f"continue after step {commit} with {resume}, choose another --output-dir"
    elif version is not None:
        missing = " and no complete checkpoint to resume from"
        start = step_path(Path(out) / WEIGHTS_DIR, version)
        cure = f"start a new run from its last weights: --model.name {start} --output-dir NEW"
    else:
        missing, cure = " and no complete checkpoint to resume from", "choose another --output-dir"
    return f"output_dir {out} holds an earlier run ({listed}){missing}\n  {cure}{options}"


def set_aside(out: Path, paths: Iterable[Path]) -> Path | None:
    """Move existing `paths` below `out` to a new `attempts/N` under the same relative names; None if there are none."""
    existing = [path for path in paths if path.exists()]
    if not existing:
        return None
    folder = _create_archive(Path(out) / ARCHIVE_DIR)
    for path in existing:
        target = folder / path.relative_to(out)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, target)
    return folder


def set_aside_later(out: Path, last: Mapping[str, int], part: str | None = None) -> Path | None:
    """Archive the steps after `last[name]` of each folder `name`; of checkpoints only `part`, if given.

    Resuming abandons these steps, and the continued run creates steps with the same numbers.
    """
    later = [step_path(out / name, step) for name in last for step in find_steps(out / name) if step > last[name]]
    partial = [path for path in later if part is not None and path.parent.name == CHECKPOINTS_DIR]
    folder = set_aside(out, [path / part if path in partial and part is not None else path for path in later])
    for path in partial:
        with contextlib.suppress(OSError):  # it contains parts of other processes
            path.rmdir()
    return folder


def begin_attempt(out: Path, process: str, step: int) -> int:
    """Record that `process` continues after `step` (0: from the beginning); returns the attempt number."""
    from rollouts.training.metrics import append_jsonl, load_jsonl  # lazy: --help imports this module

    numbers = [row["attempt"] for row in load_jsonl(Path(out) / ATTEMPTS_FILE) if row.get("process") == process]
    # Runs of an older version have no recorded attempt, which counts as number 0.
    number = max(numbers) + 1 if numbers else int(step > 0)
    row = {"process": process, "attempt": number, "step": step, "timestamp": time.time()}
    append_jsonl(Path(out) / ATTEMPTS_FILE, [row])
    return number


class Attempts:
    """Maps steps to attempts by `attempts.jsonl`, which is re-read after a change.

    A row of the step that a run resumed from, such as a late evaluation, belongs to the attempt that made the step.
    Trainers record their own attempts; every other process uses those of the orchestrator.
    """

    def __init__(self, out: Path, process: str) -> None:
        self._path = Path(out) / ATTEMPTS_FILE
        self._process = process if process in ("trainer", "sft") else "orchestrator"
        self._size = 0
        self._starts: list[tuple[int, int]] = []

    def find(self, step: int) -> int:
        """The number of the last attempt that started before `step`; 0 if none is recorded."""
        try:
            size = self._path.stat().st_size
        except OSError:
            return 0
        if size != self._size:
            from rollouts.training.metrics import load_jsonl

            rows = (row for row in load_jsonl(self._path) if row.get("process") == self._process)
            self._size, self._starts = size, [(row["attempt"], row["step"]) for row in rows]
        return max((number for number, start in self._starts if start < step), default=0)


def _create_archive(root: Path) -> Path:
    """Create a new `root/N`, safely against concurrent processes."""
    root.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(path.name) for path in root.glob("*") if path.name.isdigit()), default=0)
    while True:
        try:
            (root / str(number)).mkdir()
        except FileExistsError:
            number += 1
            continue
        return root / str(number)
