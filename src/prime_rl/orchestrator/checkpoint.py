"""The orchestrator's half of a checkpoint, and the check of existing steps in an output directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from prime_rl.orchestrator.config import OrchestratorCkptConfig
from prime_rl.runtime.run_dir import CKPT_PARTS, RunDir, find_steps
from rollouts.training.json_files import read_json_file
from rollouts.training.steps import (
    complete_steps,
    is_due,
    latest_step,
    prune_commits,
    publish_dir,
    remove_unfinished,
    step_path,
)

SCHEMA = 1
PART = CKPT_PARTS[1]
STATE_FILE = "state.json"


class CheckpointStore:
    """Reads and writes `checkpoints/step_N/orchestrator/state.json`; `config` None: no checkpoints."""

    def __init__(self, run: RunDir, config: OrchestratorCkptConfig | None, max_steps: int | None) -> None:
        self.run, self.root = run, run.checkpoints
        self.config = config
        self.max_steps = max_steps
        self._abandoned: list[Path] = []
        """Checkpoints after a named one, which are moved aside before the first is saved."""

    def is_due(self, step: int) -> bool:
        """Whether `step` is saved: every `interval` steps, and after the last."""
        return self.config is not None and is_due(step, self.config.interval, self.max_steps)

    def save(self, step: int, state: Callable[[], dict[str, Any]]) -> None:
        """Publish the orchestrator half of checkpoint `step` if due; keep the `keep` newest complete checkpoints."""
        if self.config is None or not self.is_due(step):
            return
        data = msgspec.json.encode({"schema": SCHEMA, "step": step, **state()})
        if self._abandoned:
            # With the trainer's halves, if it is still loading: they would complete halves of this attempt.
            self.run.archive(self._abandoned)
            self._abandoned = []
        part = step_path(self.root, step) / PART
        publish_dir(part, lambda directory: (directory / STATE_FILE).write_bytes(data), sealed=True)
        prune_commits(self.root, self.config.keep, CKPT_PARTS)

    def load(self) -> tuple[int, dict[str, Any] | None]:
        """Step and state to resume from; (0, None) for a new run.

        `ValueError` for a missing step, and for a run of which only weights are left.
        """
        if self.config is None or self.config.resume_step is None:
            return 0, None
        step = self.run.find_resume_step(self.config.resume_step, CKPT_PARTS, verify=(PART,))
        if step is None:
            return 0, None
        path = step_path(self.root, step) / PART / STATE_FILE
        state = read_json_file(path)
        if state.get("schema") != SCHEMA:
            raise ValueError(f"{path} has schema {state.get('schema')}, this version reads {SCHEMA}")
        return step, state

    def covered(self, version: int) -> int:
        """The last batch that is no longer needed once `version` is live: a complete checkpoint covers it."""
        if self.config is None:
            return version
        return min(version, latest_step(self.root, CKPT_PARTS) or 0)

    def claim_batches(self, step: int) -> None:
        """Ensure that no batches after `step` exist, which a trainer would read as batches of this run.

        With `resume_step`, later batches, evaluations and orchestrator halves are moved aside, even without a
        checkpoint to resume from; checkpoints after a named one before the first is saved, because the trainer may
        refuse it. A new run raises `ValueError` for a directory with another run's batches.
        """
        if self.config is not None and self.config.resume_step is not None:
            last = {self.run.rollouts: step, self.run.evals: step}
            if self.config.resume_step == -1:
                last[self.root] = step
            else:
                self._abandoned = [step_path(self.root, other) for other in find_steps(self.root) if other > step]
            self.run.archive_steps(last, PART)
        elif any(other > step for other in complete_steps(self.run.rollouts)):
            raise ValueError(self.run.describe_used(CKPT_PARTS, resume="--ckpt.resume-step -1"))
        remove_unfinished(self.run.rollouts)
        remove_unfinished(self.root, PART)
