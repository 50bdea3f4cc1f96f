"""A training run completes and logs failures when its environment is killed, hangs, raises and leaks."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from cli_runner import Command, Runner, metric_rows, read_command_line, runner, until
from fake_engine import FakeEngine, serve

from prime_rl.configuration.sections import EnvConfig, SamplingConfig
from prime_rl.envs.worker import Load, encode
from prime_rl.runtime.framing import send_frame
from prime_rl.runtime.machine import find_free_port
from prime_rl.utils.client import InferenceClient
from prime_rl.utils.vf import build_sampling_args, open_environments
from rollouts.training.agent_integration import Rollout
from rollouts.training.steps import complete_steps

KINDS = "fine once-hang fine raise fine once-leak fine fine fine fine fine fine"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Runner]:
    with runner(tmp_path / "said") as found:
        yield found


def workers(command: Command) -> list[int]:
    return [pid for pid in command.pids() if "prime_rl.envs.worker" in read_command_line(pid)]


def test_a_run_survives_its_environment(run: Runner, tmp_path: Path) -> None:
    out = tmp_path / "out"
    env = {
        "id": "./tests/fakes/fault_injection.py",
        "name": "fault_injection",
        "num_workers": 3,
        "stall_timeout": 5,
        "max_memory_gb": 0.2,
        "args.kinds": KINDS,
        "args.marks": tmp_path,
        "args.leak_mb": 200,
    }
    options = [word for key, value in env.items() for word in (f"--orchestrator.env.0.{key}", value)]
    options += ["--output-dir", out, "--inference.server.port", find_free_port(), "--max-steps", 6]
    command = run.start("rl", "@", "tests/integration/letters.toml", "--max-async-level", 1, *options)
    until(lambda: len(complete_steps(out / "weights")) >= 1, "the first step", command)
    os.kill(workers(command)[0], signal.SIGKILL)
    assert command.wait() == 0, command.out + command.err
    assert complete_steps(out / "weights")[-1] == 6
    rows = metric_rows(out, "orchestrator", "reward/mean")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    log = (out / "logs" / "orchestrator.log").read_text()
    for words in ("signal SIGKILL", "stood still", "has grown"):
        assert log.count(words) == 1, log
    assert rows[-1]["error/quarantined"] == 1, "the row that raises, and no other"
    assert workers(command) == [] == command.pids()


def test_a_group_of_environments_in_a_worker() -> None:
    config = EnvConfig(id="adapter_envs:load_environment", args={"kind": "group"})
    with serve(FakeEngine(reply=lambda body: "yes")) as engine, open_environments([config]) as found:
        [environment] = found.values()

        async def main() -> list[Rollout]:
            args = [build_sampling_args(SamplingConfig(), seed) for seed in range(3)]
            row = environment.rows()[0]
            return await environment.run_group(row, InferenceClient(engine.base_url), "m", args, 0)

        rollouts = anyio.run(main)
    assert [(r.reward, r.task, r.error) for r in rollouts] == [(1.0, "a", None)] * 3


@pytest.mark.parametrize("environment", ["./tests/integration/letters.py", "missing"])
def test_a_worker_whose_parent_stops_during_loading_is_silent(environment: str) -> None:
    (parent, child), heartbeat = socket.socketpair(), os.memfd_create("heartbeat")
    os.ftruncate(heartbeat, mmap.PAGESIZE)
    send_frame(parent, encode(Load(environment, {}, 10.0, True, sys.path, None)))
    parent.close()
    fds = [child.fileno(), child.fileno(), heartbeat]
    command = [sys.executable, "-m", "prime_rl.envs.worker", *map(str, fds), str(os.getpid())]
    done = subprocess.run(command, pass_fds=fds, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
