"""Runs checks in child processes with time limits, and writes one JSON line per check as it ends.

The checks of a module share a child, on a CPU those of all modules. A check that raises, crashes or exceeds its limit
ends its child only: the next check starts a new one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from dev.gpu.registry import Check, Need

ROOT = Path(__file__).resolve().parents[2]
RESULTS_FILE, LOG_FILE, TABLE_FILE = "results.jsonl", "log.txt", "table.md"
START_S = 120.0
"""Time limit for the start of a child: imports and the CUDA context."""
CPU_FACTOR = 5
"""Factor on the time limits on a CPU."""

OK, FAILED, SKIPPED = "ok", "failed", "skipped"
Row = dict[str, Any]


@dataclass(frozen=True)
class Machine:
    """What a child finds on this machine."""

    device: str
    num_devices: int
    has_vllm: bool

    def reason_to_skip(self, need: Need) -> str:
        """Why a check with this need cannot run here; empty if it can."""
        met = {
            Need.NOTHING: True,
            Need.DEVICE: self.num_devices > 0,
            Need.TWO_DEVICES: self.num_devices > 1,
            Need.VLLM: self.num_devices > 0 and self.has_vllm,
        }
        return "" if met[need] else need.value


class Child:
    """A process that runs checks, one at a time."""

    def __init__(self, options: Sequence[str], log: Path, module: str = "") -> None:
        self.module = module
        self._log, self._start = log, log.stat().st_size if log.exists() else 0
        with log.open("a") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dev.gpu.child", *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=ROOT,
                start_new_session=True,
            )
        self.about = self._read(START_S)

    def run(self, check: Check, limit_s: float) -> Row:
        """Run one check; the reply of the child, or `error` when it ended or exceeded the limit."""
        if "error" in self.about:
            return self.about
        assert self._process.stdin is not None
        try:
            task = {"name": check.name, "function": check.function, "module": check.module, "options": check.options}
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended: the read below has the reason
        return self._read(limit_s)

    @property
    def is_usable(self) -> bool:
        """Whether it can run another check."""
        return self._process.poll() is None and "error" not in self.about

    def _read(self, limit_s: float) -> Row:
        assert self._process.stdout is not None
        expired = threading.Event()
        timer = threading.Timer(limit_s, lambda: (expired.set(), self.close()))
        timer.start()
        line = self._process.stdout.readline()
        timer.cancel()
        if line.endswith("\n"):
            reply: Row = json.loads(line)
            if "error" in reply:
                self.close()
            return reply
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)  # its own exit code, if it has one
        self.close()
        if expired.is_set():
            return {"error": f"exceeded the time limit of {limit_s:.0f} s"}
        return {"error": f"ended with code {self._process.returncode}: {read_last_line(self._log, self._start)}"}

    def close(self) -> None:
        """Kill the process and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def read_last_line(log: Path, start: int) -> str:
    """The last line that a child wrote to its log."""
    with log.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1][-300:] if lines else "no output"


def probe(log: Path) -> Machine:
    """Find out what this machine has; `RuntimeError` if torch cannot be imported."""
    child = Child(["--probe"], log)
    child.close()
    if "error" in child.about:
        raise RuntimeError(f"torch does not start on this machine: {child.about['error']}")
    return Machine(child.about["device"], child.about["num_devices"], child.about["has_vllm"])


def select(checks: Iterable[Check], patterns: Sequence[str]) -> list[Check]:
    """The checks whose name, or stage, matches a pattern; all without patterns. `ValueError` for one without match."""
    checks = list(checks)
    for pattern in patterns:
        if not any(matches(check.name, [pattern]) for check in checks):
            raise ValueError(f"no check matches {pattern!r}: --list shows their names")
    return [check for check in checks if not patterns or matches(check.name, patterns)]


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name matches a pattern, or belongs to a stage of that name."""
    return any(fnmatch(name, pattern) or name.startswith(f"{pattern}.") for pattern in patterns)


def load_results(out: Path) -> list[dict[str, Any]]:
    """The finished rows of the results file; a line that a kill cut off is ignored."""
    path = out / RESULTS_FILE
    rows = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def run_checks(
    checks: Sequence[Check],
    machine: Machine,
    finished: Mapping[str, Row],
    *,
    out: Path,
    scratch: Path,
    tiny: bool,
    deadline: float | None = None,
) -> tuple[dict[str, Row], list[str]]:
    """Run the checks that are not `finished`; all rows by name, and the names that `deadline` left out."""
    rows, left = dict(finished), []
    options = [str(out), str(scratch), *(["--tiny"] if tiny else [])]
    child: Child | None = None
    try:
        for check in checks:
            if check.name in finished:
                continue
            if deadline is not None and time.monotonic() > deadline:
                left.append(check.name)
                continue
            started = time.monotonic()
            reply: Row = {"skipped": machine.reason_to_skip(check.need)}
            if not reply["skipped"]:
                module = check.module if machine.num_devices else ""  # its memory on the device is freed at the end
                if child is not None and (child.module != module or not child.is_usable):
                    child.close()
                    child = None
                child = child or Child(options, out / LOG_FILE, module)
                started = time.monotonic()  # without the start of the child
                reply = child.run(check, check.limit_s * (1 if machine.num_devices else CPU_FACTOR))
            row = build_row(check, reply, machine, tiny, time.monotonic() - started)
            rows[check.name] = row
            with (out / RESULTS_FILE).open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(format_line(row), flush=True)
    finally:
        if child is not None:
            child.close()
    return rows, left


def build_row(check: Check, reply: Row, machine: Machine, tiny: bool, seconds: float) -> Row:
    """The result of a check as it is written to the results file."""
    number = reply.get("number")
    is_bound = not (check.is_speed and tiny)
    status, reason = OK, reply.get("note", "")
    if "error" in reply:
        status, reason = FAILED, reply["error"]
    elif "skipped" in reply:
        status, reason = SKIPPED, reply["skipped"]
    elif number != number or (is_bound and not check.holds(number)):
        status = FAILED
    return {
        "name": check.name,
        "status": status,
        "number": number if number == number else None,  # JSON has no NaN
        "threshold": f"{check.relation} {check.bound:g}" if is_bound else "",
        "unit": check.unit,
        "seconds": round(seconds, 2),
        "reason": reason,
        "values": reply.get("values", {}),
        "is_speed": check.is_speed,
        "device": machine.device,
        "tiny": tiny,
    }


def format_line(row: Row) -> str:
    """One line of the table on the terminal."""
    number = "" if row["number"] is None else f"{row['number']:.4g}"
    return (
        f"{row['status']:8}{row['name']:34}{number:>11} {row['threshold']:10} {row['unit']:20}"
        f"{row['seconds']:7.1f} s  {row['reason']}"
    ).rstrip()


def format_table(rows: Iterable[Row], machine: Machine) -> str:
    """All rows as Markdown."""
    lines = [f"Device: {machine.device}", "", "| check | status | number | threshold | unit | seconds | note |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row in rows:
        number = "" if row["number"] is None else f"{row['number']:.4g}"
        cells = (row["name"], row["status"], number, row["threshold"], row["unit"], f"{row['seconds']:.1f}")
        lines.append("| " + " | ".join((*cells, row["reason"].replace("|", "/"))) + " |")
    return "\n".join(lines) + "\n"


def choose_exit_code(rows: Iterable[Row], left: Sequence[str]) -> int:
    """1: a check failed; 2: only bounds of speed or memory were missed; 3: time ran out before the last check; 0."""
    failed = [row for row in rows if row["status"] == FAILED]
    if any(not row["is_speed"] or row["number"] is None for row in failed):
        return 1
    return 2 if failed else 3 if left else 0
