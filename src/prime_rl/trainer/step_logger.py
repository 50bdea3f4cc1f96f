"""Times the phases of a step and logs its metrics."""

from __future__ import annotations

import time
from collections.abc import Mapping

from loguru import logger

from prime_rl.runtime.hang_watchdog import WaitStatus
from prime_rl.trainer.perf import PerfCounter, StepTimer
from prime_rl.utils.monitor import Monitor
from rollouts.training.backends.step import StepReport
from rollouts.training.batching import Share
from rollouts.training.rl_losses import TokenStats

WAITING = "wait_for_batch"
CONSOLE_METRICS = {
    "Loss": "loss/mean",
    "Teacher KL": "teacher_kl/mean",
    "Reference KL": "reference_kl/mean",
    "Entropy": "entropy/mean",
    "Mismatch KL": "mismatch_kl/mean",
}


class StepLogger:
    """Metrics, busy intervals and console line of each step; `step` is the current one."""

    def __init__(self, monitor: Monitor, perf: PerfCounter, step: int) -> None:
        self.monitor, self.perf, self.step = monitor, perf, step
        self.timer = StepTimer(lambda what, start, end: monitor.log_timeline(what, start, end, self.step))

    def log(
        self,
        report: StepReport,
        stats: TokenStats,
        share: Share,
        backend_metrics: Mapping[str, float],
        extra_metrics: Mapping[str, float],
    ) -> dict[str, float]:
        """Log the current step; returns its metrics."""
        seconds = self.timer.lap()
        whole = sum(seconds.values())
        metrics: dict[str, float] = {
            **stats.summary(),
            "optim/lr": report.lr,
            "optim/grad_norm": report.grad_norm,
            **backend_metrics,
            **self.perf.observe(share, whole),
            **seconds,
            "time/step": whole,
            "batch/micro_batches": len(share.micros),
            "batch/micro_batch_tokens": share.micro_batch_tokens,
            "batch/padding_ratio": share.padding_ratio,
            "batch/shared_ratio": share.shared_ratio,
            "batch/skipped_ratio": share.skipped_ratio,
            "batch/rank_imbalance": share.imbalance,
            "batch/tokens": sum(share.lengths),
            "batch/samples": len(share.lengths),
            **extra_metrics,
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


def format_step(step: int, metrics: Mapping[str, float]) -> str:
    """Console line of a step."""
    parts = [f"Step {step}", f"Time: {metrics['time/step']:.2f}s"]
    parts += [f"{label}: {metrics[key]:.4f}" for label, key in CONSOLE_METRICS.items() if key in metrics]
    parts += [
        f"Grad. Norm: {metrics['optim/grad_norm']:.4f}",
        f"LR: {metrics['optim/lr']:.2e}",
        f"Throughput: {metrics['perf/throughput']:.0f} tokens/s",
        f"MFU: {metrics['perf/mfu']:.1f}%",
        f"Peak Mem.: {metrics['perf/peak_memory']:.1f} GiB",
    ]
    return " | ".join(parts)
