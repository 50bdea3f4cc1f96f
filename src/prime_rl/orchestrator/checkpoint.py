"""The orchestrator's half of a checkpoint, and which steps of an output directory are ours to continue."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from prime_rl.orchestrator.config import CkptConfig
from rollouts.training.steps import (
    complete_steps,
    find_damage,
    latest_step,
    prune_steps,
    publish_dir,
    remove_unfinished,
    step_path,
)

SCHEMA = 1
PART = "orchestrator"
BOTH = ("trainer", PART)
STATE_FILE = "state.json"


class CheckpointStore:
    """Reads and writes `checkpoints/step_N/orchestrator/state.json`; `config` None: no checkpoints."""

    def __init__(self, root: Path, config: CkptConfig | None, max_steps: int | None) -> None:
        self.root = Path(root)
        self.config = config
        self.max_steps = max_steps

    def is_due(self, step: int) -> bool:
        """Every `interval` steps, and after the last."""
        if self.config is None:
            return False
        return step == self.max_steps or (self.config.interval is not None and step % self.config.interval == 0)

    def save(self, step: int, state: Callable[[], dict[str, Any]]) -> None:
        """Publish our half of checkpoint `step` if it is due, and remove halves beyond `keep`."""
        if self.config is None or not self.is_due(step):
            return
        data = msgspec.json.encode({"schema": SCHEMA, "step": step, **state()})
        part = step_path(self.root, step) / PART
        publish_dir(part, lambda directory: _write(directory / STATE_FILE, data), sealed=True)
        if self.config.keep is not None:
            oldest = complete_steps(self.root, (PART,))[-self.config.keep :][0]
            prune_steps(self.root, lambda found: found >= oldest, (PART,))

    def load(self) -> tuple[int, dict[str, Any] | None]:
        """Step and state to continue from, (0, None) for a new run; `ValueError` for a step that is not there."""
        if self.config is None or self.config.resume_step is None:
            return 0, None
        wanted = self.config.resume_step
        step = latest_step(self.root, BOTH) if wanted == -1 else wanted
        if step is None:
            return 0, None
        path = step_path(self.root, step) / PART / STATE_FILE
        if step not in complete_steps(self.root, BOTH):
            have = complete_steps(self.root, BOTH)
            raise ValueError(
                f"ckpt.resume_step = {wanted}: {step_path(self.root, step)} has no complete checkpoint of trainer and "
                f"orchestrator; complete: {', '.join(map(str, have)) or 'none'}"
            )
        if damage := find_damage(path.parent):
            raise ValueError(f"checkpoint {step} is damaged: {damage}\n  name another step in ckpt.resume_step")
        state = msgspec.json.decode(path.read_bytes())
        if state.get("schema") != SCHEMA:
            raise ValueError(f"{path} has schema {state.get('schema')}, this version reads {SCHEMA}")
        return step, state

    def covered(self, version: int) -> int:
        """The last batch that nothing will ask for again once `version` is live: a complete checkpoint is past it."""
        if self.config is None:
            return version
        return min(version, latest_step(self.root, BOTH) or 0)

    def claim_batches(self, rollouts_dir: Path, step: int) -> None:
        """Make sure that no batch after `step` lies there, which a trainer would take for one of this run.

        A run that was told to resume replaces the later batches, also when there was no checkpoint to resume from; a
        new run refuses a directory that holds another's.
        """
        later = [found for found in complete_steps(rollouts_dir) if found > step]
        if later and (self.config is None or self.config.resume_step is None):
            raise ValueError(
                f"{rollouts_dir} holds batches of another run (step_{later[0]} to step_{later[-1]}): choose another "
                "--output-dir, continue with --ckpt.resume-step -1, or remove it"
            )
        prune_steps(rollouts_dir, lambda found: found <= step)
        remove_unfinished(rollouts_dir)


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
