"""The run directory: every path below `output_dir`, leftovers of earlier runs, and attempts."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollouts.training.steps import complete_steps, find_damage, latest_step, parse_step, step_path

RESUME_OPTION = "--resume"
CKPT_PARTS = ("trainer", "orchestrator")
"""Parts of `checkpoints/step_N`: each process publishes its own, and a run resumes from steps that have all."""

JOB_LOGS = ("job-*.log", "rl-*.log")
"""Logs of a job, and of `rl` as its task, which are open before `rl` starts."""


@dataclass(frozen=True)
class _Entry:
    """A file or directory of a run directory."""

    name: str

    def __get__(self, run: RunDir, _: type) -> Path:
        return run.root / self.name


@dataclass(frozen=True)
class RunDir:
    """The files of a run below its `output_dir`, `root`."""

    root: Path

    rollouts = _Entry("rollouts")
    """Batches of the orchestrator by step."""
    weights = _Entry("weights")
    """Published versions by step, each a Hugging Face model directory."""
    broadcasts = _Entry("broadcasts")
    """By step: announcements of versions that servers receive over a process group, or deltas of versions."""
    average = _Entry("average")
    """Published EMA weights by step."""
    checkpoints = _Entry("checkpoints")
    """Checkpoints by step, with one part per process."""
    attempts = _Entry("attempts")
    """Files of abandoned attempts, in `attempts/N`; nothing reads them."""
    configs = _Entry("configs")
    """Resolved configurations by process."""
    logs = _Entry("logs")
    """Log files by process."""
    evals = _Entry("evals")
    """Evaluation results, by step if they belong to one."""
    evolve = _Entry("evolve")
    """Contexts of `evolve`."""
    synthesize = _Entry("synthesize")
    """Synthesized data sets."""
    tensorboard = _Entry("tensorboard")
    """TensorBoard event files by process."""
    deployment = _Entry("deployment")
    """Job files of a deployment."""
    hang = _Entry("hang")
    """Hang reports by process."""
    initial = _Entry("initial")
    """Randomly initialized weights that an external inference engine loads."""
    metrics = _Entry("metrics.jsonl")
    """Metrics and timelines of all processes."""
    samples = _Entry("samples.jsonl")
    """Rollouts, one line per sample."""
    trainer_logprobs = _Entry("trainer_logprobs.jsonl")
    """Recorded trainer log-probs, one line per sample."""
    attempt_log = _Entry("attempts.jsonl")
    """The step that each attempt of a process started after."""
    state = _Entry("run_state.json")
    """Which process executes the run, and how it ended."""
    tenants = _Entry("tenants.json")
    """Tenants of the training server, with what they use."""

    def config(self, process: str) -> Path:
        """The resolved configuration of a process."""
        return self.configs / f"{process}.toml"

    def lock(self, part: str) -> Path:
        """The file that is locked by the process that writes `part`, one of `CKPT_PARTS`, "serve" or "evolve"."""
        return self.root / f".lock-{part}"

    def log(self, process: str) -> Path:
        """The log of a process."""
        return self.logs / f"{process}.log"

    def eval_dir(self, env: str, step: int | None = None) -> Path:
        """Results of an environment; `step`: of a version during the run."""
        return (self.evals if step is None else step_path(self.evals, step)) / env.replace("/", "_")

    @property
    def step_dirs(self) -> tuple[Path, ...]:
        """Directories with an entry per step."""
        return self.rollouts, *self.version_dirs, self.checkpoints

    @property
    def version_dirs(self) -> tuple[Path, ...]:
        """Directories in which a step implies an optimizer step."""
        return self.weights, self.broadcasts, self.average

    @property
    def records(self) -> tuple[Path, ...]:
        """Files and directories that describe one run, not its steps.

        Without logs that a cluster's job has open, and without evaluations of models that are no version of the run.
        """
        logs = [path for path in self.logs.glob("*") if not any(map(path.match, JOB_LOGS))]
        tables = self.metrics, self.samples, self.trainer_logprobs, self.attempt_log
        evals = *self.evals.glob("step_*"), *self.evals.glob("baseline_*")
        return *tables, *logs, *evals, self.tensorboard, self.configs, self.state

    def find_resume_step(
        self, requested: int | None, parts: Collection[str], *, verify: Collection[str] = (), options: str = ""
    ) -> int | None:
        """The checkpoint to resume from, of which all `parts` are complete; None to start from the beginning.

        `requested` -1 is the latest complete one. Raises `ValueError` if the requested one does not exist, if files of
        its parts `verify` are damaged, or if a start from the beginning would overwrite trained steps.
        """
        if requested is None:
            return None
        commits = complete_steps(self.checkpoints, parts)
        if requested == -1 and not commits:
            # Correct in a new directory or after a run without optimizer steps; it would overwrite any other run.
            if find_used(self.version_dirs) or complete_steps(self.checkpoints, ("trainer",)):
                raise ValueError(self.describe_used(parts, options=options))
            return None
        step = commits[-1] if requested == -1 else requested
        path = step_path(self.checkpoints, step)
        if step not in commits:
            raise ValueError(
                f"ckpt.resume_step = {step}: {path} has no complete checkpoint of {' and '.join(parts)}; "
                f"complete: {', '.join(map(str, commits)) or 'none'}\n  name one of them, or -1 for the latest"
            )
        if damage := _find_damaged_part(path, verify):
            raise ValueError(f"checkpoint {step} is damaged: {damage}\n  name another step in ckpt.resume_step")
        return step

    def quarantine_corrupt_checkpoints(self, parts: Collection[str]) -> None:
        """Rename checkpoints with corrupt `parts` above the newest intact one, so that resuming skips them."""
        for step in reversed(complete_steps(self.checkpoints, parts)):
            path = step_path(self.checkpoints, step)
            if (damage := _find_damaged_part(path, parts)) is None:
                return
            aside = self.checkpoints / f"damaged-{path.name}-{time.time_ns()}"
            path.rename(aside)
            sys.stdout.write(f"warning: checkpoint {step} is damaged ({damage}): renamed to {aside.name}\n")

    def describe_used(self, parts: Collection[str], *, resume: str = RESUME_OPTION, options: str = "") -> str:
        """Why a run must not start here, and how to fix it; `options` are further fixes of the command."""
        listed = ", ".join(f"{path.name} up to step_{steps[-1]}" for path, steps in find_used(self.step_dirs).items())
        commit, version = latest_step(self.checkpoints, parts), latest_step(self.weights)
        if commit is not None:
            missing, cure = "", f"continue after step {commit} with {resume}, choose another --output-dir"
        elif version is not None:
            missing = " and no complete checkpoint to resume from (ckpt.interval = N writes one every N steps)"
            start = shlex.quote(str(step_path(self.weights, version)))
            cure = f"start a new run from its last weights: --model.name {start} --output-dir NEW"
        else:
            missing, cure = " and no complete checkpoint to resume from", "choose another --output-dir"
        return f"output_dir {self.root} holds an earlier run ({listed}){missing}\n  {cure}{options}"

    def archive(self, paths: Iterable[Path]) -> Path | None:
        """Move existing `paths` to a new `attempts/N` under the same relative names; None if there are none.

        Another process may move some of them meanwhile.
        """
        existing = [path for path in paths if path.exists()]
        if not existing:
            return None
        folder = _create_numbered(self.attempts)
        for path in existing:
            target = folder / path.relative_to(self.root)
            target.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                shutil.move(path, target)
        return folder

    def archive_steps(self, last: Mapping[Path, int], part: str | None = None) -> Path | None:
        """Archive the steps after `last[directory]` of each directory; of checkpoints only `part`, if given.

        Resuming abandons these steps, and the continued run creates steps with the same numbers.
        """
        later = [step_path(root, step) for root in last for step in find_steps(root) if step > last[root]]
        partial = [path for path in later if part is not None and path.parent == self.checkpoints]
        folder = self.archive(path / part if part is not None and path in partial else path for path in later)
        for path in partial:
            with contextlib.suppress(OSError):  # it contains parts of other processes
                path.rmdir()
        return folder

    def begin_attempt(self, process: str, step: int, skips: Sequence[str] = ()) -> int:
        """Record that `process` continues after `step` (0: from the beginning); returns the attempt number.

        `skips`: keys of the parts of the checkpoint that it did not load.
        """
        from rollouts.training.metrics import append_jsonl  # lazy: --help imports this module

        numbers = [row["attempt"] for row in self.load_attempts(process)]
        # Runs of an older version have no recorded attempt, which counts as number 0.
        number = max(numbers) + 1 if numbers else int(step > 0)
        row = {"process": process, "attempt": number, "step": step, "timestamp": time.time()}
        append_jsonl(self.attempt_log, [row | {"skips": skips} if skips else row])
        return number

    def find_skips(self, process: str, step: int) -> list[str]:
        """What the last attempt of `process` did not load of checkpoint `step`; empty if it began after another."""
        last = (self.load_attempts(process) or [{}])[-1]
        return list(last.get("skips", ())) if last.get("step") == step else []

    def find_first_step(self, process: str) -> int | None:
        """The first step of the last attempt of `process`; None if it records none."""
        rows = self.load_attempts(process)
        return rows[-1]["step"] + 1 if rows else None

    def count_starts(self, *processes: str) -> int:
        """Number of recorded attempts of these processes."""
        return len(self.load_attempts(*processes))

    def has_resumed(self, process: str, step: int, stopped: float) -> bool:
        """Whether `process` has begun an attempt after `step` since the time `stopped`; True if it records none.

        Processes that start on their own do so in any order, and each counts its own attempts.
        """
        rows = self.load_attempts(process)
        return not rows or bool(rows[-1]["step"] == step and rows[-1].get("timestamp", 0.0) > stopped)

    def find_last_record(self, process: str) -> float:
        """The time of the last row of a process in metrics.jsonl; 0 without one."""
        from rollouts.training.metrics import load_jsonl

        times = (row["timestamp"] for row in load_jsonl(self.metrics) if row.get("process") == process)
        return max(times, default=0.0)

    def load_attempts(self, *processes: str) -> list[dict[str, Any]]:
        """The recorded attempts of these processes."""
        from rollouts.training.metrics import load_jsonl

        return [row for row in load_jsonl(self.attempt_log) if row.get("process") in processes]


class Attempts:
    """Maps steps to attempts by `attempts.jsonl`, which is re-read after a change.

    A row of the step that a run resumed from, such as a late evaluation, belongs to the attempt that made the step, one
    of step 0 to the last attempt that began there. Trainers record their own attempts; every other process uses those
    of the orchestrator.
    """

    def __init__(self, out: Path, process: str) -> None:
        self._run = RunDir(out)
        self._process = process if process in ("trainer", "sft") else "orchestrator"
        self._size = 0
        self._starts: list[tuple[int, int]] = []

    def find(self, step: int) -> int:
        """The number of the last attempt that made `step`; 0 if none is recorded."""
        try:
            size = self._run.attempt_log.stat().st_size
        except OSError:
            return 0
        if size != self._size:
            rows = self._run.load_attempts(self._process)
            self._size, self._starts = size, [(row["attempt"], row["step"]) for row in rows]
        return max((number for number, start in self._starts if start < max(step, 1)), default=0)


@contextmanager
def lock_file(path: Path, message: str) -> Iterator[None]:
    """Exclusive lock on a file, which is created, released when this process exits.

    Raises `ValueError` with `message` if another process has it. Without effect on a file system without locks.
    """
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(message) from None
        except OSError:
            pass
        yield


@contextmanager
def lock_output_dir(out: Path, *parts: str) -> Iterator[None]:
    """Exclusive lock on the `parts` (see `RunDir.lock`) of a run directory, as `lock_file`."""
    message = f"output_dir {out} is in use by another run: choose another --output-dir"
    with contextlib.ExitStack() as stack:
        for part in parts:
            stack.enter_context(lock_file(RunDir(out).lock(part), message))
        yield


def find_steps(root: Path) -> list[int]:
    """Every `step_N` below `root`, complete or not, ascending."""
    return sorted(step for path in root.glob("step_*") if (step := parse_step(path.name)) is not None)


def find_used(roots: Iterable[Path]) -> dict[Path, list[int]]:
    """The existing steps by directory; directories without steps are omitted."""
    return {root: steps for root in roots if (steps := find_steps(root))}


def _find_damaged_part(path: Path, parts: Collection[str]) -> str | None:
    """`find_damage` of the first damaged part of a checkpoint."""
    return next(filter(None, (find_damage(path / part) for part in parts)), None)


def _create_numbered(root: Path) -> Path:
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
