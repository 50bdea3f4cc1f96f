"""Metric loggers, JSONL files, summary statistics and pass@k."""

from __future__ import annotations

import fcntl
import math
import os
import random
import statistics
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rollouts.training.files import replace_file

METRICS_FILE = "metrics.jsonl"
_writing = threading.Lock()
"""Serializes the threads of this process; the file lock only excludes other processes. Without both, a line that is
being written would look truncated."""
os.register_at_fork(after_in_child=_writing._at_fork_reinit)  # type: ignore[attr-defined]
REWARD_DIGITS = 9
"""Decimal places of a reward that count: a weighted sum of rewards that are 1 may be 0.9999999999999999."""
Z95 = statistics.NormalDist().inv_cdf(0.975)


class MetricsLogger(Protocol):
    """Receives the metrics of a training loop."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Record `metrics` of `step` without blocking."""

    def finish(self) -> None:
        """Flush; no calls to `log` may follow."""


class JSONLLogger:
    """One line `{"step", "timestamp", **metrics}` per call in `log_dir/metrics.jsonl`; existing lines stay."""

    def __init__(self, log_dir: Path) -> None:
        self.path = Path(log_dir) / METRICS_FILE

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Append one line. A value that is not a number or a negative step raises `ValueError`; NaN becomes null."""
        check_metrics(metrics, step)
        append_jsonl(self.path, [{"step": step, "timestamp": time.time(), **metrics}])

    def finish(self) -> None:
        """No effect: `log` writes immediately."""


class WandbLogger:
    """Metrics to an open Weights & Biases run, `WandbLogger(wandb.init(project=...))`, with `step` as a column.

    The run's own step counter is not used, because it does not allow several rows per step.
    """

    def __init__(self, run: Any) -> None:
        self.run = run

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Queue one row of the run."""
        check_metrics(metrics, step)
        self.run.log({"step": step, **metrics})

    def finish(self) -> None:
        """Upload pending rows and close the run."""
        self.run.finish()


class CompositeLogger:
    """Every call to each of `loggers`, in order."""

    def __init__(self, loggers: Sequence[MetricsLogger]) -> None:
        self.loggers = tuple(loggers)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record `metrics` of `step` everywhere."""
        for logger in self.loggers:
            logger.log(dict(metrics), step)

    def finish(self) -> None:
        """Finish all loggers, even if one fails; its error is raised afterwards."""
        with ExitStack() as stack:
            for logger in reversed(self.loggers):
                stack.callback(logger.finish)


def check_metrics(metrics: Mapping[str, float], step: int) -> None:
    """Raise `ValueError` for a metric that is not a number, or an invalid step."""
    if type(step) is not int or step < 0:
        raise ValueError(f"step {step!r} is not a count: pass an int of at least 0")
    value: Any
    for name, value in metrics.items():
        if not isinstance(value, (int, float)) and not hasattr(value, "item"):
            raise ValueError(f"metric {name!r} is {value!r}: log a number")


def append_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append one line per row; safe for concurrent processes.

    All rows are appended under a file lock, below 2 GiB by one `write`. NaN and infinities become null, array scalars
    plain numbers. `OSError` if the disk is full.
    """
    data = _encode_lines(rows)
    if not data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with _writing:
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            with suppress(OSError):  # a file system without locks still appends whole lines
                fcntl.lockf(fd, fcntl.LOCK_EX)
            end = os.fstat(fd).st_size
            if end and os.pread(fd, 1, end - 1) != b"\n":  # terminate a line truncated by a crash or a full disk
                data = b"\n" + data
            rest = memoryview(data)
            while rest:  # one call writes less than 2 GiB
                rest = rest[os.write(fd, rest) :]
        finally:
            os.close(fd)


def replace_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """`replace_file` with the lines that `append_jsonl` writes."""
    replace_file(path, _encode_lines(rows))


def _encode_lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(msgspec.json.encode(dict(row), enc_hook=_plain_number) + b"\n" for row in rows)


def load_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of `path` in order; empty if it does not exist. Truncated lines are skipped."""
    if not Path(path).exists():
        return
    with Path(path).open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n") and line.strip():
                with suppress(msgspec.DecodeError, RecursionError):
                    yield msgspec.json.decode(line, type=dict[str, Any])


class AttemptSteps:
    """Detects rows superseded by a resumed run, from `process`, `attempt` and `step` of all rows.

    A run resumed after step S repeats step S + 1 with a higher `attempt`, so a row is abandoned if a later attempt of
    its process has a row of the same or an earlier step. Rows without `attempt` are of attempt 0.
    """

    def __init__(self) -> None:
        self._first: dict[Any, dict[int, int]] = {}

    def add(self, process: Any, attempt: int, step: int) -> bool:
        """Add a row; returns whether it may make earlier rows abandoned."""
        first = self._first.setdefault(process, {})
        if step >= first.get(attempt, step + 1):
            return False
        first[attempt] = step
        return any(other < attempt for other in first)

    def is_abandoned(self, process: Any, attempt: int, step: int) -> bool:
        """Whether a later attempt repeated this step or started before it."""
        later = self._first.get(process, {}).items()
        return any(number > attempt and first <= step for number, first in later)


class _RowKey(msgspec.Struct):
    """The fields of a row that `AttemptSteps` needs; the rest of the line is not parsed."""

    step: int
    process: str | None = None
    attempt: int = 0


def keep_last_attempts(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """`rows` in order without those of abandoned attempts, see `AttemptSteps`; rows without a step are kept."""
    found, attempts = list(rows), AttemptSteps()
    for row in found:
        if (key := _find_key(row)) is not None:
            attempts.add(*key)
    return [row for row in found if (key := _find_key(row)) is None or not attempts.is_abandoned(*key)]


def load_last_attempts(path: Path) -> Iterator[dict[str, Any]]:
    """`keep_last_attempts` of a JSONL file, streamed in two passes."""
    attempts = AttemptSteps()
    if Path(path).exists():
        with Path(path).open("rb") as lines:
            for line in lines:
                with suppress(msgspec.DecodeError, RecursionError):
                    key = msgspec.json.decode(line, type=_RowKey)
                    attempts.add(key.process, key.attempt, key.step)
    for row in load_jsonl(path):
        if (found := _find_key(row)) is None or not attempts.is_abandoned(*found):
            yield row


def _find_key(row: Mapping[str, Any]) -> tuple[Any, int, int] | None:
    """Process, attempt and step of a row; None where it has no step."""
    step, attempt = row.get("step"), row.get("attempt", 0)
    return (row.get("process"), attempt, step) if isinstance(step, int) and isinstance(attempt, int) else None


def compute_stats(values: Iterable[float]) -> dict[str, float]:
    """`mean median std min max` of the finite values (`std` of the population); zeros when there is none."""
    finite = [float(v) for v in values if math.isfinite(v)]
    if not finite:
        return {"mean": 0.0, "median": 0.0, "std": 0.0, "min": 0.0, "max": 0.0}
    return {
        "mean": statistics.fmean(finite),
        "median": statistics.median(finite),
        "std": statistics.pstdev(finite),
        "min": min(finite),
        "max": max(finite),
    }


def compute_stats_from_jsonl(file: Path, key: str) -> dict[str, float]:
    """`mean min max std` of `key` over all rows of `file` that carry it as a number; zeros when none does."""
    values = (row.get(key) for row in load_jsonl(Path(file)))
    stats = compute_stats(v for v in values if isinstance(v, (int, float)))
    return {name: stats[name] for name in ("mean", "min", "max", "std")}


def reaches(reward: float, threshold: float) -> bool:
    """Whether `reward` is at least `threshold`, up to rounding of its sum."""
    return reward >= threshold - 10**-REWARD_DIGITS


def compute_pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of pass@k from n samples, c of them correct.

    pass@k = 1 - C(n-c, k) / C(n, k)  (2107.03374, equation 1). `ValueError` unless 0 <= c <= n and 1 <= k <= n.
    """
    if not 0 <= c <= n:
        raise ValueError(f"{c} correct of {n} samples: the first must lie between 0 and the second")
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {max(k, 1)} samples and k of at least 1, but there are {n}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def compute_gap_closed(
    student: Sequence[float], before: Sequence[float], teacher: Sequence[float], num_draws: int = 1000, seed: int = 0
) -> tuple[float, float, float] | None:
    """(student - before) / (teacher - before) of the means of paired scores, one per example, and its 95 % interval.

    The interval is a paired bootstrap over the examples. None unless the gap is above 0 in 97.5 % of the draws.
    `ValueError` for sequences of different lengths.
    """
    if not len(student) == len(before) == len(teacher):
        raise ValueError(f"{len(student)}, {len(before)} and {len(teacher)} scores are not of the same examples")
    rng, places = random.Random(seed), range(len(student))
    gains = [s - b for s, b in zip(student, before, strict=True)]
    gaps = [t - b for t, b in zip(teacher, before, strict=True)]
    draws = [rng.choices(places, k=len(places)) for _ in range(num_draws)] if gaps else []
    sums = [(sum(gains[i] for i in draw), sum(gaps[i] for i in draw)) for draw in draws]
    ratios = sorted(gain / gap for gain, gap in sums if gap > 0)
    if not ratios or len(ratios) < 0.975 * num_draws:
        return None
    low, high = ratios[int(0.025 * len(ratios))], ratios[min(int(0.975 * len(ratios)), len(ratios) - 1)]
    return sum(gains) / sum(gaps), low, high


def compute_standard_error(values: Sequence[float]) -> float:
    """s / sqrt(n) with the sample standard deviation s; NaN for fewer than two values."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def compute_interval(values: Sequence[float]) -> tuple[float, float]:
    """A 95 % confidence interval (low, high) of the mean of independent `values`; NaN without values.

    Values in [0, 1] (shares, chances): Wilson's interval (1927) for as many draws as would have this spread,
    n' = p (1 - p) / (s^2 / n), and n where there is no spread: n values of 1 give n / (n + z^2) ... 1, not 1 ... 1.
    Others: mean +- t s / sqrt(n) with Student's t; NaN for fewer than two.
    """
    n = len(values)
    if not n:
        return math.nan, math.nan
    mean = statistics.fmean(values)
    variance = statistics.variance(values) if n > 1 else 0.0
    if all(0 <= value <= 1 for value in values):
        spread = mean * (1 - mean)
        draws = spread * n / variance if variance > 0 else n
        share = Z95**2 / draws
        middle = (mean + share / 2) / (1 + share)
        half = math.sqrt(max(spread / draws + share / (4 * draws), 0.0)) * Z95 / (1 + share)
        return max(middle - half, 0.0), min(middle + half, 1.0)
    if n < 2:
        return math.nan, math.nan
    half = _student_t95(n - 1) * math.sqrt(variance / n)
    return mean - half, mean + half


def _student_t95(freedom: int) -> float:
    """The 0.975 quantile of Student's t: exact for 1 and 2 degrees, then Cornish and Fisher's expansion (AS 26.7.5)."""
    if freedom == 1:
        return math.tan(math.pi * 0.475)
    if freedom == 2:
        return 0.95 * math.sqrt(2 / (1 - 0.95**2))
    z, f = Z95, freedom
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / f**power for power, term in enumerate(terms, start=1))


def _plain_number(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise ValueError(f"{value!r} has no place in a JSON line: log numbers, strings, lists and tables of them")
