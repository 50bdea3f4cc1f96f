"""Cluster layout: places (nodes or pods), the tasks that run there, and an editable script per task.

    Task --> <name>.sh: `python -m module @ <config>.toml --options`, addresses as $HOST_0, $HOST_1, ... by place

A launcher (Slurm, Ray, Kubernetes) exports HOST_i, RL_FLEET_KEY and, for a task of several places, NODE_RANK.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from pathlib import Path
from typing import Any, TypeVar

from prime_rl.configuration.render import render_value
from prime_rl.deployment.config import NodesConfig
from prime_rl.utils.pydantic_config import BaseConfig

Config = TypeVar("Config", bound=BaseConfig)

KEY_VARIABLE = "RL_FLEET_KEY"
"""API key between orchestrator and servers; generated at submission."""

TEMPLATES = Path(__file__).parents[1] / "assets/deployment"


@dataclass(frozen=True)
class Node:
    """A node or pod: processes that share an address."""

    role: str
    num_gpus: int = 0


@dataclass(frozen=True)
class Task:
    """One command, run once in each of its places."""

    name: str
    module: str
    config: str
    """File name of its configuration, next to the script."""

    places: tuple[int, ...]
    options: tuple[str, ...] = ()
    """Command-line options; `$HOST_i` is the address of place i."""

    gpus: tuple[int, ...] | None = ()
    """GPUs in each place, counted among the visible ones; None: leave CUDA_VISIBLE_DEVICES as it is."""

    num_ranks: int = 0
    """torchrun ranks per place; 0: start the command directly."""

    max_restarts: int = 0
    port: int | None = None
    is_work: bool = False
    """The run ends when all tasks with `is_work` have ended."""

    is_optional: bool = False
    """The run continues without the task when its restarts are used up, or its place is lost."""

    first_options: tuple[str, ...] = ()
    """Options of the first start only: a job that is queued again after its trainer has started leaves them out."""


@dataclass(frozen=True)
class Layout:
    """Places (nodes) and tasks of a run."""

    places: tuple[Node, ...]
    tasks: tuple[Task, ...]


def build_rank_task(name: str, module: str, config: str, nodes: NodesConfig, num_ranks: int) -> Task:
    """A trainer task with `num_ranks` ranks, spread evenly over the first places."""
    places = tuple(range(nodes.num_train_nodes))
    per_node = nodes.gpus_per_node or num_ranks // nodes.num_train_nodes
    if per_node * nodes.num_train_nodes != num_ranks:
        raise ValueError(
            f"{num_ranks} ranks are not divisible by deployment.num_train_nodes = {nodes.num_train_nodes}: "
            "set parallel.dp to a multiple"
        )
    gpus = tuple(range(nodes.gpus_per_node))
    return Task(name, module, config, places, gpus=gpus, num_ranks=per_node, port=nodes.master_port, is_work=True)


def split_first_options(config: Config, single_use: Mapping[str, Any]) -> tuple[Config, tuple[str, ...]]:
    """The config of a job's later starts, and the options that its first start has besides.

    `single_use`: keys of one start, with values for later ones; these resume from the latest checkpoint.
    """
    later = {key: -1 if key.endswith("ckpt.resume_step") else single_use[key] for key in single_use if "ckpt." in key}
    words = [(f"--{key}", render_value(reduce(getattr, key.split("."), config))) for key in later]
    return config.for_later_starts(later), tuple(word for pair in words for word in pair)


def build_scripts(layout: Layout, nodes: NodesConfig, python: str, num_starts: int | None) -> dict[str, str]:
    """A script for every task, by file name; it appends its own arguments to the command.

    `num_starts`: starts of the trainer that are recorded in the output directory, None if that is not known.
    """
    values = {"env": nodes.env, "python": python, "num_starts": num_starts}
    return {f"{task.name}.sh": render_template(TEMPLATES / "task.sh", task=task, **values) for task in layout.tasks}


def run_tool(argv: Sequence[str], elsewhere: str) -> str:
    """Output of a submission tool; `ValueError` with its error, or with `elsewhere` if it is not installed."""
    try:
        result = subprocess.run(argv, capture_output=True, text=True)
    except FileNotFoundError:
        raise ValueError(f"{argv[0]} is not installed here: {elsewhere}") from None
    if result.returncode:
        raise ValueError(f"{argv[0]} rejected {' '.join(argv[1:])}: {(result.stderr or result.stdout).strip()}")
    return result.stdout.strip()


def render_template(path: Path, **values: Any) -> str:
    """A Jinja2 template with the filter `quote` for shell words; `OSError` or `TemplateError` if it is invalid."""
    return _compile_template(path.read_text(encoding="utf-8")).render(**values)


@cache
def _compile_template(text: str) -> Any:
    import jinja2

    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    return environment.from_string(text)
