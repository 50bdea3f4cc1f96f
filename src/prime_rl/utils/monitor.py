"""What a process tells the world: one shared `metrics.jsonl`, `samples.jsonl`, and Weights & Biases when asked for."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollouts.training.metrics import METRICS_FILE, WandbLogger, append_jsonl, check_metrics

if TYPE_CHECKING:
    from prime_rl.utils.config import WandbConfig

SAMPLES_FILE = "samples.jsonl"


@dataclass(frozen=True)
class Monitor:
    """The metrics of one process of a run; all processes append to the same files of `output_dir`."""

    output_dir: Path
    process: str
    wandb: WandbLogger | None = None
    silent: bool = False
    """Write nothing: of several ranks that see the same, one speaks."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Append `{"step", "timestamp", "process", **metrics}`; NaN becomes null, a non-number is a `ValueError`."""
        check_metrics(metrics, step)
        self._append(METRICS_FILE, step, [metrics])
        if self.wandb is not None:
            self.wandb.log(metrics, step)

    def log_timeline(self, what: str, start: float, end: float, step: int) -> None:
        """Append one interval (unix seconds) in which this process did `what` for `step`, such as "decode"."""
        row = {"timeline/what": what, "timeline/start": start, "timeline/end": end}
        self._append(METRICS_FILE, step, [row])

    def log_samples(self, rows: Iterable[Mapping[str, Any]], step: int) -> None:
        """Append rollouts of `step`, one line each, to `samples.jsonl`."""
        self._append(SAMPLES_FILE, step, rows)

    def finish(self) -> None:
        """Close the Weights & Biases run; the files are complete at any time."""
        if self.wandb is not None:
            self.wandb.finish()

    def _append(self, file: str, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        if self.silent:
            return
        head = {"step": step, "timestamp": time.time(), "process": self.process}
        append_jsonl(self.output_dir / file, [{**head, **row} for row in rows])


def build_monitor(output_dir: Path, process: str, wandb: WandbConfig | None = None) -> Monitor:
    """The monitor of `process` ("trainer", "orchestrator", ...) writing below `output_dir`.

    A `wandb` section with `enabled` opens a run as well, unless the environment says WANDB_MODE=disabled.
    Raises `ValueError` when that run cannot be opened.
    """
    output_dir = Path(output_dir)
    wanted = wandb is not None and wandb.enabled and os.environ.get("WANDB_MODE") != "disabled"
    return Monitor(output_dir, process, _open_wandb(output_dir, process, wandb) if wandb and wanted else None)


def _open_wandb(output_dir: Path, process: str, config: WandbConfig) -> WandbLogger:
    try:
        import wandb
    except ImportError as error:
        raise ValueError(
            "wandb.enabled is true but wandb is not installed: pip install wandb, or pass --no-wandb.enabled"
        ) from error
    output_dir.mkdir(parents=True, exist_ok=True)
    try:
        run = wandb.init(
            project=config.project,
            name=config.name,
            entity=config.entity,
            group=config.group,
            tags=config.tags,
            job_type=process,
            dir=output_dir,
            mode="offline" if config.offline else None,
        )
    except wandb.Error as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"wandb did not start ({reason}): set WANDB_API_KEY, --wandb.offline or WANDB_MODE=disabled"
        ) from error
    run.define_metric("*", step_metric="step")
    return WandbLogger(run)
