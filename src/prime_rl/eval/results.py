"""Output of an evaluation: results as JSONL and parquet, a summary, and a console table."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from prime_rl.runtime.run_dir import RunDir
from rollouts.training.files import replace_file
from rollouts.training.json_files import read_json_file
from rollouts.training.metrics import replace_jsonl
from rollouts.training.steps import step_path

if TYPE_CHECKING:
    from rich.table import Table

    from prime_rl.eval.config import EvalConfig
    from prime_rl.generation.resume_log import Result
    from prime_rl.generation.rollout_jobs import ModelEndpoint

Summaries = dict[tuple[str, int], dict[str, float]]
FILES = ("results.jsonl", "results.parquet", "summary.json")
"""Results of an environment, in the order in which they are written."""
JSON_COLUMNS = ("prompt", "completion", "answer", "tools")
"""Columns with values of varying types, stored as JSON text in parquet."""


def results_dir(config: EvalConfig, name: str, version: int) -> Path:
    """`evals/<env>`, or `evals/step_N/<env>` for a series of steps."""
    return RunDir(config.output_dir).eval_dir(name, None if config.weights_dir is None else version)


def read_model(folder: Path) -> str | None:
    """The model of the results in `folder`; None without results."""
    try:
        model: str | None = read_json_file(folder / FILES[-1]).get("model")
    except (OSError, ValueError):  # none, or not readable
        return None
    return model


def write_results(
    folder: Path,
    groups: Sequence[Sequence[Result]],
    summary: Mapping[str, float],
    config: EvalConfig,
    endpoint: ModelEndpoint,
) -> None:
    """Write `FILES`, replacing those of an earlier evaluation."""
    rows = [_to_row(result) for group in groups for result in group]
    replace_jsonl(folder / "results.jsonl", rows)
    temporary = folder / ".results"
    _write_parquet(temporary, rows)
    temporary.replace(folder / "results.parquet")
    model = str(step_path(config.weights_dir, endpoint.version)) if config.weights_dir else config.model.name
    numbers = {key: value if math.isfinite(value) else None for key, value in summary.items()}
    content = {"model": model, "step": endpoint.version, "seed": config.seed, **numbers}
    replace_file(folder / "summary.json", json.dumps(content, indent=1) + "\n")


def _to_row(result: Result) -> dict[str, Any]:
    row = msgspec.structs.asdict(result)
    return {key: value for key, value in row.items() if key not in ("tools", "feedback") or value is not None}


def _write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the rows as columns; each metric is a column `metrics/<name>`."""
    import pyarrow
    from pyarrow import parquet

    names = sorted({name for row in rows for name in row["metrics"]})
    flat = []
    for row in rows:
        columns = {key: value for key, value in row.items() if key != "metrics"}
        for key in JSON_COLUMNS:
            value = columns.get(key)
            columns[key] = value if value is None or isinstance(value, str) else _as_json(value)
        flat.append(columns | {f"metrics/{name}": row["metrics"].get(name) for name in names})
    # pyarrow takes the columns of the first row unless they are named; `tools` and `feedback` may start later.
    keys = dict.fromkeys(key for row in flat for key in row)
    parquet.write_table(pyarrow.Table.from_pydict({key: [row.get(key) for row in flat] for key in keys}), path)


def _as_json(value: Any) -> str:
    return msgspec.json.encode(value, enc_hook=str).decode()


def show_summary(summaries: Summaries, config: EvalConfig) -> None:
    """Print one row per environment and step, the reward functions, and the output paths."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 140)
    labeled = {(f"{name} (step {step})" if step else name): s for (name, step), s in summaries.items()}
    rows = {label: format_row(summary) for label, summary in labeled.items()}
    console.print(_table("Evaluation, with 95 % confidence intervals over the examples", rows))
    if parts := {label: row for label, s in labeled.items() if (row := format_metrics(s))}:
        console.print(_table("Reward functions and other metrics, means", parts))
    run = RunDir(config.output_dir)
    folders = [results_dir(config, name, step) for name, step in summaries]
    files = folders[0] if len(folders) == 1 else run.evals
    paths = {"rollouts": f"{files} (results.jsonl, results.parquet, summary.json)"}
    paths |= {"metrics": str(run.metrics), "log": str(run.log("eval"))}
    sys.stdout.write("".join(f"  {name:<8} {value}\n" for name, value in paths.items()))


def _table(title: str, rows: Mapping[str, Mapping[str, str]]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("environment", no_wrap=True)
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    for column in columns:
        table.add_column(column, justify="right")
    for label, row in rows.items():
        table.add_row(label, *(row.get(column, "") for column in columns))
    return table


def format_row(summary: Mapping[str, float]) -> dict[str, str]:
    """Column -> text of one table row; k is the number of rollouts per example."""
    [k] = [key.removeprefix("avg@") for key in summary if key.startswith("avg@") and "/" not in key]
    row = {"examples": f"{summary['examples']:.0f}", "k": k, "avg@k": _with_interval(summary, f"avg@{k}")}
    if k != "1":
        row["pass@1"] = f"{summary['pass@1']:.4f}"
    row["pass@k"] = _with_interval(summary, f"pass@{k}")
    if "completion_len/mean" in summary:
        row["tokens"] = f"{summary['completion_len/mean']:.1f}"
    row["truncated"] = f"{summary['is_truncated/mean']:.1%}"
    row["errors"] = f"{summary['error/mean']:.1%}"
    if "error/RewardError" in summary:
        row["reward errors"] = f"{summary['error/RewardError']:.0f}"
    row["time"] = f"{summary['time']:.1f} s"
    return row


def _with_interval(summary: Mapping[str, float], key: str) -> str:
    low, high = summary[f"{key}/ci_low"], summary[f"{key}/ci_high"]
    return f"{summary[key]:.4f}" + (f" ({low:.3f} to {high:.3f})" if math.isfinite(low) else "")


def format_metrics(summary: Mapping[str, float]) -> dict[str, str]:
    """Column -> text of the environment metrics, without uninformative ones."""
    metrics = {key: value for key, value in summary.items() if key.startswith("metrics/")}
    return {
        key.removeprefix("metrics/"): f"{value:.4f}"
        for key, value in metrics.items()
        if (key, value) != ("metrics/num_turns", 1.0)
    }
