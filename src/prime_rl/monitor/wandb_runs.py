"""Runs at Weights & Biases: listing them, their history, and the tables of samples they logged."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nanochat.wandb_login import is_logged_in
from prime_rl.monitor.series import Series, join_processes, read_series

HISTORY_ROWS = 10_000
"""Maximum rows of a history; the server samples longer ones evenly."""


@dataclass(frozen=True)
class WandbRunHistory:
    """One run, with the other processes of its group and other attempts."""

    parts: tuple[Any, ...]

    @cached_property
    def histories(self) -> list[tuple[Any, list[dict[str, Any]]]]:
        """Each part with its rows, oldest first: the last attempt at a step applies."""
        parts = sorted(self.parts, key=lambda part: str(part.created_at))
        return [(part, part.history(samples=HISTORY_ROWS, pandas=False)) for part in parts]

    @property
    def name(self) -> str:
        """Entity, project, id and display name."""
        run = self.parts[0]
        return f"{'/'.join(run.path)} ({run.name})"

    @property
    def state(self) -> str:
        """State on the server: running, finished, crashed, failed."""
        return str(self.parts[0].state)

    def load_series(self) -> dict[str, Series]:
        """Metric -> series over the logged column `step`, else over the run's own counter.

        An attempt replaces what earlier ones of its process have logged from its first step on.
        """
        table: dict[str, dict[str, Series]] = {}
        for part, history in self.histories:
            rows = [{**row, "step": row.get("step", row.get("_step")), "process": _process(part)} for row in history]
            for process, metrics in read_series(rows).items():
                known = table.setdefault(process, {})
                for name, points in metrics.items():
                    known[name] = [point for point in known.get(name, []) if point[0] < points[0][0]] + points
        return join_processes(table)

    def samples(self) -> Iterator[dict[str, Any]]:
        """Rows of every logged table that has a `reward` column, each with its step."""
        with tempfile.TemporaryDirectory() as folder:
            for part, history in self.histories:
                for row in history:
                    for value in row.values():
                        if isinstance(value, dict) and "table-file" in str(value.get("_type")):
                            yield from _table_rows(part, value, row, Path(folder))


def list_runs(entity: str | None, project: str, limit: int) -> list[Any]:
    """The newest runs of a project; `ValueError` if they cannot be read."""
    with _explained(entity, project):
        runs = _api(entity).runs(_path(entity, project), order="-created_at", per_page=min(max(limit, 1), 50))
        return [run for run, _ in zip(runs, range(limit), strict=False)]


def open_run(run_id: str, entity: str | None, project: str) -> WandbRunHistory:
    """A run with the others of its group; `ValueError` if it does not exist."""
    with _explained(entity, project, run_id):
        api = _api(entity)
        path = run_id if "/" in run_id else f"{_path(entity, project)}/{run_id}"
        run = api.run(path)
        others = []
        if run.group:
            others = _siblings(run, list(api.runs("/".join(run.path[:-1]), filters={"group": run.group})))
    return WandbRunHistory((run, *others))


def runs_text(runs: list[Any]) -> list[tuple[str, str, str, str]]:
    """(id, state, created, name) of each."""
    return [
        (run.id, str(run.state), str(run.created_at)[:16].replace("T", " "), f"{run.name} {_process(run)}".strip())
        for run in runs
    ]


def has_key() -> bool:
    """Whether an API key is in the environment or in the file of `wandb login`."""
    return bool(os.environ.get("WANDB_API_KEY")) or is_logged_in()


@contextmanager
def _explained(entity: str | None, project: str, run_id: str | None = None) -> Iterator[None]:
    """Convert client errors to `ValueError`."""
    if not has_key():
        raise ValueError("Weights & Biases needs an API key: set WANDB_API_KEY, or pass the directory of a local run")
    try:
        yield
    except ImportError as error:
        raise ValueError("reading W&B runs needs wandb: pip install wandb pandas") from error
    except Exception as error:
        if isinstance(error, ValueError) and not _is_of_wandb(error):
            raise
        what = f"run {run_id} of {_path(entity, project)}" if run_id else f"project {_path(entity, project)}"
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{what} cannot be read ({reason}): check --entity, --project and WANDB_API_KEY") from error


def _is_of_wandb(error: BaseException) -> bool:
    return type(error).__module__.split(".")[0] == "wandb" or "project" in str(error).lower()


def _api(entity: str | None) -> Any:
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    return wandb.Api(overrides={"entity": entity} if entity else None, timeout=30)


def _path(entity: str | None, project: str) -> str:
    return f"{entity}/{project}" if entity else project


def _process(run: Any) -> str:
    return str(getattr(run, "job_type", None) or "")


def _experiment(run: Any) -> str:
    return str(run.name).removesuffix(f"-{_process(run)}")


def _siblings(run: Any, grouped: list[Any]) -> list[Any]:
    """The other processes of a run among the runs of its group, which may hold several experiments.

    They carry its name, to which `rl` appends that of the process; without a common name they are known where the
    group has one run of each process.
    """
    others = [other for other in grouped if other.id != run.id]
    named = [other for other in others if _experiment(other) == _experiment(run)]
    if named:
        return named
    kinds = [_process(other) for other in (run, *others)]
    return others if len(set(kinds)) == len(kinds) else []


def _table_rows(run: Any, value: dict[str, Any], row: dict[str, Any], folder: Path) -> Iterator[dict[str, Any]]:
    path = str(value.get("path", ""))
    if not path.endswith(".json"):
        return
    run.file(path).download(root=str(folder), replace=True).close()
    try:
        table = json.loads((folder / path).read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{path} of the run is nested too deeply") from None
    columns = table.get("columns", [])
    if "reward" not in columns:
        return
    for cells in table.get("data", []):
        yield {"step": row.get("step", row.get("_step")), **dict(zip(columns, cells, strict=False))}
