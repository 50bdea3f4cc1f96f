"""What a process tells the world: one shared `metrics.jsonl`, `samples.jsonl`, and the trackers that were asked for."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl.utils.trackers import Tracker, build_trackers
from rollouts.training.metrics import METRICS_FILE, append_jsonl, check_metrics

if TYPE_CHECKING:
    from prime_rl.utils.config import TrackersConfig

SAMPLES_FILE = "samples.jsonl"
TRAINER_LOGPROBS_FILE = "trainer_logprobs.jsonl"
"""Written by a trainer that records them, read by the page of a run."""


@dataclass(frozen=True)
class Monitor:
    """The metrics of one process of a run; all processes append to the same files of `output_dir`."""

    output_dir: Path
    process: str
    trackers: tuple[Tracker, ...] = ()
    silent: bool = False
    """Write nothing: of several ranks that see the same, one speaks."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Append `{"step", "timestamp", "process", **metrics}`; NaN becomes null, a non-number is a `ValueError`."""
        check_metrics(metrics, step)
        self._append(METRICS_FILE, step, [metrics])
        for tracker in self.trackers:
            tracker.log(metrics, step)

    def log_timeline(self, what: str, start: float, end: float, step: int) -> None:
        """Append one interval (unix seconds) in which this process did `what` for `step`, such as "decode"."""
        row = {"timeline/what": what, "timeline/start": start, "timeline/end": end}
        self._append(METRICS_FILE, step, [row])

    def log_samples(self, rows: Iterable[Mapping[str, Any]], step: int) -> None:
        """Append rollouts of `step`, one line each, to `samples.jsonl`."""
        found = [dict(row) for row in rows]
        self._append(SAMPLES_FILE, step, found)
        for tracker in self.trackers:
            tracker.log_samples(found, step)

    def finish(self) -> None:
        """Close the trackers, all of them also when one fails; the files are complete at any time."""
        with ExitStack() as stack:
            for tracker in reversed(self.trackers):
                stack.callback(tracker.finish)

    def _append(self, file: str, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        if self.silent:
            return
        head = {"step": step, "timestamp": time.time(), "process": self.process}
        append_jsonl(self.output_dir / file, [{**head, **row} for row in rows])


def build_monitor(output_dir: Path, process: str, config: TrackersConfig | None = None) -> Monitor:
    """The monitor of `process` ("trainer", "orchestrator", ...) writing below `output_dir`.

    The trackers that `config` switches on get everything as well; WANDB_MODE=disabled switches Weights & Biases off.
    Raises `ValueError` when one of them cannot be opened.
    """
    output_dir = Path(output_dir)
    if config is None:
        return Monitor(output_dir, process)
    return Monitor(output_dir, process, tuple(build_trackers(output_dir, process, config)))
