"""What surrounds the steps of either trainer: set-up and resume, metrics and console, weights and checkpoints."""

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

from prime_rl.trainer.backend import Backend, build_backend
from prime_rl.trainer.ckpt import (
    PART,
    find_resume_step,
    is_checkpoint_due,
    load_checkpoint,
    prune_checkpoints,
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
from prime_rl.trainer.parallel_dims import leave_ranks
from prime_rl.trainer.perf import PerfCounter, Stopwatch
from prime_rl.trainer.profiling import record_profile
from prime_rl.transport import weights
from prime_rl.transport.broadcast import Broadcaster, announce, is_taken
from prime_rl.transport.canary import Canary
from prime_rl.transport.watch import wait_for_blocking
from prime_rl.utils.hang import Wait, explain_on_signal
from prime_rl.utils.logger import setup_logger
from prime_rl.utils.monitor import Monitor, build_monitor
from prime_rl.utils.output_dir import AVERAGE_DIR, BROADCASTS_DIR
from prime_rl.utils.process import TOKEN_VARIABLE
from prime_rl.utils.progress import show_progress
from rollouts.training.backends.ranks import Ranks
from rollouts.training.backends.step import StepReport
from rollouts.training.batching import Share, pack_share
from rollouts.training.rl_losses import TokenStats
from rollouts.training.steps import complete_steps, remove_unfinished, step_path
from rollouts.training.types import Sample

WAITING = "wait_for_batch"
REMIND_S = 30.0
SKIPS = ("optimizer", "scheduler", "dataloader", "progress")


@dataclass
class Session:
    """One run of a trainer, in one process or as one of its ranks; only the first rank writes."""

    config: TrainConfig | SFTConfig
    backend: Backend
    monitor: Monitor
    perf: PerfCounter
    first_step: int
    progress: dict[str, Any]
    tokenizer_dir: Path | None = None
    chat_template: str | None = None
    broadcaster: Broadcaster | None = None
    """Sends versions to the engines, from the first rank; None: they read files."""
    farewell_s: float = 0.0
    """How long to stay at the end until the engines have received the last one."""
    watch: Stopwatch = field(init=False)
    step: int = field(init=False)

    def __post_init__(self) -> None:
        self.step = self.first_step
        self.watch = Stopwatch(lambda what, start, end: self.monitor.log_timeline(what, start, end, self.step))

    @property
    def ranks(self) -> Ranks:
        """This process among those of the run."""
        return self.backend.ranks

    @property
    def weights_dir(self) -> Path:
        """Where versions are published."""
        return self.config.output_dir / "weights"

    @property
    def ckpt_dir(self) -> Path:
        """Where checkpoints are published."""
        return self.config.output_dir / "checkpoints"

    def steps(self) -> Iterator[int]:
        """The steps that are still to be done, endless without `max_steps`."""
        last = self.config.max_steps
        if last is not None and self.first_step > last:
            logger.info(f"Nothing to do: the checkpoint is at step {self.first_step - 1}, max_steps is {last}")
        bar = show_progress("steps", last, self.first_step - 1, lines=False, hidden=self.ranks.rank != 0)
        with record_profile(self.config, self.backend.placement.device, self.ranks.rank), bar as progress:
            for step in itertools.count(self.first_step):
                if last is not None and step > last:
                    return
                self.step = step
                yield step
                progress.advance()

    def pack(self, samples: Sequence[Sample], seq_len: int) -> Share:
        """This rank's part of a batch that every rank has."""
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
        """Where versions of the moving average are published."""
        return self.config.output_dir / AVERAGE_DIR

    @property
    def broadcasts_dir(self) -> Path:
        """Where versions are announced that engines receive from this process."""
        return self.config.output_dir / BROADCASTS_DIR

    def publish_weights(self, step: int, *, keep: bool = True) -> None:
        """Publish the model as `weights/step_N`, before it its average, if there is one; all ranks must call.

        With a broadcaster the version is offered and announced, and files are written only of those to `keep`.
        """
        if self.backend.average is not None:
            with self.backend.average.in_place():
                self._publish(self.average_dir, step, None, self.backend.publishable())
        canary, tensors = self.backend.compute_canary(step), self.backend.publishable()
        if self.broadcaster is not None:
            self.ranks.run_first(partial(self._offer, self.broadcaster, step, canary, tensors))
        if self.broadcaster is None or keep:
            self._publish(self.weights_dir, step, canary, tensors)

    def _offer(self, broadcaster: Broadcaster, step: int, canary: Canary, tensors: dict[str, Tensor]) -> None:
        root = self.broadcasts_dir
        taken = [found for found in complete_steps(root) if is_taken(step_path(root, found))]
        broadcaster.forget_before(max(taken, default=0))  # nobody goes back
        manifest = broadcaster.offer(step, tensors, self.backend.adapter_config)
        announce(root, manifest, broadcaster.address, canary)

    def _publish(self, root: Path, step: int, canary: Canary | None, tensors: dict[str, Tensor]) -> None:
        self.ranks.run_first(
            lambda: weights.publish_weights(
                root,
                step,
                tensors,
                self.backend.model_dir,
                num_layers=self.backend.num_layers,
                tie_word_embeddings=self.backend.model.config.tie_word_embeddings,
                adapter_config=self.backend.adapter_config,
                canary=canary,
                tokenizer_dir=self.tokenizer_dir,
                chat_template=self.chat_template,
            )
        )

    def claim_weights(self, *, trying_out: bool) -> None:
        """Versions of another run are neither mixed with ours nor lost.

        A new run refuses a directory that holds some (`ValueError`); one on fake data, which is for `trying_out` again
        and again, moves them to `attempts/N/weights`.
        """
        root = self.weights_dir
        if steps := complete_steps(self.broadcasts_dir):
            raise ValueError(
                f"{self.broadcasts_dir} holds versions of another run (up to step_{steps[-1]}): choose another "
                "--output-dir, continue with --ckpt.resume-step -1, or remove it"
            )
        found = complete_steps(root)
        if found and (not trying_out or self.backend.model_dir.is_relative_to(root.resolve())):
            raise ValueError(
                f"{root} holds versions of another run (up to step_{found[-1]}): choose another --output-dir, "
                "continue with --ckpt.resume-step -1, or remove it"
            )
        if found:
            attempts = root.parent / "attempts"
            number = 1 + max((int(p.name) for p in attempts.glob("*") if p.name.isdigit()), default=0)
            (attempts / str(number)).mkdir(parents=True)
            root.rename(attempts / str(number) / root.name)
            logger.info(f"Versions of an earlier run moved to {attempts / str(number) / root.name}")

    def finish_step(
        self,
        report: StepReport,
        stats: TokenStats,
        share: Share,
        progress: Mapping[str, Any],
        extra_metrics: Mapping[str, float] | None = None,
    ) -> dict[str, float]:
        """Save a checkpoint when one is due, then report the step; returns its metrics.

        `progress` is what resuming this run needs.
        """
        lengths = share.lengths
        totals = {
            "total_tokens": self.progress.get("total_tokens", 0) + sum(lengths),
            "total_samples": self.progress.get("total_samples", 0) + len(lengths),
        }
        self.progress = {**totals, **progress}
        self._save_checkpoint()
        seconds = self.watch.lap()
        busy = sum(value for what, value in seconds.items() if what != f"time/{WAITING}")
        metrics: dict[str, float] = {
            **stats.summary(),
            "optim/lr": report.lr,
            "optim/grad_norm": report.grad_norm,
            "optim/skipped_steps": self.backend.stepper.num_skipped,
            **self.backend.take_imbalance(),
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
            logger.warning(f"Step {self.step} changed nothing: {report.skipped}")
        logger.info(format_step(self.step, metrics))
        return metrics

    def describe_wait(self) -> Wait:
        """What this process does, for whoever asks why nothing moves."""
        what, start = self.watch.current or ("between two parts", time.time())
        waiting = what == WAITING
        said = "waits for the batch" if waiting else f"is at {what}"
        on = "orchestrator" if waiting else None
        return Wait(f"{said} of step {self.step}", on, time.time() - start)

    def close(self) -> int:
        """Deliver what is pending and take leave of the other ranks; returns the exit code."""
        self.monitor.finish()
        leave_ranks()
        if self.broadcaster is not None and self.ranks.rank == 0:
            self._see_off(self.broadcaster)
        logger.success(f"Finished after step {self.backend.stepper.num_steps}, weights in {self.weights_dir}")
        if self.ranks.rank == 0 and TOKEN_VARIABLE not in os.environ:  # a launcher has a summary of its own
            sys.stdout.write(self._summary())
        return 0

    def _see_off(self, broadcaster: Broadcaster) -> None:
        """Stay until every engine holds the last version: nobody else has it."""
        last = step_path(self.broadcasts_dir, self.backend.stepper.num_steps)
        waited = 0.0
        while last.exists() and not is_taken(last) and waited < self.farewell_s:
            try:
                what = f"the engines to take {last.name}"
                wait_for_blocking(lambda: is_taken(last) or None, last.parent, timeout_s=REMIND_S, what=what)
            except TimeoutError as error:
                waited += REMIND_S
                logger.info(f"Staying: {error}")
        broadcaster.close()

    def _summary(self) -> str:
        """Where everything lies, and what to do next."""
        out, newest = self.config.output_dir, step_path(self.weights_dir, self.backend.stepper.num_steps)
        table: dict[str, object] = {"metrics": out / "metrics.jsonl", "logs": out / "logs"}
        if self.config.ckpt is not None:
            table["go on"] = f"--output-dir {out} --ckpt.resume-step -1, and a higher --max-steps"
        if newest.exists():
            table |= {"weights": newest, "next": f"env eval @ configs/debug/eval.toml --model.name {newest}"}
        return "".join(f"  {name:<8} {value}\n" for name, value in table.items())

    def _save_checkpoint(self) -> None:
        ckpt = self.config.ckpt
        if ckpt is None or not is_checkpoint_due(self.step, ckpt, self.config.max_steps):
            return
        with self.watch("save_ckpt"):
            backend = self.backend
            save_checkpoint(
                self.ckpt_dir,
                self.step,
                backend.parameters,
                backend.stepper,
                self.progress,
                self.ranks,
                backend.holders,
                average=None if backend.average is None else backend.average.by_name,
            )
            self.ranks.run_first(lambda: prune_checkpoints(self.ckpt_dir, ckpt.keep))


def build_session(
    config: TrainConfig | SFTConfig,
    process: str,
    *,
    ckpt_parts: tuple[str, ...] = (PART,),
    tokenizer_dir: Path | None = None,
    chat_template: str | None = None,
) -> Session:
    """Set up a run, continuing from a checkpoint when the config says so (all `ckpt_parts` must be complete)."""
    rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    log_name = process if num_ranks == 1 else f"{process}_rank{rank}"
    setup_logger(log_name, config.log, config.output_dir / "logs", console=rank == 0)
    started = time.monotonic()
    backend = build_backend(config)
    num_parameters = sum(p.numel() for p in backend.whole.parameters())
    num_trained = sum(p.numel() for p in backend.whole.parameters() if p.requires_grad)
    trained = "" if num_trained == num_parameters else f" ({num_trained:,} of them trained)"
    place = backend.placement
    attn = "ring" if config.parallel.cp_style == "ring" else place.attn
    where = f"{place.device}" if num_ranks == 1 else f"{num_ranks} x {place.device.type}"
    logger.info(
        f"Model {config.model.name}: {num_parameters:,} parameters{trained} on {where} "
        f"({str(place.dtype).removeprefix('torch.')}, {attn} attention), {time.monotonic() - started:.1f} s"
    )
    progress, first_step = resume(config, backend, ckpt_parts)
    if rank == 0:
        remove_unfinished(config.output_dir / "weights")
        remove_unfinished(config.output_dir / BROADCASTS_DIR)
    monitor = Monitor(config.output_dir, process, silent=True)
    if rank == 0:
        monitor = build_monitor(config.output_dir, process, config)
    session = Session(
        config=config,
        backend=backend,
        monitor=monitor,
        perf=PerfCounter(backend.whole, place.device, place.arithmetic, num_ranks),
        first_step=first_step,
        progress=progress,
        tokenizer_dir=tokenizer_dir,
        chat_template=chat_template,
    )
    if threading.current_thread() is threading.main_thread():
        explain_on_signal(log_name, config.output_dir, session.describe_wait)
    return session


def resume(
    config: TrainConfig | SFTConfig, backend: Backend, ckpt_parts: tuple[str, ...]
) -> tuple[dict[str, Any], int]:
    """Load the checkpoint that the config asks for, if any; returns the saved progress and the first step to do.

    The first rank chooses, because what others see of a shared file system may be older.
    """
    root, ranks, ckpt = config.output_dir / "checkpoints", backend.ranks, config.ckpt
    chosen: list[int | None] = []
    ranks.run_first(lambda: chosen.append(find_resume_step(root, ckpt, ckpt_parts)))
    step: int | None = json.loads(ranks.broadcast(json.dumps(chosen[0] if chosen else None).encode()))
    ranks.run_first(lambda: remove_unfinished(root, PART))
    if step is None:
        return {}, 1
    progress: dict[str, Any] = {}
    stepper, held = backend.stepper, (backend.parameters, backend.stepper)
    average = None if backend.average is None else backend.average.by_name
    ranks.run_all(
        lambda: progress.update(load_checkpoint(root, step, *held, ranks, ckpt, backend.holders, average=average))
    )
    if stepper.schedule_start and config.max_steps is not None:
        check_schedule(config.scheduler, config.max_steps - stepper.schedule_start)
        stepper.schedule = build_schedule(config.scheduler, config.optim.lr, config.max_steps - stepper.schedule_start)
    skipped = [name for name in SKIPS if getattr(ckpt, f"skip_{name}")]
    without = f" without its {', '.join(skipped)}" if skipped else ""
    logger.info(f"Continuing after step {step}{without}")
    return progress, 1 if ckpt is not None and ckpt.skip_progress else step + 1


def check_schedule(scheduler: SchedulerConfig, num_steps: int) -> None:
    """Raise `ValueError` when a schedule that is begun anew does not fit into the steps that are left."""
    warmup = 0 if isinstance(scheduler, ConstantSchedulerConfig) else scheduler.warmup_steps
    decay = scheduler.decay_steps if isinstance(scheduler, LinearSchedulerConfig) else 0
    if warmup + decay > num_steps:
        raise ValueError(
            f"ckpt.skip_scheduler: warmup_steps {warmup} and decay_steps {decay} do not fit into the {num_steps} steps "
            "that are left: raise max_steps"
        )


def format_step(step: int, metrics: Mapping[str, float]) -> str:
    """The line a step leaves on the terminal."""
    parts = [f"Step {step}", f"Time: {metrics['time/step']:.2f}s"]
    for label, key in (("Loss", "loss/mean"), ("Entropy", "entropy/mean"), ("Mismatch KL", "mismatch_kl/mean")):
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
