"""`train`: a run of `rl` from Python, with the same configuration, processes and files."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl.runtime.process_tree import TOKEN_VARIABLE
from prime_rl.runtime.run_dir import RunDir
from rollouts.training.steps import latest_step, step_path

if TYPE_CHECKING:
    from prime_rl.config import RLConfig

GROUP_SIZE = 8
"""Rollouts per prompt unless they are set: a group of one, the default of `rl`, has no advantage."""
GUARD = 'put the call of train below `if __name__ == "__main__":`'


@dataclass(frozen=True)
class TrainingResult:
    """What a run has left on disk."""

    run_dir: Path
    """`output_dir`: configs, logs, weights, checkpoints, metrics.jsonl, samples.jsonl."""

    weights: Path
    """The newest published version, a Hugging Face directory."""

    metrics: Mapping[str, Sequence[tuple[int, float]]]
    """Metric -> its (step, value) pairs, such as `reward/mean` and `loss/mean`.

    Those of the trainer where several processes log one of this name, such as `time/step`.
    """


def train(
    model: str | Path,
    environment: str | Callable[..., Any],
    steps: int,
    *,
    output_dir: str | Path | None = None,
    files: Sequence[str | Path] = (),
    settings: Mapping[str, Any] | None = None,
) -> TrainingResult:
    """Train `model` by asynchronous RL for `steps` optimizer steps; returns when the run has ended.

    `environment` is an id as in `orchestrator.env.0.id`, or a function at the top level of a module that returns an
    environment (`load_environment`); worker processes import it, so a script calls `train` below
    `if __name__ == "__main__":`. `files` are TOML files as after `@`; `settings` are further keys by their dotted names
    and win over everything else: `{"orchestrator.batch_size": 64}`. A group has 8 rollouts unless a file or a setting
    sets another number, or a file has a teacher to learn from or an advantage without a group baseline, which need no
    group. Starts the processes of `rl`; call it in the main thread. Raises `ValueError` for invalid input and
    `RuntimeError` if the run fails.
    """
    from prime_rl.config import RLConfig
    from prime_rl.configuration.sources import without_settings
    from prime_rl.rl import rl
    from prime_rl.utils.pydantic_config import parse_settings

    if TOKEN_VARIABLE in os.environ:
        raise ValueError(f"train was called again while a worker process imported this module: {GUARD}")
    group = {"orchestrator.rollouts_per_example": GROUP_SIZE}
    arguments = {
        "model.name": str(model),
        "max_steps": steps,
        "orchestrator.env.0.id": environment if isinstance(environment, str) else find_id(environment),
        **({} if output_dir is None else {"output_dir": str(output_dir)}),
        **({} if files else group),
        **(settings or {}),
    }
    names = [str(file) for file in files]
    config = parse_settings(RLConfig, arguments, "train", names)
    needs_group = config.orchestrator.has_group_baseline and not config.trainer.loss.teacher_tau
    if needs_group and not config.provenance.keys() & group.keys():
        config = parse_settings(RLConfig, arguments | group, "train", names)
    for line in config.notes:
        sys.stderr.write(f"{line}\n")
    with without_settings():
        code = rl(config)
    if code:
        raise RuntimeError(f"the run failed with exit code {code}; logs: {RunDir(config.output_dir).logs}")
    return load_result(config)


def load_result(config: RLConfig) -> TrainingResult:
    """The newest weights and the metrics of a run."""
    from rollouts.training.metrics import load_last_attempts

    run = RunDir(config.output_dir)
    found: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for row in load_last_attempts(run.metrics):
        for name, value in row.items():
            if "/" in name and not name.startswith("timeline/") and isinstance(value, int | float):
                found.setdefault(name, {}).setdefault(row["process"], []).append((row["step"], value))
    metrics = {name: own.get("trainer", next(iter(own.values()))) for name, own in found.items()}
    step = latest_step(run.weights)
    return TrainingResult(run.root, run.weights if step is None else step_path(run.weights, step), metrics)


def find_id(function: Callable[..., Any]) -> str:
    """The environment id of a function: `module:name`, or `path.py:name` if it is part of a script."""
    name = getattr(function, "__qualname__", "")
    module = sys.modules.get(getattr(function, "__module__", ""))
    if not name.isidentifier() or module is None or getattr(module, name, None) is not function:
        shown = name or type(function).__name__
        raise ValueError(f"environment {shown} cannot be imported by name: define it with def at the top of a module")
    file = getattr(module, "__file__", None)
    if file is None:
        raise ValueError(f"environment {name} is defined in a session, not in a file: write it to a .py file")
    if "." in module.__name__ or hasattr(module, "__path__"):  # a package, whose relative imports need its name
        return f"{module.__name__}:{name}"
    check_guard(Path(file))
    return f"{Path(file).resolve()}:{name}"


def check_guard(path: Path) -> None:
    """`ValueError` if importing a script would call `train` again."""
    for statement in ast.parse(path.read_bytes(), str(path)).body:
        guarded = isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)
        if guarded or isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == train.__name__:
                where = f"{path.name}:{node.lineno}"
                raise ValueError(f"worker processes import {path.name} and would train again ({where}): {GUARD}")
