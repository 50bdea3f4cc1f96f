"""Step reports: metrics, samples and the console line."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

from loguru import logger

from prime_rl.orchestrator.metrics import (
    compute_batch_metrics,
    compute_error_metrics,
    compute_group_metrics,
    compute_token_metrics,
    sample_rows,
)
from prime_rl.orchestrator.setup import Orchestrator
from rollouts.training.rollout_gen.groups import DropReason
from rollouts.training.types import Sample

WINDOW_STEPS = 10
"""Steps over which the throughput is averaged."""


class Reporter:
    """Reports steps; converts running totals to per-step values."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self.orchestrator = orchestrator
        self._drops = Counter(orchestrator.rollouts.groups.drops)  # a resumed run continues the totals
        self._idle_s = 0.0
        self._window: deque[tuple[float, float]] = deque(maxlen=WINDOW_STEPS)

    def report(self, step: int, samples: list[Sample], num_kept: int, times: dict[str, float]) -> None:
        """Log the metrics, samples and console line of a step."""
        orchestrator, generator = self.orchestrator, self.orchestrator.generator
        rollouts, live = orchestrator.rollouts, orchestrator.version.live
        metrics = compute_batch_metrics(samples, step=step, version=live, num_kept=num_kept)
        metrics |= compute_error_metrics(*generator.take_errors(), int(metrics["progress/samples"]))
        metrics["error/quarantined"] = float(orchestrator.buffer.num_quarantined)
        metrics |= compute_group_metrics(rollouts.groups, rollouts.restarts)
        metrics |= compute_token_metrics(rollouts.tokens, rollouts.ready_samples)
        metrics |= orchestrator.buffer.take_metrics() | self._filtered() | orchestrator.lag.take_metrics()
        metrics |= {f"progress/total_{name}": float(count) for name, count in orchestrator.totals.items()}
        if orchestrator.teacher is not None:
            metrics |= orchestrator.teacher.take_metrics()
        metrics |= {f"time/{name}": value for name, value in times.items()}
        metrics |= {"time/update_weights": orchestrator.relay.update_s, "time/slots_exhausted": self._idle()}
        metrics["perf/throughput"] = self._throughput(metrics["progress/tokens"], times["step"])
        orchestrator.monitor.log(metrics, step)
        orchestrator.monitor.log_samples(sample_rows(samples), step)
        is_scored = not generator.config.buffer.skip_verification
        logger.info(format_step(step, metrics, orchestrator.evaluations.val_reward, is_scored=is_scored))
        orchestrator.health_checks.check(samples, metrics["time/slots_exhausted"], metrics["time/step"])
        if num_kept < len(samples):
            logger.warning(f"{len(samples) - num_kept} samples exceed seq_len = {orchestrator.seq_len}: dropped")

    def finish(self) -> None:
        """Check the token accounts of the run and log them."""
        rollouts = self.orchestrator.rollouts
        ready = rollouts.ready_samples
        logger.info(f"Tokens: {rollouts.tokens.describe(ready)}")
        try:
            rollouts.tokens.check(ready)
        except AssertionError as error:  # the trained model is complete, only its accounts are not
            logger.error(f"Token accounts do not balance: {error}")

    def _throughput(self, tokens: float, seconds: float) -> float:
        """Tokens per second of the last steps: batches that were generated at once are ready at once."""
        self._window.append((tokens, seconds))
        tokens, seconds = (sum(column) for column in zip(*self._window, strict=True))
        return tokens / max(seconds, 1e-9)

    def _filtered(self) -> dict[str, float]:
        """Rollouts dropped in this step by online difficulty filtering, by kind."""
        orchestrator = self.orchestrator
        before, self._drops = self._drops, Counter(orchestrator.rollouts.groups.drops)
        group_size = orchestrator.generator.config.rollouts_per_example
        return {
            f"filtered_rollouts/{kind}": float((self._drops[kind] - before[kind]) * group_size)
            for kind in (DropReason.EASY, DropReason.HARD)
        }

    def _idle(self) -> float:
        """Seconds of this step without generation because every slot waited for the trainer."""
        before, self._idle_s = self._idle_s, self.orchestrator.rollouts.idle_s
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
