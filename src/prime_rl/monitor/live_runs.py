"""All runs below a folder: their cards, curves and configurations, kept current with little reading."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from prime_rl.monitor.compare import flat_config, is_place
from prime_rl.monitor.local_runs import (
    LocalRun,
    complete_lines,
    digest_first_line,
    find_runs,
    is_replaced,
    last_write,
    load_series,
)
from prime_rl.monitor.page_data import main_metrics, pack_kind, thin
from prime_rl.monitor.run_kind import SEARCH_METRIC, RunKind, find_kind
from prime_rl.monitor.run_status import RunStatus, find_status
from prime_rl.monitor.series import Series
from prime_rl.monitor.timing import RunClock
from rollouts.training.metrics import AttemptSteps, load_jsonl

RESCAN_S = 2.0
"""Seconds between two searches for runs."""

SPARK_POINTS = 60
MAX_COMPARED = 12
"""Maximum number of runs in one comparison."""

SHOWN = ("reward/mean", "loss/mean", "teacher_kl/mean", SEARCH_METRIC)


class _CardRow(msgspec.Struct):
    """The fields of a metric row that a card shows; the others are not parsed."""

    step: float = 0
    timestamp: float | None = None
    process: str = ""
    attempt: int = 0
    start: float | None = msgspec.field(default=None, name="timeline/start")
    reward: float | None = msgspec.field(default=None, name="reward/mean")
    loss: float | None = msgspec.field(default=None, name="loss/mean")
    teacher_kl: float | None = msgspec.field(default=None, name="teacher_kl/mean")
    best_context: float | None = msgspec.field(default=None, name=SEARCH_METRIC)


@dataclass
class RunCard:
    """What the list shows of one run; reads only what was appended since the last call."""

    run: LocalRun
    _offset: int = 0
    _first: str = ""
    _clock: RunClock = field(default_factory=RunClock)
    _points: dict[str, dict[int, tuple[str, float]]] = field(default_factory=dict)
    """Metric -> step -> process and value."""
    _attempts: AttemptSteps = field(default_factory=AttemptSteps)
    _seen: tuple[object, ...] = ()
    _config: tuple[RunKind, Any, Any] | None = None
    _status: RunStatus = field(default_factory=lambda: RunStatus("waiting", 0))

    def read(self, key: str) -> dict[str, Any]:
        """The card as JSON-compatible values."""
        self._read_rows()
        seen = (self._offset, last_write(self.run.files.state), last_write(self.run.files.configs))
        if seen != self._seen or self._config is None:
            tables = self.run.tables()
            kind = find_kind(self._series(), tables, bool(self.run.evaluations()))
            self._config = kind, self.run.config_value("model.name"), self.run.config_value("max_steps")
        if seen != self._seen or self._status.state == "running":
            self._status = find_status(self.run)
        self._seen = seen
        kind, model, max_steps = self._config
        metric = next((name for name in (*main_metrics(kind), *SHOWN) if name in self._points), None)
        points = self._series().get(metric or "", [])
        timing = self._clock.read(max_steps)
        return {
            "key": key,
            "name": key,
            "state": self._status.state,
            "status": self._status.text,
            "step": self._status.step,
            "max_steps": max_steps,
            "kind": pack_kind(kind),
            "model": model,
            "changed": self.run.changed or last_write(self.run.files.state),
            "seconds": timing.seconds,
            "until": timing.until,
            "finish": timing.finish,
            "metric": metric,
            "value": points[-1][1] if points else None,
            "spark": [[step, value] for step, value in thin(points, SPARK_POINTS)],
        }

    def _series(self) -> dict[str, Series]:
        return {
            name: sorted((step, value) for step, (_, value) in points.items()) for name, points in self._points.items()
        }

    def _read_rows(self) -> None:
        path = self.run.metrics_path
        if path.exists() and is_replaced(path, self._offset, self._first):
            self._offset, self._clock, self._points, self._attempts = 0, RunClock(), {}, AttemptSteps()
        if not self._offset:
            self._first = digest_first_line(path)
        for begun in load_jsonl(self.run.files.attempt_log):
            self._clock.add(begun)
        decode = msgspec.json.Decoder(_CardRow).decode
        for end, line in complete_lines(path, self._offset):
            self._offset = end
            try:
                row = decode(line)
            except (msgspec.DecodeError, RecursionError):
                continue
            step, is_interval = int(row.step), row.start is not None
            head = {"process": row.process, "timestamp": row.timestamp, "step": step, "attempt": row.attempt}
            self._clock.add(head | ({"timeline/start": row.start} if is_interval else {"is/step": 1}))
            if self._attempts.add(row.process, row.attempt, step):
                self._drop_points(row.process, step)
            for name, value in zip(SHOWN, (row.reward, row.loss, row.teacher_kl, row.best_context), strict=True):
                if value is not None:
                    self._points.setdefault(name, {})[step] = row.process, value

    def _drop_points(self, process: str, first: int) -> None:
        """Drop the points of a process from a step on, which a later attempt repeats."""
        for points in self._points.values():
            for step in [step for step, (owner, _) in points.items() if owner == process and step >= first]:
                del points[step]


class LiveRuns:
    """The runs below `root` by key, their path relative to it. Only these can be opened. Thread-safe."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._cards: dict[str, RunCard] = {}
        self._scanned = 0.0
        self._lock = threading.Lock()

    def find(self, key: str) -> LocalRun:
        """The run with this key; `ValueError` if there is none."""
        with self._lock:
            self._scan()
            if key not in self._cards:
                raise ValueError(f"there is no run {key} below {self.root}")
            return self._cards[key].run

    def cards(self) -> list[dict[str, Any]]:
        """All runs that can be read: running ones first, then the most recently changed."""
        cards = []
        with self._lock:
            self._scan()
            for key, card in self._cards.items():
                with suppress(OSError):  # such as another user's file
                    cards.append(card.read(key))
        return sorted(cards, key=lambda card: (card["state"] != "running", -card["changed"]))

    def curves(self, keys: Sequence[str], metric: str | None) -> dict[str, Any]:
        """One metric of several runs, and the names of all their metrics."""
        runs = self._choose(keys)
        series = {key: load_series(run) for key, run in runs.items()}
        names = sorted({name for table in series.values() for name in table})
        common = [name for name in SHOWN if any(name in table for table in series.values())]
        chosen = metric if metric in names else next(iter([*common, *names]), None)
        curves = {key: thin(table[chosen]) for key, table in series.items() if chosen in table} if chosen else {}
        return {"metric": chosen, "names": names, "curves": curves}

    def config_differences(self, keys: Sequence[str]) -> list[dict[str, Any]]:
        """Settings of common processes in which runs differ: process, key and value of each run, None if not set."""
        configs = {key: run.configs() for key, run in self._choose(keys).items()}
        common = set.intersection(*map(set, configs.values())) - {"rl"} if configs else set()
        tables = {
            key: {(process, name): value for process in common for name, value in flat_config(texts[process]).items()}
            for key, texts in configs.items()
        }
        names = sorted({name for table in tables.values() for name in table})
        rows = []
        for process, name in names:
            values = [table.get((process, name)) for table in tables.values()]
            if len(set(values)) > 1 and not is_place(name):
                rows.append({"process": process, "key": name, "values": values})
        return rows

    def _choose(self, keys: Sequence[str]) -> dict[str, LocalRun]:
        if len(keys) > MAX_COMPARED:
            raise ValueError(f"at most {MAX_COMPARED} runs can be compared")
        return {key: self.find(key) for key in keys}

    def _scan(self) -> None:
        if self._scanned and time.monotonic() - self._scanned < RESCAN_S:
            return
        found = {run.path.relative_to(self.root).as_posix(): run for run in find_runs(self.root)}
        found = {self.root.name if key == "." else key: run for key, run in found.items()}
        self._cards = {key: self._cards.get(key) or RunCard(run) for key, run in found.items()}
        self._scanned = time.monotonic()
