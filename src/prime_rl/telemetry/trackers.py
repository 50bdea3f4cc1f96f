"""Trackers behind one protocol: Weights & Biases, TensorBoard, trackio, Prometheus."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from prime_rl.runtime.redacted_output import plain_output
from prime_rl.runtime.run_dir import RunDir
from rollouts.training.metrics import WandbLogger

if TYPE_CHECKING:
    from prime_rl.configuration.sections import LogExtrasConfig, TrackersConfig, TrackioConfig, WandbConfig

Row = Mapping[str, Any]
PORTS = {"trainer": 9401, "orchestrator": 9402, "sft": 9403, "eval": 9404, "synthesize": 9405, "evolve": 9406}
SAMPLE_COLUMNS = ("step", "env", "group_index", "index", "prompt", "completion", "reward", "advantage", "status")
DISTRIBUTION_COLUMNS = ("step", "env", "rewards", "advantages", "completion_len")


class Tracker(Protocol):
    """A destination of a process's metrics and samples."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of `step`."""

    def log_samples(self, rows: list[dict[str, Any]], step: int) -> None:
        """Log the rollouts of `step`, rows as in samples.jsonl; a tracker may show a subset."""

    def finish(self) -> None:
        """Deliver what is pending."""


class WandbTracker(WandbLogger):
    """A Weights & Biases run with metrics and tables of rollouts."""

    def __init__(self, run: Any, table: Callable[..., Any], extras: LogExtrasConfig) -> None:
        super().__init__(run)
        self._table, self._extras = table, extras
        run.define_metric("*", step_metric="step")

    def log_samples(self, rows: list[dict[str, Any]], step: int) -> None:
        """Log tables `samples` (a subset) and `distributions` (all rollouts) every `log_extras.interval` steps."""
        extras, tables = self._extras, dict[str, Any]()
        if not rows or (step % extras.interval and step != 1):
            return
        if extras.samples:
            chosen = spread_by_reward(rows, extras.max_samples)
            data = [[step, *(_cell(row.get(name)) for name in SAMPLE_COLUMNS[1:])] for row in chosen]
            tables["samples"] = self._table(columns=list(SAMPLE_COLUMNS), data=data)
        if extras.distributions:
            data = [
                [step, row.get("env"), *map(float, values)] for row, values in zip(rows, spreads(rows), strict=True)
            ]
            tables["distributions"] = self._table(columns=list(DISTRIBUTION_COLUMNS), data=data)
        if tables:
            self.run.log({"step": step, **tables})


class TensorboardTracker:
    """Event files of one process: scalars, and histograms of rewards, advantages and lengths."""

    def __init__(self, open_writer: Callable[[], Any]) -> None:
        self._open_writer = open_writer

    @cached_property
    def writer(self) -> Any:
        """Opened for the first row: the attempt, whose steps replace earlier ones, is recorded by then."""
        return self._open_writer()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write one scalar per finite metric."""
        for name, value in metrics.items():
            if math.isfinite(value):
                self.writer.add_scalar(name, float(value), step)
        self.writer.flush()

    def log_samples(self, rows: list[dict[str, Any]], step: int) -> None:
        """Write histograms over the rollouts of the step."""
        for name, values in zip(DISTRIBUTION_COLUMNS[2:], zip(*spreads(rows), strict=True), strict=False):
            finite = [value for value in values if math.isfinite(value)]
            if finite:
                import numpy

                self.writer.add_histogram(f"distributions/{name}", numpy.asarray(finite), step)

    def finish(self) -> None:
        """Close the files."""
        if "writer" in vars(self):
            self.writer.close()


class TrackioTracker:
    """A run of trackio."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Queue the finite metrics as one row of the run."""
        self.run.log({name: float(value) for name, value in metrics.items() if math.isfinite(value)}, step=step)

    def log_samples(self, rows: list[dict[str, Any]], step: int) -> None:
        """Ignored: samples are in samples.jsonl."""

    def finish(self) -> None:
        """Deliver what is pending."""
        self.run.finish()


def check_trackers(config: TrackersConfig) -> None:
    """Raise `ValueError` if the package of an enabled tracker is not installed, without importing it."""
    packages = {"wandb": "wandb", "tensorboard": "tensorboardX", "trackio": "trackio"}
    for section, package in packages.items():
        tracker = getattr(config, section)
        if tracker is None or not tracker.enabled or (section == "wandb" and is_wandb_disabled()):
            continue
        if sys.modules.get(package) is None and importlib.util.find_spec(package) is None:
            raise _missing(section, package)


def check_prometheus(config: TrackersConfig, process: str, section: str = "") -> int | None:
    """The port of the Prometheus endpoint, None without one; raises `ValueError` with its key if it is in use."""
    from prime_rl.runtime.machine import check_port_free
    from prime_rl.telemetry.prometheus import HOST

    if config.prometheus is None or not config.prometheus.enabled:
        return None
    port = config.prometheus.port or PORTS.get(process, 9400)
    check_port_free(HOST, port, f"{section}prometheus.port")
    return port


def is_wandb_disabled() -> bool:
    """Whether WANDB_MODE disables Weights & Biases."""
    return os.environ.get("WANDB_MODE") == "disabled"


def build_trackers(output_dir: Path, process: str, config: TrackersConfig) -> list[Tracker]:
    """Build the enabled trackers (WANDB_MODE=disabled disables Weights & Biases); raises `ValueError` with a fix."""
    trackers: list[Tracker] = []
    if (port := check_prometheus(config, process)) is not None:
        from prime_rl.telemetry.prometheus import PrometheusTracker

        trackers.append(PrometheusTracker(process, port))
    if config.wandb is not None and config.wandb.enabled and not is_wandb_disabled():
        trackers.append(_open_wandb(output_dir, process, config.wandb))
    if config.tensorboard is not None and config.tensorboard.enabled:
        trackers.append(_open_tensorboard(RunDir(output_dir), process))
    if config.trackio is not None and config.trackio.enabled:
        trackers.append(_open_trackio(process, config.trackio))
    return trackers


def _open_wandb(output_dir: Path, process: str, config: WandbConfig) -> Tracker:
    try:
        with plain_output():  # wandb patches the `write` methods of the current streams
            import wandb
    except ImportError as error:
        raise _missing("wandb", "wandb") from error
    output_dir.mkdir(parents=True, exist_ok=True)
    try:
        with plain_output():
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
    return WandbTracker(run, wandb.Table, config.log_extras)


def _open_tensorboard(run: RunDir, process: str) -> Tracker:
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise _missing("tensorboard", "tensorboardX") from error
    folder = str(run.tensorboard / process)
    # TensorBoard hides what earlier attempts have written from this step on.
    return TensorboardTracker(lambda: SummaryWriter(folder, purge_step=run.find_first_step(process)))


def _open_trackio(process: str, config: TrackioConfig) -> Tracker:
    try:
        import trackio
    except ImportError as error:
        raise _missing("trackio", "trackio") from error
    name = f"{config.name}-{process}" if config.name else None
    run = trackio.init(project=config.project, name=name, group=config.name, space_id=config.space_id, embed=False)
    return TrackioTracker(run)


def _missing(section: str, package: str) -> ValueError:
    return ValueError(
        f"{section}.enabled is true but {package} is not installed: pip install {package}, or pass "
        f"--no-{section}.enabled"
    )


def spread_by_reward(rows: Sequence[Row], count: int) -> list[Row]:
    """At most `count` rows, evenly spaced by reward rank."""
    ordered = sorted(rows, key=lambda row: row.get("reward") or 0.0)
    if len(ordered) <= count:
        return ordered
    if count == 1:
        return ordered[:1]
    return [ordered[round(i * (len(ordered) - 1) / (count - 1))] for i in range(count)]


def spreads(rows: Sequence[Row]) -> list[tuple[float, float, float]]:
    """(reward, advantage, sampled tokens) of each row; NaN for missing values."""
    return [
        (
            _number(row.get("reward")),
            _number(row.get("advantage")),
            float(sum(row["loss_mask"])) if row.get("loss_mask") is not None else math.nan,
        )
        for row in rows
    ]


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _cell(value: Any) -> Any:
    """Numbers and text unchanged, anything else as JSON text."""
    if value is None or isinstance(value, str | int | float):
        return value
    return msgspec.json.encode(value, enc_hook=str).decode()
