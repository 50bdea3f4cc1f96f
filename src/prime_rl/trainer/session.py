"""Training-loop infrastructure of both trainers: setup, resume, metrics, console, weights and checkpoints."""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from loguru import logger
from torch import Tensor

from prime_rl.runtime.hang_watchdog import WaitStatus, explain_on_signal
from prime_rl.runtime.process import TOKEN_VARIABLE
from prime_rl.runtime.run_dir import (
    AVERAGE_DIR,
    BROADCASTS_DIR,
    CHECKPOINTS_DIR,
    VERSION_DIRS,
    WEIGHTS_DIR,
    begin_attempt,
    check_resumable,
    describe_used,
    find_used,
    set_aside_later,
)
from prime_rl.telemetry.progress import show_progress
from prime_rl.trainer.backend import Backend, build_backend
from prime_rl.trainer.ckpt import (
    PART,
    find_resume_step,
    is_checkpoint_due,
    load_checkpoint,
    save_checkpoint,
)
from prime_rl.trainer.config import (
    ConstantSchedulerConfig,
    LinearSchedulerConfig,
    SchedulerConfig,
    SFTConfig,
    TrainConfig,
)
from prime_rl.trainer.optim import build_schedule
from prime_rl.trainer.parallel_dims import destroy_process_group
from prime_rl.trainer.perf import PerfCounter, StepTimer
from prime_rl.trainer.profiling import record_profile
from prime_rl.transport import weights
from prime_rl.transport.broadcast import WeightSender, announce, is_taken
from prime_rl.transport.file_watch import wait_for_blocking
from prime_rl.transport.logprob_check import Canary
from prime_rl.utils.logger import setup_logger
from prime_rl.utils.monitor import Monitor, build_monitor
from rollouts.training.backends.ranks import Ranks
from rollouts.training.backends.step import StepReport
from rollouts.training.batching import Share, pack_share
from rollouts.training.rl_losses import TokenStats
from rollouts.training.steps import complete_steps, prune_commits, remove_unfinished, step_path
from rollouts.training.types import Sample

WAITING = "wait_for_batch"
WAIT_LOG_INTERVAL_S = 30.0
SKIPS = ("optimizer", "scheduler", "dataloader", "progress")


@dataclass
class TrainerBase:
    """One trainer run, on one or several ranks; only rank 0 writes."""

    config: TrainConfig | SFTConfig
    backend: Backend
    monitor: Monitor
    perf: PerfCounter
    first_step: int
    progress: dict[str, Any]
    model_files: weights.ModelFiles
    """Config and tokenizer files of the initial model, with overrides; published with every version."""
    ckpt_parts: tuple[str, ...] = (PART,)
    """Parts required for a complete checkpoint."""
    broadcaster: WeightSender | None = None
    """Sends weights to the engines from rank 0; None: engines read files."""
    shutdown_timeout_s: float = 0.0
    """Maximum wait at the end for the engines to receive the last version."""
    timer: StepTimer = field(init=False)
    step: int = field(init=False)

    def __post_init__(self) -> None:
        self.step = self.first_step
        self.timer = StepTimer(lambda what, start, end: self.monitor.log_timeline(what, start, end, self.step))

    @property
    def ranks(self) -> Ranks:
        """Rank and world size of this process."""
        return self.backend.ranks

    @property
    def weights_dir(self) -> Path:
        """Directory of the published weights."""
        return self.config.output_dir / "weights"

    @property
    def ckpt_dir(self) -> Path:
        """Directory of the published checkpoints."""
        return self.config.output_dir / "checkpoints"

    def steps(self) -> Iterator[int]:
        """Iterate over the remaining steps; endless without `max_steps`."""
        last = self.config.max_steps
        if last is not None and self.first_step > last:
            logger.info(f"No steps left: the checkpoint is at step {self.first_step - 1}, max_steps is {last}")
        bar = show_progress("steps", last, self.first_step - 1, lines=False, hidden=self.ranks.rank != 0)
        with record_profile(self.config, self.backend.placement.device, self.ranks.rank), bar as progress:
            for step in itertools.count(self.first_step):
                if last is not None and step > last:
                    return
                self.step = step
                yield step
                progress.advance()

    def pack(self, samples: Sequence[Sample], seq_len: int) -> Share:
        """Pack this rank's share of the global batch."""
        return pack_share(
            samples,
            seq_len,
            self.backend.mesh.dp_size,
            self.backend.mesh.dp_rank,
            rows=self.config.micro_bs,
            quadratic_cost=self.backend.quadratic_cost,
        )

    @property
    def average_dir(self) -> Path:
        """Directory of the published moving averages (EMA)."""
        return self.config.output_dir / AVERAGE_DIR

    @property
    def broadcasts_dir(self) -> Path:
        """Directory of the announcements of weights sent by this process."""
        return self.config.output_dir / BROADCASTS_DIR

    def publish_weights(self, step: int, *, keep: bool = True, texts: Sequence[Sequence[int]] = ()) -> None:
        """Publish the moving average, if any, and the model as `weights/step_N` (collective).

        With a broadcaster the version is offered and announced, and files are written only with `keep`. The canary
        also scores tokens of `texts`.
        """
        if self.backend.average is not None:
            with self.backend.average.in_place():
                self._publish(self.average_dir, step, None, self.backend.export_state_dict())
        canary, tensors = self.backend.compute_canary(step, texts), self.backend.export_state_dict()
        if self.broadcaster is not None:
            self.ranks.run_on_rank0(partial(self._offer, self.broadcaster, step, canary, tensors))
        if self.broadcaster is None or keep:
            self._publish(self.weights_dir, step, canary, tensors)

    def _offer(self, broadcaster: WeightSender, step: int, canary: Canary, tensors: dict[str, Tensor]) -> None:
        root = self.broadcasts_dir
        received = [version for version in complete_steps(root) if is_taken(step_path(root, version))]
        broadcaster.forget_before(max(received, default=0))  # engines only move forward
        manifest = broadcaster.offer(step, tensors, self.backend.adapter_config)
        announce(root, manifest, broadcaster.address, canary)

    def _publish(self, root: Path, step: int, canary: Canary | None, tensors: dict[str, Tensor]) -> None:
        self.ranks.run_on_rank0(
            lambda: weights.publish_weights(
                root,
                step,
                tensors,
                self.model_files,
                num_layers=self.backend.num_layers,
                tie_word_embeddings=self.backend.model.config.tie_word_embeddings,
                adapter_config=self.backend.adapter_config,
                canary=canary,
            )
        )

    def finish_step(
        self,
        report: StepReport,
        stats: TokenStats,
        share: Share,
        progress: Mapping[str, Any],
        extra_metrics: Mapping[str, float] | None = None,
    ) -> dict[str, float]:
        """Save a checkpoint if due, then log the step; returns its metrics.

        `progress` is the resume state in addition to the totals.
        """
        lengths = share.lengths
        totals = {
            "total_tokens": self.progress.get("total_tokens", 0) + sum(lengths),
            "total_samples": self.progress.get("total_samples", 0) + len(lengths),
        }
        self.progress = {**totals, **progress}
        self._save_checkpoint()
        seconds = self.timer.lap()
        busy = sum(value for what, value in seconds.items() if what != f"time/{WAITING}")
        metrics: dict[str, float] = {
            **stats.summary(),
            "optim/lr": report.lr,
            "optim/grad_norm": report.grad_norm,
            "optim/skipped_steps": self.backend.stepper.num_skipped,
            **self.backend.pop_expert_load(),
            **self.perf.observe(lengths, busy),
            **seconds,
            "time/step": busy + seconds.get(f"time/{WAITING}", 0.0),
            "batch/micro_batches": len(share.micros),
            "batch/padding_ratio": share.padding_ratio,
            "batch/rank_imbalance": share.imbalance,
            "batch/tokens": sum(lengths),
            "batch/samples": len(lengths),
            "progress/total_tokens": totals["total_tokens"],
            "progress/total_samples": totals["total_samples"],
            **(extra_metrics or {}),
        }
        self.monitor.log(metrics, self.step)
        if report.skipped:
            logger.warning(f"Skipped optimizer step {self.step}: {report.skipped}")
        logger.info(format_step(self.step, metrics))
        return metrics

    def describe_wait(self) -> WaitStatus:
        """Current activity of this process, for hang reports."""
        what, start = self.timer.current or ("an untimed section", time.time())
        waiting = what == WAITING
        status = "is waiting for the batch" if waiting else f"is in {what}"
        on = "orchestrator" if waiting else None
        return WaitStatus(f"{status} of step {self.step}", on, time.time() - start)

    def close(self) -> int:
        """Flush pending output and destroy the process group; returns the exit code."""
        self.monitor.finish()
        destroy_process_group()
        if self.broadcaster is not None and self.ranks.rank == 0:
            self._drain_receivers(self.broadcaster)
        logger.success(f"Finished after step {self.backend.stepper.num_steps}, weights in {self.weights_dir}")
        if self.ranks.rank == 0 and TOKEN_VARIABLE not in os.environ:  # launchers print their own summary
            sys.stdout.write(self._summary())
        return 0

    def _drain_receivers(self, broadcaster: WeightSender) -> None:
        """Wait until every engine has received the final weights, which are only in memory."""
        last = step_path(self.broadcasts_dir, self.backend.stepper.num_steps)
        waited = 0.0
        while last.exists() and not is_taken(last) and waited < self.shutdown_timeout_s:
            try:
                what = f"the engines to receive {last.name}"
                wait_for_blocking(lambda: is_taken(last) or None, last.parent, timeout_s=WAIT_LOG_INTERVAL_S, what=what)
            except TimeoutError as error:
                waited += WAIT_LOG_INTERVAL_S
                logger.info(f"Draining receivers: {error}")
        broadcaster.close()

    def _summary(self) -> str:
        """Output paths and suggested next commands."""
        out, newest = self.config.output_dir, step_path(self.weights_dir, self.backend.stepper.num_steps)
        table: dict[str, object] = {"metrics": out / "metrics.jsonl", "logs": out / "logs"}
        if self.config.ckpt is not None:
            table["resume"] = f"--output-dir {out} --ckpt.resume-step -1, and a higher --max-steps"
        if newest.exists():
            table |= {"weights": newest, "next": f"env eval @ configs/debug/eval.toml --model.name {newest}"}
        return "".join(f"  {name:<8} {value}\n" for name, value in table.items())

    def _save_checkpoint(self) -> None:
        ckpt = self.config.ckpt
        if ckpt is None or not is_checkpoint_due(self.step, ckpt, self.config.max_steps):
            return
        with self.timer("save_ckpt"):
            backend = self.backend
            save_checkpoint(
                self.ckpt_dir,
                self.step,
                backend.parameters,
                backend.stepper,
                self.progress,
                self.ranks,
                backend.shard_map,
                average=None if backend.average is None else backend.average.by_name,
            )
            self.ranks.run_on_rank0(lambda: prune_commits(self.ckpt_dir, ckpt.keep, self.ckpt_parts))


def build_session(
    config: TrainConfig | SFTConfig,
    process: str,
    *,
    ckpt_parts: tuple[str, ...] = (PART,),
    tokenizer_dir: Path | None = None,
    chat_template: str | None = None,
    is_fake_data: bool = False,
) -> TrainerBase:
    """Set up a run, resuming from a checkpoint if configured (all `ckpt_parts` must be complete).

    `is_fake_data`: the run uses fake data, see `lock_output_dir`.
    """
    rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    log_name = process if num_ranks == 1 else f"{process}_rank{rank}"
    setup_logger(log_name, config.log, config.output_dir / "logs", console=rank == 0)
    started = time.monotonic()
    backend = build_backend(config)
    num_parameters = sum(p.numel() for p in backend.whole.parameters())
    num_trained = sum(p.numel() for p in backend.whole.parameters() if p.requires_grad)
    trained = "" if num_trained == num_parameters else f" ({num_trained:,} trainable)"
    place = backend.placement
    attn = "ring" if config.parallel.cp_style == "ring" else place.attn
    where = f"{place.device}" if num_ranks == 1 else f"{num_ranks} x {place.device.type}"
    logger.info(
        f"Model {config.model.name}: {num_parameters:,} parameters{trained} on {where} "
        f"({str(place.dtype).removeprefix('torch.')}, {attn} attention), {time.monotonic() - started:.1f} s"
    )
    if config.ckpt is None or config.ckpt.resume_step is None:
        backend.ranks.run_on_rank0(
            lambda: lock_output_dir(config.output_dir, backend, ckpt_parts, is_fake_data=is_fake_data)
        )
    progress, first_step = resume(config, backend, ckpt_parts)
    if rank == 0:
        remove_unfinished(config.output_dir / "weights")
        remove_unfinished(config.output_dir / BROADCASTS_DIR)
        begin_attempt(config.output_dir, process, first_step - 1)
    monitor = Monitor(config.output_dir, process, silent=True)
    if rank == 0:
        monitor = build_monitor(config.output_dir, process, config)
    session = TrainerBase(
        config=config,
        backend=backend,
        monitor=monitor,
        perf=PerfCounter(backend.whole, place.device, place.arithmetic, num_ranks),
        first_step=first_step,
        progress=progress,
        model_files=weights.read_model_files(backend.model_dir, tokenizer_dir, chat_template),
        ckpt_parts=ckpt_parts,
    )
    if threading.current_thread() is threading.main_thread():
        explain_on_signal(log_name, config.output_dir, session.describe_wait)
    return session


def lock_output_dir(out: Path, backend: Backend, ckpt_parts: tuple[str, ...], *, is_fake_data: bool) -> None:
    """Ensure that a new run neither mixes with another run nor overwrites its output.

    Raises `ValueError` for a directory with steps of another run; with `is_fake_data` these are moved to `attempts/N`
    instead.
    """
    # An orchestrator started earlier may already have published its checkpoint parts.
    used = find_used(out, VERSION_DIRS) or complete_steps(out / CHECKPOINTS_DIR, (PART,))
    inside = backend.model_dir.is_relative_to((out / WEIGHTS_DIR).resolve())
    if used and (not is_fake_data or inside or find_used(out, [BROADCASTS_DIR])):
        raise ValueError(describe_used(out, ckpt_parts))
    first = dict.fromkeys((WEIGHTS_DIR, AVERAGE_DIR, CHECKPOINTS_DIR), -1)
    if (folder := set_aside_later(out, first, PART)) is not None:
        logger.info(f"Versions of an earlier run moved to {folder}")


def resume(
    config: TrainConfig | SFTConfig, backend: Backend, ckpt_parts: tuple[str, ...]
) -> tuple[dict[str, Any], int]:
    """Load the configured checkpoint, if any; returns the saved progress and the first step.

    Rank 0 selects the step, because other ranks may see an older state of a shared file system. Later steps are moved
    to `attempts/N`.
    """
    root, ranks, ckpt = config.output_dir / CHECKPOINTS_DIR, backend.ranks, config.ckpt
    chosen: list[int | None] = []

    def choose() -> None:
        chosen.append(find_resume_step(root, ckpt, ckpt_parts))
        if chosen == [None] and ckpt is not None and ckpt.resume_step is not None:
            check_resumable(config.output_dir, ckpt_parts)

    ranks.run_on_rank0(choose)
    step: int | None = json.loads(ranks.broadcast(json.dumps(chosen[0] if chosen else None).encode()))
    ranks.run_on_rank0(lambda: remove_unfinished(root, PART))
    if step is None:
        return {}, 1
    progress: dict[str, Any] = {}
    stepper = backend.stepper
    average = None if backend.average is None else backend.average.by_name
    ranks.run_on_all_ranks(
        lambda: progress.update(
            load_checkpoint(root, step, backend.parameters, stepper, ranks, ckpt, backend.shard_map, average=average)
        )
    )
    if stepper.schedule_start and config.max_steps is not None:
        check_schedule(config.scheduler, config.max_steps - stepper.schedule_start)
        stepper.schedule = build_schedule(config.scheduler, config.optim.lr, config.max_steps - stepper.schedule_start)
    skipped = [name for name in SKIPS if getattr(ckpt, f"skip_{name}")]
    without = f" without its {', '.join(skipped)}" if skipped else ""
    logger.info(f"Resuming after step {step}{without}")
    first_step = 1 if ckpt is not None and ckpt.skip_progress else step + 1
    last = {WEIGHTS_DIR: first_step - 1, AVERAGE_DIR: first_step - 1, CHECKPOINTS_DIR: step}
    ranks.run_on_rank0(lambda: set_aside_later(config.output_dir, last, PART))
    return progress, first_step


def check_schedule(scheduler: SchedulerConfig, num_steps: int) -> None:
    """Raise `ValueError` when a restarted schedule does not fit into the remaining steps."""
    warmup = 0 if isinstance(scheduler, ConstantSchedulerConfig) else scheduler.warmup_steps
    decay = scheduler.decay_steps if isinstance(scheduler, LinearSchedulerConfig) else 0
    if warmup + decay > num_steps:
        raise ValueError(
            f"ckpt.skip_scheduler: warmup_steps {warmup} and decay_steps {decay} do not fit into the {num_steps} "
            "remaining steps: raise max_steps"
        )


def format_step(step: int, metrics: Mapping[str, float]) -> str:
    """Console line of a step."""
    parts = [f"Step {step}", f"Time: {metrics['time/step']:.2f}s"]
    shown = {
        "Loss": "loss/mean",
        "Teacher KL": "teacher_kl/mean",
        "Reference KL": "reference_kl/mean",
        "Entropy": "entropy/mean",
        "Mismatch KL": "mismatch_kl/mean",
    }
    for label, key in shown.items():
        if key in metrics:
            parts.append(f"{label}: {metrics[key]:.4f}")
    parts += [
        f"Grad. Norm: {metrics['optim/grad_norm']:.4f}",
        f"LR: {metrics['optim/lr']:.2e}",
        f"Throughput: {metrics['perf/throughput']:.0f} tokens/s",
        f"MFU: {metrics['perf/mfu']:.1f}%",
        f"Peak Mem.: {metrics['perf/peak_memory']:.1f} GiB",
    ]
    return " | ".join(parts)
