"""Runs the real commands: start, wait with a deadline, and find their child processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rollouts.training.metrics import load_jsonl

ROOT = Path(__file__).parents[2]
DEADLINE_S = 180.0
MARK = "ROAD_TEST_MARK"
PYTHON_PATH = os.pathsep.join([str(ROOT / "src"), str(Path(__file__).parent)])  # the second holds letters.py
MODULES = {
    "rl": "prime_rl.rl",
    "trainer": "prime_rl.trainer.rl.train",
    "sft": "prime_rl.trainer.sft.train",
    "orchestrator": "prime_rl.orchestrator.orchestrator",
    "inference": "prime_rl.inference.server",
    "eval": "prime_rl.eval.eval",
    "synthesize": "prime_rl.synthesize.synthesize",
}
THREE_FILES = (
    *("--trainer", "@", "configs/debug/rl/train.toml"),
    *("--orchestrator", "@", "configs/debug/orch.toml"),
    *("--inference", "@", "configs/debug/infer.toml"),
)


@dataclass
class Command:
    """A running command and its descendants, identified by a variable in their environment."""

    name: str
    process: subprocess.Popen[str]
    out_path: Path
    err_path: Path
    mark: str

    @property
    def out(self) -> str:
        return self.out_path.read_text()

    @property
    def err(self) -> str:
        return self.err_path.read_text()

    def wait(self, timeout_s: float = DEADLINE_S) -> int:
        """Exit code; fails the test with the output on a timeout."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end within {timeout_s} s:\n{self.out}\n{self.err}") from None

    def signal(self, number: int) -> None:
        """Send a signal to the process group, as a terminal does for Ctrl-C."""
        os.killpg(self.process.pid, number)

    def find(self, name: str) -> int:
        """Process id of a command among what this one started."""
        [pid] = [pid for pid in self.pids() if MODULES[name] in read_command_line(pid)]
        return pid

    def pids(self) -> list[int]:
        """Every living process that carries the mark."""
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if carries(pid, self.mark)]


@dataclass
class Runner:
    """Starts commands for one test."""

    logs: Path
    commands: list[Command] = field(default_factory=list)

    def start(self, name: str, *options: object) -> Command:
        """Start a command in the repository's root."""
        mark = uuid.uuid4().hex
        self.logs.mkdir(parents=True, exist_ok=True)
        number = len(self.commands)
        out_path, err_path = self.logs / f"{number}-{name}.out", self.logs / f"{number}-{name}.err"
        with out_path.open("w") as out, err_path.open("w") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "prime_rl", name, *map(str, options)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                text=True,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": PYTHON_PATH, MARK: mark},
                # Not a session: Linux schedules each as a whole, and one that spins can let others wait for seconds.
                process_group=0,
                preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # as in the foreground
            )
        command = Command(name, process, out_path, err_path, mark)
        self.commands.append(command)
        return command

    def run(self, name: str, *options: object) -> Command:
        """Run a command to its end."""
        command = self.start(name, *options)
        command.wait()
        return command

    def run_well(self, name: str, *options: object) -> Command:
        """Run a command that must succeed."""
        command = self.run(name, *options)
        assert command.process.returncode == 0, f"{name} failed:\n{command.out}\n{command.err}"
        return command


@contextmanager
def runner(logs: Path) -> Iterator[Runner]:
    """A runner that ends all its processes after the test."""
    found = Runner(logs)
    try:
        yield found
    finally:
        for command in found.commands:
            for pid in with_descendants(command.pids()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            command.process.wait(30)


def until(
    condition: Callable[[], Any], what: str, command: Command | None = None, deadline_s: float = DEADLINE_S
) -> Any:
    """The first truthy value of `condition`; fails with `what` after the deadline, or when `command` ends first."""
    deadline = time.monotonic() + deadline_s
    while not (value := condition()):
        if command is not None and command.process.poll() is not None:
            raise AssertionError(f"{command.name} ended before {what}:\n{command.out}\n{command.err}")
        assert time.monotonic() < deadline, f"waited {deadline_s} s for {what}"
        time.sleep(0.05)
    return value


def with_descendants(pids: list[int]) -> list[int]:
    """Descendants by parent pid: vLLM's processes overwrite their environment, and with it the mark."""
    found = list(pids)
    for pid in found:
        with suppress(OSError):  # it has ended meanwhile
            for path in Path(f"/proc/{pid}/task").glob("*/children"):
                found += [child for child in map(int, path.read_text().split()) if child not in found]
    return found


def carries(pid: int, mark: str) -> bool:
    try:
        return f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def read_caught(pid: int) -> set[int]:
    """Signals for which a process has a handler."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return {number for number in range(1, 65) if int(line.split()[1], 16) >> (number - 1) & 1}
    return set()


def read_command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def metric_rows(output_dir: Path, process: str, key: str) -> list[dict[str, Any]]:
    """Rows of a process in metrics.jsonl that contain a key; a row that is being written is left out."""
    rows = load_jsonl(output_dir / "metrics.jsonl")
    return [row for row in rows if row["process"] == process and key in row]


def digests(step_dir: Path) -> dict[str, str]:
    """Tensor -> digest of a published step."""
    tensors = json.loads((step_dir / "manifest.json").read_text())["tensors"]
    return {name: entry["digest"] for name, entry in tensors.items()}
