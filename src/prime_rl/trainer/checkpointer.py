"""Checkpoints of a run: where it starts, and when it saves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from loguru import logger

from prime_rl.runtime.run_dir import RunDir
from prime_rl.trainer.backend import Backend
from prime_rl.trainer.ckpt import PART, load_checkpoint, read_progress, save_checkpoint
from prime_rl.trainer.config import CkptConfig, SFTConfig, TrainConfig
from prime_rl.trainer.optim import build_schedule
from prime_rl.trainer.optim_config import check_schedule
from rollouts.training.backends.ranks import Ranks
from rollouts.training.steps import is_due, prune_commits, prune_steps, remove_unfinished

Config = TypeVar("Config", TrainConfig, SFTConfig)


@dataclass(frozen=True)
class Checkpointer:
    """Saves `checkpoints/step_N/trainer` as configured; a checkpoint is complete with all `parts`."""

    root: Path
    backend: Backend
    config: CkptConfig | None
    max_steps: int | None
    parts: tuple[str, ...] = (PART,)

    def is_due(self, step: int) -> bool:
        """Whether to save after this step: every `interval` steps and after the last."""
        return self.config is not None and is_due(step, self.config.interval, self.max_steps)

    def save(self, step: int, progress: Mapping[str, Any]) -> None:
        """Save the training state and prune older checkpoints (collective)."""
        assert self.config is not None, "a checkpoint is due"
        keep = self.config.keep
        _save(self.root, step, self.backend, progress)
        self.backend.ranks.run_on_rank0(lambda: prune_commits(self.root, keep, self.parts))


def _save(root: Path, step: int, backend: Backend, progress: Mapping[str, Any]) -> None:
    save_checkpoint(
        root,
        step,
        backend.parameters,
        backend.stepper,
        progress,
        backend.ranks,
        backend.shard_map,
        average=None if backend.average is None else backend.average.by_name,
        adapter=backend.adapter,
    )


def archive_earlier_run(run: RunDir) -> None:
    """Move steps that a new run would overwrite, such as those of another run with fake data, to `attempts/N`."""
    first = dict.fromkeys((run.weights, run.average, run.checkpoints), -1)
    if (folder := run.archive_steps(first, PART)) is not None:
        logger.info(f"Versions of an earlier run moved to {folder}")


def read_resume_state(config: Config, process: str, ranks: Ranks) -> tuple[Config, dict[str, Any], int | None]:
    """The config of this attempt, and progress and step of its checkpoint, whose files are intact, or `{}` and None.

    Rank 0 selects the step, because other ranks may see an older state of a shared file system. Without an
    orchestrator, whose step must be the same, damaged checkpoints are skipped when the latest is wanted. If that is
    where the last attempt of `process` began, this one skips the same parts of it.
    """
    run, ckpt = RunDir(config.output_dir), config.ckpt
    found: list[tuple[list[str], dict[str, Any], int]] = []

    def find() -> None:
        if ckpt is None:
            return
        skips_damaged = ckpt.resume_step == -1 and config.ckpt_parts == (PART,)
        if skips_damaged:
            run.quarantine_corrupt_checkpoints(config.ckpt_parts)
        step = run.find_resume_step(ckpt.resume_step, config.ckpt_parts, verify=() if skips_damaged else (PART,))
        if step is not None:
            skips = run.find_skips(process, step) if ckpt.resume_step == -1 else []
            resumed = ckpt.model_copy(update=dict.fromkeys(skips, True))
            found.append((resumed.skips, read_progress(run.checkpoints, step, resumed), step))

    ranks.run_on_rank0(find)
    skips, progress, step = json.loads(ranks.broadcast(json.dumps(found[0] if found else ([], {}, None)).encode()))
    if ckpt is not None:
        config = config.model_copy(update={"ckpt": ckpt.model_copy(update=dict.fromkeys(skips, True))})
    return config, progress, step


def find_unsaved_skips(ckpt: CkptConfig | None) -> list[str]:
    """Skipped parts that the next start from the same checkpoint must skip, too; a new stage has saved its start."""
    return [] if ckpt is None or ckpt.skip_progress else ckpt.skips


def find_first_step(step: int | None, ckpt: CkptConfig | None) -> int:
    """The first step of a run that resumes from checkpoint `step`; a new stage (`skip_progress`) counts from 1."""
    return 1 if step is None or (ckpt is not None and ckpt.skip_progress) else step + 1


def resume(config: TrainConfig | SFTConfig, backend: Backend, step: int | None) -> tuple[dict[str, Any], int]:
    """Load the checkpoint of `step`, from `read_resume_state`, if any; returns its progress and the first step.

    Later steps are moved to `attempts/N`; of a new stage (`skip_progress`) all steps, after its start is saved as
    checkpoint 0. Broadcasts are removed.
    """
    run, ranks, ckpt = RunDir(config.output_dir), backend.ranks, config.ckpt
    ranks.run_on_rank0(lambda: remove_unfinished(run.checkpoints, PART))
    if step is None:
        return {}, 1
    progress: dict[str, Any] = {}
    stepper = backend.stepper
    average = None if backend.average is None else backend.average.by_name

    def load() -> None:
        parameters, shards = backend.parameters, backend.shard_map
        options: dict[str, Any] = {"average": average, "adapter": backend.adapter}
        progress.update(load_checkpoint(run.checkpoints, step, parameters, stepper, ranks, ckpt, shards, **options))

    ranks.run_on_all_ranks(load)
    if stepper.schedule_start and config.max_steps is not None:
        num_steps = config.max_steps - stepper.schedule_start
        described = f"the {num_steps} steps that remain with ckpt.skip_scheduler: raise max_steps"
        check_schedule(config.scheduler, num_steps, described)
        stepper.schedule = build_schedule(config.scheduler, config.optim.lr, num_steps)
    skipped = [] if ckpt is None else [name.removeprefix("skip_") for name in ckpt.skips]
    without = f" without its {', '.join(skipped)}" if skipped else ""
    logger.info(f"Resuming after step {step}{without}")
    first_step = find_first_step(step, ckpt)
    if ckpt is not None and ckpt.skip_progress:
        # Steps of the stage before have higher numbers: `ckpt.keep` would keep them instead, and --resume choose them.
        _save(run.checkpoints, 0, backend, progress)
    last = dict.fromkeys((run.weights, run.average, run.checkpoints), first_step - 1)

    def clear() -> None:
        prune_steps(run.broadcasts, lambda version: False)  # no longer offered
        run.archive_steps(last, PART)

    ranks.run_on_rank0(clear)
    return progress, first_step
