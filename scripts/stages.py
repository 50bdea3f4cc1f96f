"""Runs commands of this checkout one after the other, and measures time and memory; used by the demos and examples."""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shlex
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
MODULES = {
    "fetch": "prime_rl.pretrained.fetch_command",
    "convert": "prime_rl.pretrained.convert",
    "sft": "prime_rl.trainer.sft.train",
    "evolve": "prime_rl.evolve.evolve",
    "rl": "prime_rl.rl",
    "eval": "prime_rl.eval.eval",
}
MEMORY_EVERY_S = 0.5
MEMORY_COST = 0.02  # of a core at most: reading the memory of a process of 4 GB takes 60 ms
SHOWN_STEPS = {"sft": 20, "rl": 5}  # every so many; the logs have all
# The sources of this checkout, whatever is installed.
ENVIRONMENT_VARIABLES = {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")])),
}

sys.path.insert(0, str(ROOT / "src"))
from prime_rl.runtime.process import ChildFailed, Supervisor  # noqa: E402
from prime_rl.runtime.tokenizer import ASSETS_DIR  # noqa: E402
from rollouts.training.steps import latest_step, step_path  # noqa: E402


@dataclass
class Memory:
    """Peak memory of all processes of a run, in bytes."""

    peak: int = 0
    next_at: float = 0.0

    def sample(self, find_pids: Callable[[], Iterable[int]]) -> None:
        """Measure the memory, at most twice a second and `MEMORY_COST` of the time."""
        started = time.monotonic()
        if started < self.next_at:
            return
        self.peak = max(self.peak, sum(map(read_memory, [os.getpid(), *find_pids()])))
        ended = time.monotonic()
        self.next_at = ended + max(MEMORY_EVERY_S, (ended - started) / MEMORY_COST)


@dataclass
class Stages:
    """Commands that run one after the other: their output, duration and memory."""

    console: Console
    output_dir: Path
    num_stages: int
    offline: bool = True
    """Do not contact the model hub, unless HF_HUB_OFFLINE is set."""
    memory: Memory = field(default_factory=Memory)
    seconds: dict[str, float] = field(default_factory=dict)
    cpu_seconds: float = 0.0

    def run(self, title: str, command: str, *options: str) -> None:
        """Run one of `MODULES`, or a Python file, and show its output; raises `ChildFailed` when it fails."""
        name = command if command in MODULES else Path(command).stem
        argv = ["-m", MODULES[command]] if command in MODULES else [command]
        shown_command = command if command in MODULES else f"python {command}"
        self.console.rule(f"[bold]{len(self.seconds) + 1}/{self.num_stages}  {title}", align="left")
        self.console.print(f"$ {shown_command} {shlex.join(options)}\n", highlight=False, soft_wrap=True)
        started, cpu_started = time.monotonic(), read_cpu_seconds()
        offline = {"HF_HUB_OFFLINE": "1"} if self.offline and "HF_HUB_OFFLINE" not in os.environ else {}
        with Supervisor(self.output_dir / "logs", sys.stdout, thin_out, grace_s=30) as stage:
            stage.start(name, [sys.executable, *argv, *options], env=ENVIRONMENT_VARIABLES | offline)
            for _ in stage.poll([name]):
                self.memory.sample(stage.find_pids)
        self.seconds[title] = time.monotonic() - started
        self.cpu_seconds += read_cpu_seconds() - cpu_started
        self.console.print()

    def attempt(self, work: Callable[[], None]) -> int:
        """Do the work; returns the exit code and prints what failed."""
        try:
            work()
        except ChildFailed as failure:
            [child] = failure.children
            self.console.print(f"\nerror: {child.name} ended with {child.describe_end()}, see {shown(child.log_path)}")
            return 1
        except KeyboardInterrupt:
            self.console.print("\nstopped")
            return 130
        return 0


def is_local(model: str) -> bool:
    """Whether a model is a path or shipped, so that nothing has to be downloaded for it."""
    return Path(model).expanduser().exists() or (ASSETS_DIR / model).is_dir()


def thin_out(command: str, line: str) -> str | None:
    """Select the lines of a stage to show: some of the steps, and no engine versions."""
    step = re.search(r"Step (\d+) \|", line)
    skipped = step is not None and int(step[1]) > 1 and int(step[1]) % SHOWN_STEPS.get(command, 1)
    return None if skipped or re.search(r"version \d+ in service", line) else f"  {line}"


def read_memory(pid: int) -> int:
    """Bytes of a process, shared pages counted proportionally; 0 if unknown."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0


def read_cpu_seconds() -> float:
    """CPU seconds of all processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def read_summaries(run_dir: Path) -> dict[str, dict[str, Any]]:
    """The summary of each environment that was evaluated in a run directory."""
    files = sorted((run_dir / "evals").glob("*/summary.json"))
    return {file.parent.name: json.loads(file.read_text()) for file in files}


def find_average(summary: Mapping[str, Any]) -> str:
    """The key of the mean reward in the summary of an environment."""
    [key] = [key for key in summary if key.startswith("avg@") and "/" not in key]
    return key


def format_score(summary: Mapping[str, Any]) -> str:
    """Mean reward with its 95% interval, which may be unknown for a single example."""
    key = find_average(summary)
    low, high = summary[f"{key}/ci_low"], summary[f"{key}/ci_high"]
    return f"{summary[key]:.3f}" + ("" if low is None else f" ({low:.3f} to {high:.3f})")


def newest_weights(run_dir: Path) -> Path:
    """The last step that a run published."""
    step = latest_step(run_dir / "weights")
    if step is None:
        raise SystemExit(f"error: {run_dir / 'weights'} holds no weights although the stage before succeeded")
    return step_path(run_dir / "weights", step)


def digest_settings(file: Path) -> str:
    """Digest of the settings in a TOML file, without the budget of searches, which a later round may need to be larger.

    That of the content of any other file, such as one in Python.
    """
    data = file.read_bytes()
    try:
        settings = tomllib.loads(data.decode())
    except ValueError:  # for a TOML file the command names the error
        return digest(data)
    settings.pop("budget", None)
    return digest(json.dumps(settings, sort_keys=True, default=str).encode())


def digest(data: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return sha256(data).hexdigest()


def next_directory(root: Path) -> Path:
    """`root/run_N` with the next free number; earlier runs stay as they are."""
    numbers = [int(p.name[4:]) for p in root.glob("run_*") if p.name[4:].isdigit()]
    return root / f"run_{max(numbers, default=0) + 1}"


def shown(path: Path) -> str:
    """Path relative to the repository."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def parse_arguments(description: str, root: str) -> argparse.Namespace:
    """The seed, and the directory of this demo."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights, the data order and every sample")
    parser.add_argument("--output-dir", type=lambda text: Path(text).resolve(), help=f"default: outputs/{root}/run_N")
    arguments = parser.parse_args()
    if arguments.output_dir and arguments.output_dir.exists() and any(arguments.output_dir.iterdir()):
        parser.error(f"--output-dir {arguments.output_dir} is not empty: choose a new one")
    return arguments
