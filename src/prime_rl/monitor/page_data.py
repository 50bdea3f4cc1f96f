"""Data of the page except rollouts, as JSON-compatible values."""

from __future__ import annotations

import csv
import io
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import msgspec

from prime_rl.monitor.checks import run_checks
from prime_rl.monitor.distillation import TEACHER_METRICS, read_scores
from prime_rl.monitor.explain import Finding, Lanes, explain, waiting_shares
from prime_rl.monitor.local_runs import LocalRun, complete_lines, digest_first_line
from prime_rl.monitor.logs import find_alerts
from prime_rl.monitor.run_kind import Kind, RunKind, find_kind
from prime_rl.monitor.run_status import find_status
from prime_rl.monitor.series import Series, join_processes, read_series
from prime_rl.monitor.summary import summarize_metrics
from prime_rl.monitor.timing import find_timing
from prime_rl.monitor.trend import find_trend
from rollouts.training.metrics import keep_last_attempts, load_jsonl
from rollouts.training.steps import complete_steps, step_path

MAX_POINTS = 600
"""Maximum points of a curve; longer ones are reduced to the minimum and maximum of each segment."""

MAX_SPANS = 6000
"""Maximum timeline intervals per process; the newest are kept."""

_CONFIG_LINE = re.compile(r"^(?P<key>[^=\s]+|\"[^\"]+\") = (?P<value>.*?)(?:\s{2,}# (?P<source>.*))?$")
_CONFIG_SECTION = re.compile(r"^(?P<name>\[\[?[^\]]+\]\]?)")


def read_rows(path: Path, start: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The complete lines of a JSONL file from byte `start` on, and where the next one begins."""
    rows: list[dict[str, Any]] = []
    for end, line in complete_lines(path, start):
        start = end
        if line.strip():
            with suppress(msgspec.DecodeError, RecursionError):  # skipped, as in `load_jsonl`
                rows.append(msgspec.json.decode(line))
    return rows, start


def build_page_data(run: LocalRun) -> dict[str, Any]:
    """All data but the rollouts; `offset` is the start for `build_update` while the first line is `first`."""
    first = digest_first_line(run.metrics_path)
    rows, offset = read_rows(run.metrics_path)
    current = keep_last_attempts(rows)
    table, lanes = read_series(current), read_lanes(current)
    joined = join_processes(table)
    tables, evals, status = run.tables(), find_evals(run), find_status(run)
    kind = find_kind(joined, tables, bool(evals))
    return {
        "run": {
            "name": short_name(run),
            "path": run.name,
            "state": status.state,
            "status": status.text,
            "has_steps": status.has_steps,
            "kind": pack_kind(kind),
            "model": run.config_value("model.name") or next((e["summary"].get("model") for e in evals), None),
            "max_steps": run.config_value("max_steps"),
            **asdict(find_timing([*load_jsonl(run.files.attempt_log), *rows], run.config_value("max_steps"))),
            "written": time.time(),
        },
        "offset": offset,
        "first": first,
        "attempts": last_attempts(rows),
        "series": pack_series(table),
        "lanes": pack_lanes(lanes),
        "summary": [
            [i.name, i.first, i.last, i.low, i.high, i.recent, i.count] for i in summarize_metrics(joined, kind)
        ],
        "trends": [
            [name, *astuple(trend)] for name in main_metrics(kind) if (trend := find_trend(joined.get(name, [])))
        ],
        "scores": [{**asdict(row), "gap_text": row.gap_text} for row in read_scores(joined)],
        "findings": [[f.topic, f.text, f.advice] for f in explain(table, lanes, tables)],
        "checks": [asdict(check) for check in run_checks(joined, kind)],
        "alerts": find_alerts(run),
        "shares": waiting_shares(lanes),
        "evals": evals,
        "contexts": read_rows(run.files.evolve / "candidates.jsonl")[0] if run.files.evolve.is_dir() else [],
        "tenants": read_tenants(run.files.tenants),
        "weights": find_weights(run.files.weights),
        "checkpoints": find_checkpoints(run.files.checkpoints),
        "configs": {name: config_rows(text) for name, text in run.configs().items()},
    }


def read_tenants(path: Path) -> list[dict[str, Any]]:
    """The tenants of a training server; empty for other runs."""
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(path.read_bytes(), type=list[dict[str, Any]])
    return []


def short_name(run: LocalRun) -> str:
    """The last part of a run's path that distinguishes it."""
    name = run.path.name
    return name if name not in ("rl", "sft") else f"{run.path.parent.name}/{name}"


def pack_kind(kind: RunKind) -> dict[str, Any]:
    """Properties of the run kind for the page."""
    return {
        "name": kind.kind.value,
        "title": kind.title,
        "has_teacher": kind.has_teacher,
        "trains_on_rewards": kind.trains_on_rewards,
        "scores_rewards": kind.scores_rewards,
    }


def main_metrics(kind: RunKind) -> tuple[str, ...]:
    """The metrics whose trend shows whether a run of this kind learns."""
    if kind.kind is Kind.DISTILLATION:
        return TEACHER_METRICS[:1]
    if kind.kind is Kind.MIXED:
        return ("reward/mean", *TEACHER_METRICS[:1])
    if kind.kind in (Kind.SEARCH, Kind.SERVER):  # a maximum only rises, and the load of a server is no trend
        return ()
    return ("reward/mean",) if kind.trains_on_rewards else ("loss/mean",)


def explain_run(run: LocalRun) -> list[Finding]:
    """Findings of `explain` for a run directory."""
    rows = list(run.rows())
    return explain(read_series(rows), read_lanes(rows), run.tables())


def build_update(run: LocalRun, offset: int) -> dict[str, Any]:
    """Points and intervals logged since `offset`."""
    first = digest_first_line(run.metrics_path)
    rows, end = read_rows(run.metrics_path, offset)
    series, lanes = pack_series(read_series(rows)), pack_lanes(read_lanes(rows))
    return {"offset": end, "first": first, "attempts": last_attempts(rows), "series": series, "lanes": lanes}


def last_attempts(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """The number of the last attempt of each process that has rows.

    A page reloads when a process begins a new attempt, which repeats steps; the others may still be at the old one.
    """
    attempts: dict[str, int] = {}
    for row in rows:
        if isinstance(row, dict) and isinstance(number := row.get("attempt", 0), int):
            process = str(row.get("process", "run"))
            attempts[process] = max(number, attempts.get(process, 0))
    return attempts


def metrics_csv(run: LocalRun) -> str:
    """All metrics as CSV, one row per process and step; cells of metrics that a step lacks are empty."""
    table = read_series(run.rows())
    names = sorted({name for metrics in table.values() for name in metrics})
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["process", "step", *names])
    for process, metrics in sorted(table.items()):
        columns = {name: dict(points) for name, points in metrics.items()}
        for step in sorted({step for points in columns.values() for step in points}):
            writer.writerow([process, step, *(columns.get(name, {}).get(step, "") for name in names)])
    return out.getvalue()


def pack_series(table: Mapping[str, Mapping[str, Series]]) -> dict[str, Any]:
    """Series with steps shared: `{"steps": [[1, 2, ...]], "curves": {process: {metric: [steps number, values]}}}`."""
    numbers: dict[tuple[int, ...], int] = {}
    curves: dict[str, dict[str, Any]] = {}
    for process, metrics in sorted(table.items()):
        for name, points in sorted(metrics.items()):
            kept = thin(points)
            number = numbers.setdefault(tuple(step for step, _ in kept), len(numbers))
            curves.setdefault(process, {})[name] = [number, [_short(value) for _, value in kept]]
    return {"steps": [list(steps) for steps in numbers], "curves": curves}


def thin(points: Series, limit: int = MAX_POINTS) -> Series:
    """Downsample to about `limit` points: minimum and maximum of each segment, so that spikes remain."""
    if len(points) <= limit:
        return points
    num_segments, kept = limit // 2, []
    for k in range(num_segments):
        part = points[k * len(points) // num_segments : (k + 1) * len(points) // num_segments]
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return sorted({points[0], *kept, points[-1]})


def read_lanes(rows: Iterable[Mapping[str, Any]]) -> Lanes:
    """Timelines by process."""
    lanes: dict[str, list[tuple[str, float, float, int]]] = {}
    for row in rows:
        if "timeline/what" in row:
            span = (str(row["timeline/what"]), row["timeline/start"], row["timeline/end"], int(row.get("step", 0)))
            lanes.setdefault(str(row.get("process", "run")), []).append(span)
    return lanes


def pack_lanes(lanes: Lanes) -> dict[str, Any]:
    """`{"names": [...], "lanes": {process: [[name number, start, duration, step], ...]}}`, times to the millisecond."""
    names = sorted({what for spans in lanes.values() for what, *_ in spans})
    packed = {
        process: [
            [names.index(what), round(start, 3), round(end - start, 3), step]
            for what, start, end, step in sorted(spans, key=lambda span: span[1])[-MAX_SPANS:]
        ]
        for process, spans in sorted(lanes.items())
    }
    return {"names": names, "lanes": packed}


def find_evals(run: LocalRun) -> list[dict[str, Any]]:
    """Summaries of evaluations: of versions during the run, and of `eval` in its directory."""
    found = []
    for place in run.evaluations():
        try:
            found.append({"env": place.env, "step": place.step, "summary": place.summary()})
        except (OSError, ValueError):
            continue
    return sorted(found, key=lambda row: (str(row["env"]), row["step"] if isinstance(row["step"], int) else -1))


def find_weights(root: Path) -> list[dict[str, Any]]:
    """Published versions: size, tensors and types."""
    found = []
    for step in complete_steps(root):
        path = step_path(root, step)
        try:
            tensors = msgspec.json.decode((path / "manifest.json").read_bytes())["tensors"]
        except (OSError, msgspec.DecodeError, KeyError, RecursionError):
            tensors = {}
        if (size := _size_of(path)) is None:
            continue
        kinds = sorted({str(tensor.get("dtype")) for tensor in tensors.values()})
        found.append(
            {"step": step, "path": f"weights/step_{step}", "bytes": size, "tensors": len(tensors), "dtypes": kinds}
        )
    return found


def find_checkpoints(root: Path) -> list[dict[str, Any]]:
    """Checkpoints with their components."""
    if not root.is_dir():
        return []
    steps = sorted((int(path.name[5:]), path) for path in root.glob("step_*") if path.name[5:].isdigit())
    return [
        {
            "step": step,
            "parts": sorted(p.parent.name for p in path.glob("*/STABLE"))
            or (["trainer"] if (path / "STABLE").exists() else []),
            "bytes": size,
        }
        for step, path in steps
        if (size := _size_of(path)) is not None
    ]


def _size_of(folder: Path) -> int | None:
    """Total size in bytes; None if the run pruned the folder meanwhile."""
    try:
        files = [path for path in folder.rglob("*") if path.is_file()]
        return sum(path.stat().st_size for path in files) if folder.is_dir() else None
    except OSError:
        return None


def config_rows(text: str) -> list[list[str]]:
    """`[section, key, value, source]` of every line of a resolved configuration."""
    rows, section = [], ""
    for line in text.splitlines():
        if match := _CONFIG_SECTION.match(line):
            section = match["name"].strip("[]")
        elif match := _CONFIG_LINE.match(line):
            rows.append([section, match["key"], match["value"], match["source"] or ""])
    return rows


def _short(value: float) -> float:
    """Round to six significant digits, more than a screen resolves."""
    return float(f"{value:.6g}")
