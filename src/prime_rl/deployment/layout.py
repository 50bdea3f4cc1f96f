"""Cluster layout: places (nodes or pods), the tasks that run there, and an editable script per task.

    Task --> <name>.sh: `python -m module @ <config>.toml --options`, addresses as $HOST_0, $HOST_1, ... by place

A launcher (Slurm, Ray, Kubernetes) exports HOST_i, RL_FLEET_KEY and, for a task of several places, NODE_RANK.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prime_rl.deployment.config import NodesConfig

KEY_VARIABLE = "RL_FLEET_KEY"
"""API key between orchestrator and servers; generated at submission."""

TORCHRUN = "torch.distributed.run"


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
    """Visible GPUs in each place; None: leave CUDA_VISIBLE_DEVICES as it is."""

    num_ranks: int = 0
    """torchrun ranks per place; 0: start the command directly."""

    max_restarts: int = 0
    port: int | None = None
    is_work: bool = False
    """The run ends when all tasks with `is_work` have ended."""


@dataclass(frozen=True)
class Layout:
    """Places (nodes) and tasks of a run."""

    places: tuple[Node, ...]
    tasks: tuple[Task, ...]

    def find_tasks(self, place: int) -> list[Task]:
        """Tasks of a place."""
        return [task for task in self.tasks if place in task.places]


def lay_out_ranks(name: str, module: str, config: str, nodes: NodesConfig, num_ranks: int) -> Task:
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


def build_scripts(layout: Layout, nodes: NodesConfig, python: str) -> dict[str, str]:
    """A script for every task, by file name."""
    return {f"{task.name}.sh": render_script(task, nodes.env, python) for task in layout.tasks}


def render_script(task: Task, env: Mapping[str, str], python: str) -> str:
    """The task as a shell script, which appends its own arguments to the command."""
    variables = {name: shlex.quote(value) for name, value in env.items()}
    if task.gpus is not None:
        variables["CUDA_VISIBLE_DEVICES"] = shlex.quote(",".join(map(str, task.gpus)))
    exports = [f"export {name}={value}" for name, value in variables.items()]
    words = [shlex.quote(python), "-m", *_launch(task), "@", f'"$here/{task.config}"', *map(_quote, task.options)]
    lines = ["#!/bin/bash", f"# {task.name}", "set -euo pipefail", 'here="$(cd "$(dirname "$0")" && pwd)"', *exports]
    return "\n".join([*lines, "exec " + _fold([*words, '"$@"'])]) + "\n"


def _launch(task: Task) -> list[str]:
    """The module, optionally with torchrun; the rendezvous is at the first place of the task."""
    if not task.num_ranks:
        return [task.module]
    return [
        TORCHRUN,
        f"--nnodes={len(task.places)}",
        '--node-rank="$NODE_RANK"' if len(task.places) > 1 else "--node-rank=0",
        f"--nproc-per-node={task.num_ranks}",
        f'--master-addr="$HOST_{task.places[0]}"',
        f"--master-port={task.port}",
        "-m",
        task.module,
    ]


def _quote(word: str) -> str:
    """Quote a word; variables are still expanded."""
    return f'"{word}"' if "$" in word else shlex.quote(word)


def _fold(words: Iterable[str]) -> str:
    """Break a command into one option per line."""
    text = ""
    for word in words:
        separate = word.startswith("--") or word in ("@", '"$@"')
        text += (" \\\n  " if separate else " ") + word if text else word
    return text
