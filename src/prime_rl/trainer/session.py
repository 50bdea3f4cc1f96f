"""What surrounds the steps of either trainer: set-up and resume, metrics and console, weights and checkpoints."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loguru import logger

from prime_rl.trainer.backend import Backend, build_backend
from prime_rl.trainer.ckpt import (
    PART,
    find_resume_step,
    is_checkpoint_due,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from prime_rl.trainer.config import SFTConfig, TrainConfig
from prime_rl.trainer.perf import PerfCounter, Stopwatch
from prime_rl.transport import weights
from prime_rl.utils.logger import setup_logger
from prime_rl.utils.monitor import Monitor, build_monitor
from rollouts.training.backends.step import StepReport
from rollouts.training.batching import MicroBatch
from rollouts.training.rl_losses import TokenStats
from rollouts.training.steps import complete_steps, remove_unfinished

WAITING = "wait_for_batch"


@dataclass
class Session:
    """One run of a trainer in one process."""

    config: TrainConfig | SFTConfig
    backend: Backend
    monitor: Monitor
    perf: PerfCounter
    first_step: int
    progress: dict[str, Any]
    tokenizer_dir: Path | None = None
    chat_template: str | None = None
    watch: Stopwatch = field(init=False)
    step: int = field(init=False)

    def __post_init__(self) -> None:
        self.step = self.first_step
        self.watch = Stopwatch(lambda what, start, end: self.monitor.log_timeline(what, start, end, self.step))

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
        for step in itertools.count(self.first_step):
            if last is not None and step > last:
                return
            self.step = step
            yield step

    def publish_weights(self, step: int) -> Path:
        """Publish the model as `weights/step_N`."""
        return weights.publish_weights(
            self.weights_dir,
            step,
            self.backend.publishable(),
            self.backend.model_dir,
            num_layers=self.backend.num_layers,
            tokenizer_dir=self.tokenizer_dir,
            chat_template=self.chat_template,
        )

    def claim_weights(self, *, trying_out: bool) -> None:
        """Versions of another run are neither mixed with ours nor lost.

        A new run refuses a directory that holds some (`ValueError`); one on fake data, which is for `trying_out` again
        and again, moves them to `attempts/N/weights`.
        """
        root = self.weights_dir
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
        micros: Sequence[MicroBatch],
        progress: Mapping[str, Any],
        extra_metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Save a checkpoint when one is due, then report the step. `progress` is what resuming this run needs."""
        lengths = [n for micro in micros if micro.sample_ids for n in micro.lengths]
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
            **self.perf.observe(lengths, busy),
            **seconds,
            "time/step": busy + seconds.get(f"time/{WAITING}", 0.0),
            "batch/micro_batches": len(micros),
            "batch/tokens": sum(lengths),
            "batch/samples": len(lengths),
            "progress/total_tokens": totals["total_tokens"],
            "progress/total_samples": totals["total_samples"],
            **(extra_metrics or {}),
        }
        if "loss/mean" in metrics:
            metrics["loss/policy"] = metrics["loss/mean"]
        self.monitor.log(metrics, self.step)
        if report.skipped:
            logger.warning(f"Step {self.step} changed nothing: {report.skipped}")
        logger.info(format_step(self.step, metrics))

    def close(self) -> int:
        """Deliver what is pending; returns the exit code."""
        self.monitor.finish()
        logger.success(f"Finished after step {self.backend.stepper.num_steps}, weights in {self.weights_dir}")
        return 0

    def _save_checkpoint(self) -> None:
        ckpt = self.config.ckpt
        if ckpt is None or not is_checkpoint_due(self.step, ckpt, self.config.max_steps):
            return
        with self.watch("save_ckpt"):
            save_checkpoint(self.ckpt_dir, self.step, self.backend.parameters, self.backend.stepper, self.progress)
            prune_checkpoints(self.ckpt_dir, ckpt.keep)


def build_session(
    config: TrainConfig | SFTConfig,
    process: str,
    *,
    ckpt_parts: tuple[str, ...] = (PART,),
    tokenizer_dir: Path | None = None,
    chat_template: str | None = None,
) -> Session:
    """Set up a run, continuing from a checkpoint when the config says so (all `ckpt_parts` must be complete)."""
    setup_logger(process, config.log, config.output_dir / "logs")
    started = time.monotonic()
    backend = build_backend(config)
    num_parameters = sum(p.numel() for p in backend.model.parameters())
    place = backend.placement
    logger.info(
        f"Model {config.model.name}: {num_parameters:,} parameters on {place.device} "
        f"({str(place.dtype).removeprefix('torch.')}, {place.attn} attention), {time.monotonic() - started:.1f} s"
    )
    root = config.output_dir / "checkpoints"
    resume_step = find_resume_step(root, config.ckpt, ckpt_parts)
    progress: dict[str, Any] = {}
    if resume_step is not None:
        progress = load_checkpoint(root, resume_step, backend.parameters, backend.stepper)
        logger.info(f"Continuing after step {resume_step}")
    remove_unfinished(config.output_dir / "weights")
    return Session(
        config=config,
        backend=backend,
        monitor=build_monitor(config.output_dir, process, config.wandb),
        perf=PerfCounter(backend.model, place.device, place.dtype),
        first_step=(resume_step or 0) + 1,
        progress=progress,
        tokenizer_dir=tokenizer_dir,
        chat_template=chat_template,
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
