"""Logs metrics and samples to `metrics.jsonl`, `samples.jsonl` and the configured trackers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loguru import logger

from prime_rl.runtime.redaction import redact_fields
from prime_rl.runtime.run_dir import Attempts, RunDir
from prime_rl.telemetry.trackers import Tracker, build_trackers
from rollouts.training.metrics import append_jsonl, check_metrics

if TYPE_CHECKING:
    from prime_rl.configuration.sections import TrackersConfig


@dataclass(frozen=True)
class Monitor:
    """The metrics of one process of a run; all processes append to the same files of `output_dir`."""

    output_dir: Path
    process: str
    trackers: tuple[Tracker, ...] = ()
    silent: bool = False
    """Disable output (used on all ranks but rank 0)."""
    must_write: bool = True
    """Whether rows that cannot be written, as on a full disk, are an `OSError`, not a warning."""

    @property
    def _run_dir(self) -> RunDir:
        return RunDir(self.output_dir)

    @cached_property
    def _attempts(self) -> Attempts:
        return Attempts(self.output_dir, self.process)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Append `{"step", "timestamp", "process", "attempt", **metrics}`; NaN becomes null.

        Raises `ValueError` for a non-numeric value.
        """
        check_metrics(metrics, step)
        metrics = redact_fields(metrics)
        self._append(self._run_dir.metrics, step, [metrics])
        for tracker in self.trackers:
            tracker.log(metrics, step)

    def log_timeline(self, what: str, start: float, end: float, step: int) -> None:
        """Append a busy interval (unix seconds) of activity `what`, such as "decode", for `step`."""
        row = {"timeline/what": what, "timeline/start": start, "timeline/end": end}
        self._append(self._run_dir.metrics, step, [row])

    def log_samples(self, rows: Iterable[Mapping[str, Any]], step: int) -> None:
        """Append rollouts of `step`, one line each, to `samples.jsonl`."""
        samples: list[dict[str, Any]] = redact_fields([dict(row) for row in rows])
        self._append(self._run_dir.samples, step, samples)
        for tracker in self.trackers:
            tracker.log_samples(samples, step)

    def finish(self) -> None:
        """Close all trackers, even if one fails; the files are always complete."""
        with ExitStack() as stack:
            for tracker in reversed(self.trackers):
                stack.callback(tracker.finish)

    def _append(self, path: Path, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        if self.silent:
            return
        attempt = self._attempts.find(step)
        head = {"step": step, "timestamp": time.time(), "process": self.process, "attempt": attempt}
        try:
            append_jsonl(path, [{**head, **row} for row in rows])
        except OSError as error:
            if self.must_write:
                raise
            logger.warning(f"Rows of {self.process} are not in {path}: {error}")


def build_monitor(
    output_dir: Path, process: str, config: TrackersConfig | None = None, *, must_write: bool = True
) -> Monitor:
    """Build the monitor of `process` ("trainer", "orchestrator", ...) with the trackers enabled by `config`.

    WANDB_MODE=disabled disables Weights & Biases. Raises `ValueError` if a tracker cannot be opened.
    """
    output_dir = Path(output_dir)
    if config is None:
        return Monitor(output_dir, process, must_write=must_write)
    trackers = tuple(build_trackers(output_dir, process, config))
    return Monitor(output_dir, process, trackers, must_write=must_write)
