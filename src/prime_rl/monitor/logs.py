"""Log files of a run, and the alerts in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from typing import Any

from prime_rl.monitor.local_runs import LocalRun

TAIL_BYTES = 256 * 1024
"""Bytes at the end of a log that the page shows."""

MAX_ALERTS = 30
DAY_S = 24 * 60 * 60
MAX_SKEW_S = 60
"""Seconds by which lines of threads or processes may be out of order."""
ALERT_LEVELS = ("WARNING", "ERROR", "CRITICAL", "FAILURE")

_LINE = re.compile(r"(\d\d:\d\d:\d\d)\s+([A-Z]+)\s(.*)")
_COLORS = re.compile(r"\x1b\[[\d;]*[A-Za-z]")
_LEVELS = ("TRACE", "DEBUG", "INFO", "SUCCESS", *ALERT_LEVELS)


@dataclass(frozen=True)
class LogLine:
    """One line; a continuation, such as a line of a traceback, has no time and the level of the line before it."""

    time: str
    level: str
    text: str


def list_logs(run: LocalRun) -> dict[str, Path]:
    """Process -> its log; the names are relative to the directory of the logs."""
    root = run.files.logs
    paths = (path for path in root.rglob("*.log") if path.is_file() and not path.is_symlink())
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in sorted(paths)}


def read_log(path: Path, max_bytes: int = TAIL_BYTES) -> list[LogLine]:
    """The lines in the last `max_bytes` of a log."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - max_bytes, 0))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    lines = text.splitlines()[1 if size > max_bytes else 0 :]
    return list(_parse(lines))


def pack_logs(run: LocalRun, max_bytes: int = TAIL_BYTES) -> dict[str, Any]:
    """Process -> its last lines as `[time, level, text]`."""
    return {
        name: [[line.time, line.level, line.text] for line in read_log(path, max_bytes)]
        for name, path in list_logs(run).items()
    }


def find_alerts(run: LocalRun) -> list[dict[str, Any]]:
    """Warnings and errors in the logs, the newest of each process first; equal ones once, with their count."""
    found: dict[tuple[str, str, str], tuple[int, dict[str, Any]]] = {}
    for process, path in list_logs(run).items():
        for line, second in _date_lines(read_log(path), path):
            if line.level in ALERT_LEVELS:
                key = (process, line.level, line.text)
                count = found.pop(key)[1]["count"] + 1 if key in found else 1  # the last one determines the order
                row = {"process": process, "level": line.level, "time": line.time, "text": line.text, "count": count}
                found[key] = second, row
    return [row for _, row in sorted(reversed(found.values()), key=itemgetter(0), reverse=True)[:MAX_ALERTS]]


def _date_lines(lines: list[LogLine], path: Path) -> list[tuple[LogLine, int]]:
    """The lines with a time, and their seconds since the first day of the calendar.

    Logs have no dates: the last line is of the day on which the file was written, and a line that has a later time than
    its successor is of the day before.
    """
    if not lines:
        return []
    dated: list[tuple[LogLine, int]] = []
    end = datetime.fromtimestamp(path.stat().st_mtime)
    last = end.toordinal() * DAY_S + (end.hour * 60 + end.minute) * 60 + end.second
    for line in reversed(lines):
        if line.time:
            hours, minutes, seconds = map(int, line.time.split(":"))
            newest = last + MAX_SKEW_S
            second = newest - (newest - (hours * 60 + minutes) * 60 - seconds) % DAY_S
            last = min(last, second)
            dated.append((line, second))
    return dated[::-1]


def _parse(lines: list[str]) -> Iterator[LogLine]:
    level = ""
    for line in (_COLORS.sub("", line) for line in lines):
        match = _LINE.fullmatch(line)
        if match and match[2] in _LEVELS:
            level = match[2]
            yield LogLine(match[1], level, match[3])
        else:
            yield LogLine("", level, line)
