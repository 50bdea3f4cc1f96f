"""Launches several trainer ranks on this machine, as torchrun does."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from prime_rl.runtime.machine import find_free_port, num_cores
from prime_rl.runtime.process import Child, ChildFailed, Supervisor, tail
from prime_rl.runtime.run_dir import RunDir
from prime_rl.trainer.config import SFTConfig, TrainConfig
from prime_rl.utils.logger import FAILURE
from prime_rl.utils.pydantic_config import write_config


def run_ranks(module: str, process: str, config: TrainConfig | SFTConfig, num_ranks: int) -> int:
    """Run `module` as `num_ranks` processes on this machine until all finish; the console shows rank 0.

    If a rank fails, the others are stopped, and the error contains its name and the end of its log.
    """
    shared = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(find_free_port()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, num_cores() // num_ranks)),
    }
    with tempfile.TemporaryDirectory(prefix="ranks_") as scratch:
        config_path = Path(scratch) / f"{process}.toml"
        write_config(config, config_path)
        logs = Path(scratch) if config.bench else RunDir(config.output_dir).logs
        argv = [sys.executable, "-m", module, "@", str(config_path)]
        names = [f"{process}_rank{rank}" for rank in range(num_ranks)]
        try:
            with Supervisor(logs, console=sys.stdout, format_line=FirstRank(names[0])) as run:
                for rank, name in enumerate(names):
                    run.start(name, argv, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
                run.wait(names)
        except ChildFailed as failure:
            if failure.wrong_input is not None:
                raise ValueError(failure.wrong_input.partition(": ")[2]) from failure
            raise RuntimeError(describe_failure(failure)) from failure
    return 0


def describe_failure(failure: ChildFailed) -> str:
    """Describe the rank that failed first: a killed one rather than those that lost their connection to it."""
    first = min(failure.children, key=lambda child: (_is_consequence(child), child.name))
    end = "\n".join(f"    {line}" for line in tail(first.log_path, 8, start=first.log_start))
    summary = f"{first.name} failed ({first.describe_end()}), so the other ranks were stopped"
    return f"{summary}; the end of {first.log_path}:\n{end}"


def _is_consequence(child: Child) -> bool:
    return child.code is not None and child.code >= 0


@dataclass
class FirstRank:
    """Console filter: the lines of one rank, except its failure, which this process reports."""

    name: str
    failed: bool = False

    def __call__(self, name: str, line: str) -> str | None:
        if name == self.name and (line.startswith("error: ") or f" {FAILURE} " in line):
            self.failed = True
        return line if name == self.name and not self.failed else None
