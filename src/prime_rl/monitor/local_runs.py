"""Runs as directories: which there are below a folder, and what one of them holds."""

from __future__ import annotations

import json
import os
import re
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_rl.monitor.series import Series, join_processes, read_series

METRICS_FILE, SAMPLES_FILE = "metrics.jsonl", "samples.jsonl"
MAX_DEPTH = 4
FRESH_S = 60.0
"""A run whose metrics grew within this time counts as running."""

SECRET = re.compile(
    r"""((?:authorization|password|secret|api[_-]?key|(?:access|auth|api|bearer|hf)[_-]?token)"?\s*=\s*)"[^"\n]*\"""",
    re.IGNORECASE,
)
"""What a table of TOML gives to a key with such a name; the names of variables (api_key_var) are no secrets."""

_SKIPPED = {"weights", "checkpoints", "rollouts", "logs", "configs", "evals", "attempts", "wandb"}


@dataclass(frozen=True)
class EvalDir:
    """What `evals/` holds of one environment at one version of the weights (None: unknown) when it was written."""

    path: Path
    env: str
    step: int | None
    written_ns: int

    @property
    def results(self) -> Path:
        """Its rollouts, one line each."""
        return self.path / "results.jsonl"

    def summary(self) -> dict[str, Any]:
        """Its numbers."""
        found: dict[str, Any] = json.loads((self.path / "summary.json").read_bytes())
        return found


@dataclass(frozen=True)
class LocalRun:
    """A directory that some process writes, or wrote, its metrics to."""

    path: Path

    @property
    def name(self) -> str:
        """As short as it can be typed from the working directory."""
        relative = os.path.relpath(self.path)
        return str(self.path) if relative.startswith("..") else relative

    @property
    def metrics_path(self) -> Path:
        """Metrics and timelines of all processes."""
        return self.path / METRICS_FILE

    @property
    def samples_path(self) -> Path:
        """Rollouts, one line per sample."""
        return self.path / SAMPLES_FILE

    @property
    def changed(self) -> float:
        """When a metric was last written, in unix seconds; 0 before the first."""
        return self.metrics_path.stat().st_mtime if self.metrics_path.exists() else 0.0

    def rows(self) -> Iterator[dict[str, Any]]:
        """Lines of metrics and timelines in the order they were written."""
        return _load_jsonl(self.metrics_path)

    def samples(self) -> Iterator[dict[str, Any]]:
        """Lines of rollouts in the order they were written."""
        return _load_jsonl(self.samples_path)

    def evaluations(self) -> list[EvalDir]:
        """Complete evaluations: of versions during the run, and whole ones written into its directory."""
        found = []
        for file in sorted((self.path / "evals").rglob("summary.json")):
            known = re.search(r"step_(\d+)", file.relative_to(self.path).parent.as_posix())
            try:
                step = int(known[1]) if known else json.loads(file.read_bytes()).get("step")
                found.append(EvalDir(file.parent, file.parent.name, step, file.stat().st_mtime_ns))
            except (OSError, ValueError):
                continue  # replaced at this moment, or not ours
        return found

    def configs(self) -> dict[str, str]:
        """Process -> its resolved configuration as text, with the source of each value and without secrets."""
        paths = sorted((self.path / "configs").glob("*.toml"))
        return {path.stem: SECRET.sub(r'\1"***"', path.read_text(encoding="utf-8")) for path in paths}

    def config_value(self, key: str) -> Any:
        """The value of a dotted key in whichever configuration has it; None where none has."""
        order = {"rl": 0, "trainer": 1, "orchestrator": 2}
        for process in sorted(configs := self.configs(), key=lambda name: order.get(name, 3)):
            value: Any = _parse_toml(configs[process])
            for part in key.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            if value not in (None, "None"):
                return value
        return None


def open_run(path: Path) -> LocalRun:
    """The run in `path`; `ValueError` when it holds neither metrics nor samples."""
    run = LocalRun(path.resolve())
    if not run.metrics_path.exists() and not run.samples_path.exists():
        inside = [found.name for found in find_runs(path)]
        cure = f"it holds the runs {', '.join(inside[:3])}: name one" if inside else "give the --output-dir of a run"
        raise ValueError(f"{path} holds no {METRICS_FILE}: {cure}")
    return run


def find_runs(root: Path) -> list[LocalRun]:
    """Runs in and below `root`, the one that changed last first."""
    found = [LocalRun(path.resolve()) for path in _walk(Path(root), MAX_DEPTH)]
    return sorted(found, key=lambda run: -run.changed)


def state_of(run: LocalRun, series: dict[str, Series]) -> str:
    """`finished`, `running` or `stopped`, as far as files tell."""
    max_steps, loss = run.config_value("max_steps"), series.get("loss/mean")
    if loss and isinstance(max_steps, int) and loss[-1][0] >= max_steps:
        return "finished"
    if any(_says_finished(run.path / "logs" / f"{process}.log") for process in ("trainer", "sft")):
        return "finished"
    if time.time() - run.changed < FRESH_S:
        return "running"
    return "finished" if not loss and run.evaluations() else "stopped"


def _says_finished(log: Path) -> bool:
    """Whether the last lines of a trainer's log say so."""
    if not log.exists():
        return False
    with log.open("rb") as file:
        file.seek(max(log.stat().st_size - 500, 0))
        return b"Finished after step" in file.read()


def load_series(run: LocalRun) -> dict[str, Series]:
    """Metric -> series over steps."""
    return join_processes(read_series(run.rows()))


def _walk(root: Path, depth: int) -> Iterator[Path]:
    if not root.is_dir():
        return
    if (root / METRICS_FILE).exists():
        yield root
    if depth:
        for child in sorted(root.iterdir()):
            if child.is_dir() and not child.is_symlink() and child.name not in _SKIPPED and child.name[0] != ".":
                yield from _walk(child, depth - 1)


def _load_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    # Here and not above: `wandb_monitor.py` also runs where only wandb and pandas are installed.
    try:
        from rollouts.training.metrics import load_jsonl
    except ImportError as error:
        raise ValueError(f"run directories need the package {error.name}: pip install prime-rl") from error
    return load_jsonl(path)


def _parse_toml(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return {}
