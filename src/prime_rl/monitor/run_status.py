"""The state of a run: running, finished, or stopped and why."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_rl.monitor.local_runs import LocalRun, last_write
from prime_rl.runtime.run_state import RunState, is_alive, read_run_state

FRESH_S = 60.0
"""Seconds without activity after which a run that cannot be checked directly counts as stopped."""

SLOW_STEPS = 5
"""Number of mean step times without activity that count as running."""

TRAINING = ("trainer", "sft", "orchestrator", "inference", "teacher_inference", "evolve")
"""Processes whose metrics count as activity; evaluations may be written later."""

STEPLESS = ("serve", "eval", "synthesize")
"""Commands without training steps."""

TAIL_BYTES = 64 * 1024
"""Bytes of the metrics that are read at a time, from the end."""


@dataclass(frozen=True)
class RunStatus:
    """`state` is waiting (nothing has started), running, finished or stopped; `step` the last complete one, else 0."""

    state: str
    step: int
    reason: str | None = None
    has_steps: bool = True
    """Whether its command makes training steps."""

    @property
    def text(self) -> str:
        """Status for display."""
        if self.state == "waiting":
            return "waiting for the run to start"
        if self.state != "stopped":
            return self.state
        where = f" at step {self.step}" if self.step else " before the first step" if self.has_steps else ""
        return f"stopped{where}" + (f" ({self.reason})" if self.reason else "")


@dataclass(frozen=True)
class _Tail:
    """Training rows at the end of the metrics file."""

    step: int = 0
    last: float = 0.0
    """Unix seconds of the newest row."""
    step_s: float = 0.0
    """Mean seconds between their steps."""


def find_status(run: LocalRun) -> RunStatus:
    """The state of a run by the best available evidence.

    1. The recorded state, whose process can be checked on its own host.
    2. A heartbeat or metric that is recent enough, where it cannot.
    3. Without a recorded state: the configured number of steps, the trainer's log, and how old the last metric is.
    """
    tail = _read_tail(run.metrics_path)
    recorded = read_run_state(run.path)
    if recorded is not None:
        return _from_record(run, recorded, tail)
    max_steps = run.config_value("max_steps")
    if tail.step and isinstance(max_steps, int) and tail.step >= max_steps:
        return RunStatus("finished", tail.step)
    if any(_logged_finish(run.files.log(process)) for process in ("trainer", "sft")):
        return RunStatus("finished", tail.step)
    if _is_fresh(tail.last, tail):
        return RunStatus("running", tail.step)
    if not (run.metrics_path.exists() or run.samples_path.exists() or run.evaluations()):
        return RunStatus("waiting", 0)
    return RunStatus("finished" if not tail.step and run.evaluations() else "stopped", tail.step)


def _from_record(run: LocalRun, recorded: RunState, tail: _Tail) -> RunStatus:
    state, reason, has_steps = recorded.status, None, recorded.command not in STEPLESS
    if state == "running":
        alive, reason = is_alive(recorded.process), "killed"
        if alive is None:
            alive, reason = _is_fresh(max(tail.last, last_write(run.files.state)), tail), "no sign of life"
        state, reason = ("running", None) if alive else ("stopped", reason)
    elif state != "finished":
        reason = f"failed: {recorded.reason}" if state == "failed" and recorded.reason else state
        state = "stopped"
    return RunStatus(state, tail.step, reason, has_steps)


def _is_fresh(last: float, tail: _Tail) -> bool:
    return time.time() - last < max(FRESH_S, SLOW_STEPS * tail.step_s)


def _read_tail(path: Path) -> _Tail:
    rows = [row for row in _last_rows(path) if row.get("process") in TRAINING]
    trained = [row for row in rows if _is_trained(row)]
    steps = [int(row.get("step") or 0) for row in trained or rows if "timeline/what" not in row]
    times = [float(row["timestamp"]) for row in trained if isinstance(row.get("timestamp"), (int, float))]
    step_s = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
    stamps = [float(row["timestamp"]) for row in rows if isinstance(row.get("timestamp"), (int, float))]
    return _Tail(steps[-1] if steps else 0, max(stamps, default=0.0), max(step_s, 0.0))


def _last_rows(path: Path) -> list[dict[str, Any]]:
    """The complete rows at the end of a JSONL file, back to the last two training steps.

    Intervals are read only near the end.
    """
    rows: list[dict[str, Any]] = []
    is_unfinished = True  # the end of the file may be half a line
    try:
        with path.open("rb") as file:
            start, rest = os.fstat(file.fileno()).st_size, b""
            while start and sum(map(_is_trained, rows)) < 2:
                end, start = start, max(start - TAIL_BYTES, 0)
                file.seek(start)
                lines = (file.read(end - start) + rest).split(b"\n")
                if is_unfinished:
                    lines.pop()
                    is_unfinished = not lines
                rest = lines.pop(0) if start and lines else b""
                rows = [*_parse_rows(lines, skip_intervals=bool(rows)), *rows]
    except OSError:
        return []
    return rows


def _parse_rows(lines: list[bytes], skip_intervals: bool) -> Iterator[dict[str, Any]]:
    for line in lines:
        if skip_intervals and b'"timeline/what"' in line:
            continue  # parsing millions of them takes long
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def _is_trained(row: dict[str, Any]) -> bool:
    return "loss/mean" in row and row.get("process") in TRAINING


def _logged_finish(log: Path) -> bool:
    """Whether the last lines of a trainer's log report its end."""
    if not log.exists():
        return False
    with log.open("rb") as file:
        file.seek(max(log.stat().st_size - 500, 0))
        return b"Finished after step" in file.read()
