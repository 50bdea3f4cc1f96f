"""A trainer run: its components, the steps, and the setup that both trainers share."""

from __future__ import annotations

import itertools
import os
import shlex
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loguru import logger

from prime_rl.runtime.hang_watchdog import explain_on_signal
from prime_rl.runtime.process_tree import TOKEN_VARIABLE
from prime_rl.runtime.run_dir import RunDir
from prime_rl.telemetry.progress import format_seconds, show_progress
from prime_rl.trainer.backend import Backend, build_backend
from prime_rl.trainer.checkpointer import Checkpointer, archive_earlier_run, find_unsaved_skips, resume
from prime_rl.trainer.command import check_output_dir
from prime_rl.trainer.config import SFTConfig, TrainConfig
from prime_rl.trainer.micro_batch_size import measure_num_rows
from prime_rl.trainer.model_config import ModelConfig
from prime_rl.trainer.parallel_dims import destroy_process_group
from prime_rl.trainer.perf import PerfCounter, StepTimer
from prime_rl.trainer.profiling import record_profile
from prime_rl.trainer.publisher import Publisher, build_publisher
from prime_rl.trainer.step_logger import StepLogger
from prime_rl.transport.weights import read_model_files
from prime_rl.utils.logger import setup_logger
from prime_rl.utils.monitor import Monitor, build_monitor
from rollouts.training.backends.step import StepReport
from rollouts.training.batching import Share, pack_share
from rollouts.training.rl_losses import TokenStats
from rollouts.training.steps import remove_unfinished, step_path
from rollouts.training.types import Sample


@dataclass
class TrainerRun:
    """The components of one run, on one or several ranks.

    `progress` is the resume state; `micro_bs` the rows of a micro-batch; `profile` records the run; `load_options` are
    the options with which a command loads the published weights.
    """

    backend: Backend
    publisher: Publisher
    checkpointer: Checkpointer
    step_logger: StepLogger
    progress: dict[str, Any]
    first_step: int
    max_steps: int | None
    micro_bs: int
    profile: AbstractContextManager[None]
    load_options: str = ""

    @property
    def timer(self) -> StepTimer:
        """Times the phases of a step."""
        return self.step_logger.timer

    def steps(self) -> Iterator[int]:
        """Iterate over the remaining steps; endless without `max_steps`.

        Without a progress bar, logs an estimate of the remaining time after the second step; the first is slower.
        """
        last = self.max_steps
        if last is not None and self.first_step > last:
            logger.info(f"No steps left: the checkpoint is at step {self.first_step - 1}, max_steps is {last}")
        is_hidden = self.backend.ranks.rank != 0
        bar = show_progress("steps", last, self.first_step - 1, lines=False, hidden=is_hidden)
        with self.profile, bar as progress:
            for step in itertools.count(self.first_step):
                if last is not None and step > last:
                    return
                self.step_logger.step = step
                start = time.monotonic()
                yield step
                progress.advance()
                if (
                    step == self.first_step + 1
                    and last is not None
                    and step < last
                    and not (is_hidden or progress.has_bar)
                ):
                    seconds = (last - step) * (time.monotonic() - start)
                    logger.info(f"About {format_seconds(seconds)} for the remaining {last - step} steps")

    def pack(self, samples: Sequence[Sample], seq_len: int) -> Share:
        """Pack this rank's share of the global batch."""
        mesh = self.backend.mesh
        return pack_share(
            samples,
            seq_len,
            mesh.dp_size,
            mesh.dp_rank,
            rows=self.micro_bs,
            quadratic_cost=self.backend.quadratic_cost,
            share_prefixes=self.backend.shares_prefixes,
            num_threads=self.backend.num_threads,
        )

    def finish_step(
        self,
        report: StepReport,
        stats: TokenStats,
        share: Share,
        progress: Mapping[str, Any],
        extra_metrics: Mapping[str, float],
    ) -> dict[str, float]:
        """Log the step, then save a checkpoint if due; returns the metrics.

        In this order no crash loses the metrics of a step that is not repeated; the time of saving counts for the next
        step. `progress` is the resume state in addition to the totals.
        """
        step = self.step_logger.step
        totals = {
            "total_tokens": self.progress.get("total_tokens", 0) + sum(share.lengths),
            "total_samples": self.progress.get("total_samples", 0) + len(share.lengths),
        }
        self.progress = {"micro_bs": self.micro_bs, **totals, **progress}
        backend_metrics = {"optim/skipped_steps": self.backend.stepper.num_skipped, **self.backend.pop_expert_load()}
        extra = {**{f"progress/{name}": total for name, total in totals.items()}, **extra_metrics}
        metrics = self.step_logger.log(report, stats, share, backend_metrics, extra)
        if self.checkpointer.is_due(step):
            self.publisher.wait()
            with self.timer("save_ckpt"):
                self.checkpointer.save(step, self.progress)
        return metrics

    def close(self, *, keeps_output: bool = True) -> int:
        """Flush pending output and destroy the process group; returns the exit code. `keeps_output`: name its paths."""
        self.publisher.wait()
        self.step_logger.monitor.finish()
        destroy_process_group()
        self.publisher.close()
        num_steps, weights_dir = self.backend.stepper.num_steps, self.publisher.run.weights
        logger.success(f"Finished after step {num_steps}" + (f", weights in {weights_dir}" if keeps_output else ""))
        is_launched = TOKEN_VARIABLE in os.environ  # launchers print their own summary
        if self.backend.ranks.rank == 0 and keeps_output and not is_launched:
            resumable = self.checkpointer.config is not None
            sys.stdout.write(summarize(self.publisher.run, num_steps, self.load_options, resumable=resumable))
        return 0


def summarize(run: RunDir, num_steps: int, load_options: str = "", *, resumable: bool) -> str:
    """Output paths and suggested next commands."""
    newest = step_path(run.weights, num_steps)
    table: dict[str, object] = {"metrics": run.metrics, "logs": run.logs}
    if resumable:
        table["resume"] = (
            f"--output-dir {shlex.quote(str(run.root))} --resume, and a higher --max-steps (sft: or --num-epochs)"
        )
    if newest.exists():
        table |= {"weights": newest, "next": f"inference --model.name {shlex.quote(str(newest))}{load_options}"}
    return "".join(f"  {name:<8} {value}\n" for name, value in table.items())


def find_load_options(model: ModelConfig) -> str:
    """Options that load published weights: adapters need the base model of this run, which may be random."""
    changed = model.debug.model_dump(exclude_defaults=True) if model.publishes_adapters else {}
    return "".join(f" --model.debug.{key.replace('_', '-')} {str(value).lower()}" for key, value in changed.items())


def start_backend(config: TrainConfig | SFTConfig, process: str) -> Backend:
    """Check the run directory, set up logging and load the model."""
    run_dir, rank = RunDir(config.output_dir), int(os.environ.get("RANK", "0"))
    if rank == 0:
        check_output_dir(config)  # the command has done it, too, before it recorded its config
    setup_logger(find_log_name(process), config.log, run_dir.logs, console=rank == 0)
    backend = _build_logged_backend(config)
    if config.ckpt is None or config.ckpt.resume_step is None:
        backend.ranks.run_on_rank0(lambda: archive_earlier_run(run_dir))
    return backend


def find_log_name(process: str) -> str:
    """Name of this rank's log file."""
    return process if os.environ.get("WORLD_SIZE", "1") == "1" else f"{process}_rank{os.environ.get('RANK', '0')}"


def build_run(
    config: TrainConfig | SFTConfig,
    process: str,
    backend: Backend,
    step: int | None,
    *,
    tokenizer_dir: Path | None = None,
    chat_template: str | None = None,
    eos_ids: Sequence[int] = (),
) -> TrainerRun:
    """Set up a run; `step`: of the checkpoint to resume from, if any."""
    out, rank, place = RunDir(config.output_dir), backend.ranks.rank, backend.placement
    progress, first_step = resume(config, backend, step)
    if rank == 0:
        for root in out.version_dirs:
            remove_unfinished(root)
        out.begin_attempt(process, first_step - 1, find_unsaved_skips(config.ckpt))
    monitor = build_monitor(out.root, process, config) if rank == 0 else Monitor(out.root, process, silent=True)
    arithmetic = place.dtype if backend.model.rounds_inputs else place.arithmetic
    perf = PerfCounter(backend.whole, place.device, arithmetic, backend.ranks.size, backend.num_threads)
    model_files = read_model_files(backend.model_dir, tokenizer_dir, chat_template, eos_ids)
    if backend.model.own_config is not None:
        model_files = replace(model_files, config=backend.model.own_config)
    run = TrainerRun(
        backend,
        build_publisher(config, backend, model_files, first_step - 1),
        Checkpointer(out.checkpoints, backend, config.ckpt, config.max_steps, config.ckpt_parts),
        StepLogger(monitor, perf, first_step),
        progress,
        first_step,
        config.max_steps,
        choose_micro_bs(config, backend, progress),
        record_profile(config.trace_path, config.memory_profiler_path, place.device, rank),
        find_load_options(config.model),
    )
    if threading.current_thread() is threading.main_thread():
        explain_on_signal(find_log_name(process), out.root, run.step_logger.describe_wait)
    return run


def choose_micro_bs(config: TrainConfig | SFTConfig, backend: Backend, progress: Mapping[str, Any]) -> int:
    """Rows of a micro-batch: as configured or measured, and those of the checkpoint in a resumed run with "auto"."""
    if config.micro_bs != "auto":
        return config.micro_bs
    seq_len = config.data.seq_len if isinstance(config, SFTConfig) else config.model.seq_len
    return progress.get("micro_bs") or measure_num_rows(backend, seq_len)


def _build_logged_backend(config: TrainConfig | SFTConfig) -> Backend:
    started = time.monotonic()
    backend = build_backend(config)
    parameters = list(backend.whole.parameters())
    num_parameters, num_trained = (
        sum(p.numel() for p in parameters),
        sum(p.numel() for p in parameters if p.requires_grad),
    )
    trained = "" if num_trained == num_parameters else f" ({num_trained:,} trainable)"
    place, num_ranks = backend.placement, backend.ranks.size
    attn = "ring" if config.parallel.cp_style == "ring" else place.attn
    where = f"{place.device}" if num_ranks == 1 else f"{num_ranks} x {place.device.type}"
    logger.info(
        f"Model {config.model.name}: {num_parameters:,} parameters{trained} on {where} "
        f"({str(place.dtype).removeprefix('torch.')}, {attn} attention), {time.monotonic() - started:.1f} s"
    )
    return backend
