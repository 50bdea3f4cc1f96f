"""Step reports: metrics, samples and the console line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from loguru import logger

from prime_rl.orchestrator.buffer import PromptBuffer
from prime_rl.orchestrator.distillation.teacher import Teacher
from prime_rl.orchestrator.evaluation import Evaluations
from prime_rl.orchestrator.metrics import (
    compute_batch_metrics,
    compute_error_metrics,
    compute_group_metrics,
    sample_rows,
)
from prime_rl.orchestrator.rollout_manager import GroupGenerator
from prime_rl.orchestrator.waiting import EventLoopLagMonitor
from prime_rl.orchestrator.weight_relay import WeightRelay
from prime_rl.telemetry.health_checks import RolloutHealthChecks
from prime_rl.utils.monitor import Monitor
from rollouts.training.rollout_gen.async_rollout_manager import AsyncRolloutManager
from rollouts.training.rollout_gen.groups import DropReason
from rollouts.training.types import Sample


@dataclass(kw_only=True, eq=False)
class Reporter:
    """Reports steps; converts running totals to per-step values."""

    generator: GroupGenerator
    buffer: PromptBuffer
    rollouts: AsyncRolloutManager
    relay: WeightRelay
    evaluations: Evaluations
    monitor: Monitor
    teacher: Teacher | None
    lag: EventLoopLagMonitor
    totals: Mapping[str, int]
    seq_len: int
    health_checks: RolloutHealthChecks
    _drops: Counter[str] = field(default_factory=Counter, init=False)
    _idle_s: float = field(default=0.0, init=False)

    def report(self, step: int, samples: list[Sample], num_kept: int, times: dict[str, float]) -> None:
        """Log the metrics, samples and console line of a step."""
        metrics = compute_batch_metrics(samples, step=step, version=self.relay.version.live, num_kept=num_kept)
        metrics |= compute_error_metrics(self.generator.take_errors(), int(metrics["progress/samples"]))
        metrics["error/quarantined"] = float(self.buffer.num_quarantined)
        metrics |= compute_group_metrics(self.rollouts.groups, self.rollouts.restarts)
        metrics |= self.buffer.take_metrics() | self._filtered() | self.lag.take_metrics()
        metrics |= {f"progress/total_{name}": float(count) for name, count in self.totals.items()}
        if self.teacher is not None:
            metrics |= self.teacher.take_metrics()
        metrics |= {f"time/{name}": value for name, value in times.items()}
        metrics |= {"time/update_weights": self.relay.update_s, "time/wait_for_ckpt": self._idle()}
        metrics["perf/throughput"] = metrics["progress/tokens"] / max(times["step"], 1e-9)
        self.monitor.log(metrics, step)
        self.monitor.log_samples(sample_rows(samples), step)
        is_scored = self.generator.is_scored
        logger.info(format_step(step, metrics, self.evaluations.val_reward, is_scored=is_scored))
        self.health_checks.check(samples, metrics["time/wait_for_ckpt"], metrics["time/step"])
        if num_kept < len(samples):
            logger.warning(f"{len(samples) - num_kept} samples exceed seq_len = {self.seq_len}: dropped")

    def _filtered(self) -> dict[str, float]:
        """Rollouts dropped in this step by online difficulty filtering, by kind."""
        before, self._drops = self._drops, Counter(self.rollouts.groups.drops)
        return {
            f"filtered_rollouts/{kind}": float((self._drops[kind] - before[kind]) * self.generator.num_rollouts)
            for kind in (DropReason.EASY, DropReason.HARD)
        }

    def _idle(self) -> float:
        """Seconds of this step without generation because every slot waited for the trainer."""
        before, self._idle_s = self._idle_s, self.rollouts.idle_s
        return self._idle_s - before


def format_step(step: int, metrics: Mapping[str, float], val_reward: float | None, *, is_scored: bool = True) -> str:
    """The console line of a step; without the reward if no reward function runs."""
    parts = [f"Step {step}", f"Time: {metrics['time/step']:.2f}s"]
    if is_scored:
        parts.append(f"Reward: {metrics['reward/mean']:.4f}")
    if val_reward is not None:
        parts.append(f"Val. Reward: {val_reward:.4f}")
    if skipped := sum(value for name, value in metrics.items() if name.startswith("teacher/skipped/")):
        parts.append(f"Not Scored by Teacher: {skipped:.0f}")
    parts += [
        f"Throughput: {metrics['perf/throughput']:.0f} tokens/s",
        f"Seq. Length: {metrics['seq_len/mean']:.1f} tokens/sample",
        f"Async Level: {metrics['batch/async_level']:.0f}",
        f"Max. Off-Policy Level: {metrics.get('batch/off_policy_level/max', 0):.0f}",
    ]
    return " | ".join(parts)
