"""Shared entry point of the `trainer` and `sft` commands; imports nothing heavy."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from prime_rl.configuration.command import run_command
from prime_rl.runtime.machine import share_heap
from prime_rl.runtime.process_tree import TOKEN_VARIABLE
from prime_rl.runtime.run_dir import CKPT_PARTS, RunDir, find_used
from prime_rl.runtime.run_page import offer_page
from prime_rl.runtime.run_state import StateRecorder
from rollouts.training.steps import complete_steps

if TYPE_CHECKING:
    from prime_rl.trainer.config import SFTConfig, TrainConfig, TrainerConfig
    from prime_rl.trainer.parallel_config import ParallelDims


def run_trainer(
    prog: str,
    config_cls: str,
    train: Callable[[Any], int],
    *,
    summary: str,
    preview: Callable[[Any], str | None] = lambda _: None,
) -> NoReturn:
    """`run_command` for a trainer; with process groups, of ranks or for weights, exit without interpreter shutdown.

    Threads of gloo and NCCL can outlive the process group; one that still releases a tensor during interpreter
    shutdown is unwound by force, and the finished rank dies of SIGABRT ("terminate called without an active
    exception"). `atexit` handlers still run.
    """
    has_groups = int(os.environ.get("WORLD_SIZE", "1")) > 1

    def run(config: Any) -> int:
        nonlocal has_groups
        share_heap()
        has_groups = has_groups or (prog == "trainer" and config.weight_broadcast.type != "filesystem")
        from prime_rl.telemetry.trackers import check_trackers
        from prime_rl.utils.logger import find_level

        find_level(config.log.level)  # before the model is downloaded or loaded
        check_trackers(config)
        if config.bench or is_submission(config) or int(os.environ.get("RANK", "0")):
            return train(config)
        is_open = prog == "sft" and config.open
        with offer_page(config.output_dir, is_open), StateRecorder(config.output_dir, prog):
            if code := train(config):
                raise SystemExit(code)
        return 0

    def check(config: Any) -> None:
        if not config.bench and int(os.environ.get("RANK", "0")) == 0:  # a benchmark has a directory of its own
            check_output_dir(config)

    def is_submission(config: Any) -> bool:
        return bool(prog == "sft" and config.deployment.type != "local")

    def writes(config: Any) -> bool:
        on_claim = is_submission(config) and config.deployment.type == "kubernetes"  # a volume of the pods
        return not config.bench and not on_claim

    def find_lock(config: Any) -> str | None:
        is_other_rank = int(os.environ.get("RANK", "0")) > 0
        return None if is_submission(config) or is_other_rank or config.bench else "trainer"

    try:
        run_command(
            prog,
            config_cls,
            run,
            summary=summary,
            preview=preview,
            check=check,
            record=lambda config: build_record(config) if writes(config) else None,
            writes=writes,
            locks=find_lock,
        )
    except SystemExit as exit_:
        if not has_groups:
            raise
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_.code if isinstance(exit_.code, int) else 1)


def build_record(config: TrainerConfig) -> TrainerConfig | None:
    """The config to record, without options of this start: a start from the record would skip the parts again.

    None for a benchmark, which writes no output, for a rank of `run_ranks`, whose launcher has recorded it, and for
    ranks other than 0.
    """
    is_launched = "RANK" in os.environ and (TOKEN_VARIABLE in os.environ or int(os.environ["RANK"]) > 0)
    return None if config.bench or is_launched else config.for_later_starts(config.find_single_use())


def check_output_dir(config: TrainConfig | SFTConfig) -> None:
    """Ensure that a run neither mixes with another one nor overwrites its output.

    Raises `ValueError` without the checkpoint to resume from, and for a new run in a directory with steps of another
    one; a run with fake data moves these away instead. For rank 0: others may see an older state of the file system.
    """
    run, resume_step = RunDir(config.output_dir), None if config.ckpt is None else config.ckpt.resume_step
    if resume_step is not None:
        run.find_resume_step(resume_step, config.ckpt_parts)
        return
    # An orchestrator started earlier may already have published its checkpoint parts.
    used = find_used(run.version_dirs) or complete_steps(run.checkpoints, CKPT_PARTS[:1])
    inside = Path(config.model.name).expanduser().resolve().is_relative_to(run.weights.resolve())
    if used and (not config.has_fake_data or inside or find_used([run.broadcasts])):
        raise ValueError(run.describe_used(config.ckpt_parts))


def count_missing_ranks(parallel: ParallelDims, environ: Mapping[str, str]) -> int:
    """Number of ranks this process must launch; 0 when it is a rank itself or runs alone."""
    return 0 if "WORLD_SIZE" in environ or parallel.num_ranks == 1 else parallel.num_ranks
