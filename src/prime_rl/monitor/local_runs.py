"""Run directories: discovery below a folder, and access to their files."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from prime_rl.configuration.render import uncomment
from prime_rl.monitor.series import Series, join_processes, read_series
from prime_rl.runtime.redaction import SECRET_KEY, redact
from prime_rl.runtime.run_dir import RunDir
from rollouts.training.json_files import read_json_file

MAX_DEPTH = 4
SECRET = re.compile(rf"""((?:{SECRET_KEY.pattern})"?\s*=\s*)"(?:[^"\\\n]|\\.)*\"""", re.IGNORECASE)
"""Values of secret TOML keys; names of variables (api_key_var) are not secret."""

_RUN = RunDir(Path())
_SKIPPED = {path.name for path in (*_RUN.step_dirs, _RUN.logs, _RUN.configs, _RUN.evals, _RUN.attempts)} | {"wandb"}


def last_write(path: Path) -> float:
    """When a file was last written, in unix seconds; 0 if it does not exist."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


@dataclass(frozen=True)
class EvalDir:
    """An evaluation in `evals/`: environment, version of the weights (None: unknown) and time of writing."""

    path: Path
    env: str
    step: int | None
    written_ns: int

    @property
    def results(self) -> Path:
        """Its rollouts, one line each."""
        return self.path / "results.jsonl"

    def summary(self) -> dict[str, Any]:
        """Its summary; `ValueError` if it is no JSON object."""
        return read_json_file(self.path / "summary.json")


@dataclass(frozen=True)
class LocalRun:
    """A directory with the metrics of a run."""

    path: Path

    @property
    def name(self) -> str:
        """Path relative to the working directory."""
        relative = os.path.relpath(self.path)
        return str(self.path) if relative.startswith("..") else relative

    @property
    def files(self) -> RunDir:
        """Its files."""
        return RunDir(self.path)

    @property
    def metrics_path(self) -> Path:
        """Metrics and timelines of all processes."""
        return self.files.metrics

    @property
    def samples_path(self) -> Path:
        """Rollouts, one line per sample."""
        return self.files.samples

    def exists(self) -> bool:
        """Whether a run has started here."""
        return any(file.exists() for file in (self.metrics_path, self.samples_path, self.files.state))

    @property
    def changed(self) -> float:
        """When a metric was last written, in unix seconds; 0 before the first."""
        return last_write(self.metrics_path)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Lines of metrics and timelines in file order, without repeated steps."""
        return _load_last_attempts(self.metrics_path)

    def samples(self) -> Iterator[dict[str, Any]]:
        """Lines of rollouts in file order, without repeated steps."""
        return _load_last_attempts(self.samples_path)

    def evaluations(self) -> list[EvalDir]:
        """Complete evaluations: of versions during the run, and of `eval` in its directory."""
        evaluations = []
        for file in sorted(self.files.evals.rglob("summary.json")):
            known = re.fullmatch(r"step_(\d+)", file.parents[1].name)
            try:
                step = int(known[1]) if known else read_json_file(file).get("step")
                evaluations.append(EvalDir(file.parent, file.parent.name, step, file.stat().st_mtime_ns))
            except (OSError, ValueError):
                continue  # being replaced, or another program's file
        return evaluations

    def configs(self) -> dict[str, str]:
        """Process -> its resolved configuration as text, with the source of each value and without secrets.

        Files that cannot be read are left out.
        """
        configs = {}
        for path in sorted(self.files.configs.glob("*.toml")):
            with suppress(OSError):
                text = path.read_text(encoding="utf-8", errors="replace")
                configs[path.stem] = redact(SECRET.sub(r'\1"***"', uncomment(text)))
        return configs

    def tables(self) -> dict[str, dict[str, Any]]:
        """Process -> its resolved configuration."""
        return {process: parse_toml(text) for process, text in self.configs().items()}

    def config_value(self, key: str) -> Any:
        """The value of a dotted key in any process configuration, or None."""
        order = {"rl": 0, "trainer": 1, "orchestrator": 2}
        tables = self.tables()
        for process in sorted(tables, key=lambda name: order.get(name, 3)):
            value: Any = tables[process]
            for part in key.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            if value not in (None, "None"):
                return value
        return None


def open_run(path: Path) -> LocalRun:
    """The run in `path`; `ValueError` if it has neither metrics nor samples."""
    run = LocalRun(path.resolve())
    if not run.exists():
        inside = [child.name for child in find_runs(path)]
        cure = f"it holds the runs {', '.join(inside[:3])}: name one" if inside else "give the --output-dir of a run"
        raise ValueError(f"{path} holds no {run.metrics_path.name}: {cure}")
    return run


def find_runs(root: Path) -> list[LocalRun]:
    """Runs in and below `root`, most recently changed first."""
    runs = [LocalRun(path.resolve()) for path in _walk(Path(root), MAX_DEPTH)]
    return sorted(runs, key=lambda run: -run.changed)


def load_series(run: LocalRun) -> dict[str, Series]:
    """Metric -> series over steps."""
    return join_processes(read_series(run.rows()))


def _walk(root: Path, depth: int) -> Iterator[Path]:
    try:
        is_run = RunDir(root).metrics.exists() or RunDir(root).state.exists()
        children = sorted(path for path in root.iterdir() if path.is_dir()) if depth and root.is_dir() else []
    except OSError:
        return  # unreadable, or removed meanwhile
    if is_run:
        yield root
    for child in children:
        if not child.is_symlink() and child.name not in _SKIPPED and child.name[0] != ".":
            yield from _walk(child, depth - 1)


def _load_last_attempts(path: Path) -> Iterator[dict[str, Any]]:
    # Local import: `wandb_monitor.py` also runs with only wandb and pandas installed.
    try:
        from rollouts.training.metrics import load_last_attempts
    except ImportError as error:
        raise ValueError(f"run directories need the package {error.name}: pip install prime-rl") from error
    return load_last_attempts(path)


def complete_lines(path: Path, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """Complete lines of a growing file from byte `start` on, each with the position of its end."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n"):
                return
            start += len(line)
            yield start, line


def digest_first_line(path: Path) -> str:
    """What distinguishes a growing file from that of another run, whose first line has another time; "": no line."""
    _, line = next(complete_lines(path), (0, b""))
    return blake2b(line, digest_size=8).hexdigest() if line else ""


def is_replaced(path: Path, offset: int, first: str) -> bool:
    """Whether a file that was read up to `offset`, when `first` was the digest of its first line, is now another."""
    size = path.stat().st_size if path.exists() else 0
    return not 0 <= offset <= size or (offset > 0 and digest_first_line(path) != first)


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text; empty if it is invalid."""
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        return {}
