"""What a step leaves behind: metrics, samples, and the one line that a reader of the terminal gets."""

from __future__ import annotations

from loguru import logger

from prime_rl.orchestrator.metrics import (
    compute_batch_metrics,
    compute_error_metrics,
    compute_group_metrics,
    sample_rows,
)
from prime_rl.orchestrator.parts import Orchestrator
from prime_rl.utils.sentinels import BatchSentinels
from rollouts.training.types import Sample


class Reporter:
    """Reports steps; remembers what was counted before, where a step's share is wanted."""

    def __init__(self, parts: Orchestrator) -> None:
        self.parts = parts
        self._dropped = {"easy": 0, "hard": 0}
        self._idle_s = 0.0
        verified = not parts.config.buffer.skip_verification
        self.sentinels = BatchSentinels(parts.config.max_async_level, verified=verified)

    def report(self, step: int, samples: list[Sample], num_kept: int, times: dict[str, float]) -> None:
        """Log the metrics and samples of a step, and its line."""
        parts = self.parts
        metrics = compute_batch_metrics(samples, step=step, version=parts.relay.version, num_kept=num_kept)
        metrics |= compute_error_metrics(parts.generator.take_errors(), int(metrics["progress/samples"]))
        metrics["error/quarantined"] = float(parts.buffer.num_quarantined)
        metrics |= compute_group_metrics(parts.rollouts.groups, parts.rollouts.restarts)
        metrics |= parts.buffer.take_metrics() | self._filtered() | parts.lag.take_metrics()
        metrics |= {f"progress/total_{name}": float(count) for name, count in parts.totals.items()}
        if parts.teacher is not None:
            metrics |= parts.teacher.take_metrics()
        metrics |= {f"time/{name}": value for name, value in times.items()}
        metrics |= {"time/update_weights": parts.relay.update_s, "time/wait_for_ckpt": self._idle()}
        metrics["perf/throughput"] = metrics["progress/tokens"] / max(times["step"], 1e-9)
        parts.monitor.log(metrics, step)
        parts.monitor.log_samples(sample_rows(samples), step)
        logger.info(format_step(step, metrics, parts.evaluations.val_reward))
        self.sentinels.look(samples, metrics["time/wait_for_ckpt"], metrics["time/step"])
        if num_kept < len(samples):
            logger.warning(
                f"{len(samples) - num_kept} samples are longer than seq_len = {parts.config.seq_len}: left out"
            )

    def _filtered(self) -> dict[str, float]:
        """Rollouts of this step's groups that were all solved, or all failed their task."""
        size, metrics = self.parts.config.rollouts_per_example, {}
        for kind, before in self._dropped.items():
            self._dropped[kind] = self.parts.rollouts.groups.drops[kind]
            metrics[f"filtered_rollouts/{kind}"] = float((self._dropped[kind] - before) * size)
        return metrics

    def _idle(self) -> float:
        """Seconds of this step in which nothing was generated because every slot waited for the trainer."""
        before, self._idle_s = self._idle_s, self.parts.rollouts.idle_s
        return self._idle_s - before


def format_step(step: int, metrics: dict[str, float], val_reward: float | None) -> str:
    """The line of a step."""
    validation = "" if val_reward is None else f"Val. Reward: {val_reward:.4f} | "
    return (
        f"Step {step} | Time: {metrics['time/step']:.2f}s | Reward: {metrics['reward/mean']:.4f} | {validation}"
        f"Throughput: {metrics['perf/throughput']:.0f} tokens/s | "
        f"Seq. Length: {metrics['seq_len/mean']:.1f} tokens/sample | "
        f"Async Level: {metrics['batch/async_level']:.0f} | "
        f"Max. Off-Policy Level: {metrics.get('batch/off_policy_level/max', 0):.0f}"
    )
