"""Common output of benchmarks: rows with thresholds, the machine, a table on the terminal and a JSON file.

`benchmarks/report.py` makes `docs/benchmarks.md` of the files below `.bench/results`.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / ".bench" / "results"


PLACES = ("--output", "--output-dir", "--json", "--vllm-python", "--peer-env")
"""Options that say where something is on this machine."""


@dataclass(frozen=True)
class Row:
    """One measured number and its threshold: at least (`>=`), at most (`<=`), exactly (`==`) `bound`; if any."""

    name: str
    value: float
    relation: str = ""
    bound: float | None = None
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether the threshold holds."""
        if self.bound is None:
            return True
        return {">=": self.value >= self.bound, "<=": self.value <= self.bound, "==": self.value == self.bound}[
            self.relation
        ]

    @property
    def threshold(self) -> str:
        """The threshold in words; empty without one."""
        return "" if self.bound is None else f"{self.relation} {self.bound:g}"

    @property
    def verdict(self) -> str:
        """`ok`, `MISSED`, or nothing where there is no threshold."""
        return "" if self.bound is None else "ok" if self.ok else "MISSED"


def describe_machine(threads: int | None = None) -> dict[str, Any]:
    """Hardware and software versions."""
    machine = {
        "cpu": describe_cpu(Path("/proc/cpuinfo")),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
    }
    return machine if threads is None else machine | {"threads": threads}


def describe_cpu(cpuinfo: Path) -> str:
    """Name of the CPU, with its family and model: under a hypervisor several generations have the same name."""
    first = cpuinfo.read_text().partition("\n\n")[0] if cpuinfo.exists() else ""
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    name = fields.get("model name", platform.processor())
    if "cpu family" not in fields:
        return name
    return f"{name} (family {fields['cpu family']}, model {fields['model']})"


def read_peak_gb(pid: int) -> float:
    """Peak resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024 / 1e9


def describe_command(argv: Sequence[str]) -> str:
    """The command, with the options that matter to its numbers."""
    kept, skip = ["python", f"benchmarks/{Path(argv[0]).name}"], False
    for word in argv[1:]:
        if not skip and word.partition("=")[0] not in PLACES:
            kept.append(word)
        skip = word in PLACES
    return shlex.join(kept)


def finish(name: str, rows: Sequence[Row], machine: dict[str, Any], raw: Any = None, path: Path | None = None) -> int:
    """Write `.bench/results/<name>.json` (or `path`), print the table; returns the exit code, 1 for a missed threshold.

    `machine` is what `describe_machine` said before the measurement; `raw` what the rows were made from.
    """
    from rich.console import Console
    from rich.table import Table

    path = (path or RESULTS / f"{name}.json").resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "name": name,
        "date": time.strftime("%Y-%m-%d"),
        "command": describe_command(sys.argv),
        "machine": machine | {"load_after": os.getloadavg()[0]},
        "rows": [asdict(row) | {"ok": row.ok} for row in rows],
        "raw": raw,
    }
    path.write_text(json.dumps(report, indent=1) + "\n")
    title = f"{machine['cores']} x {machine['cpu']}, load {machine['load']:.1f}; {path}"
    table = Table("", "measured", "threshold", "", "", title=title)
    for row in rows:
        table.add_row(row.name, f"{row.value:.4g}", row.threshold, row.verdict, row.detail)
    Console(width=140).print(table)
    return 0 if all(row.ok for row in rows) else 1
