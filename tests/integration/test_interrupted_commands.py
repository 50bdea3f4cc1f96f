"""Ctrl-C at any instant of a command: exit code 130, no traceback, no process left."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_runner import THREE_FILES, Command, Runner, read_caught, runner, until

from prime_rl.runtime.machine import find_free_port

COMMANDS = {
    "sft": ("@", "configs/debug/sft/train.toml", "--max-steps", 10_000),
    "trainer": ("@", "configs/debug/rl/train.toml", "--max-steps", 10_000),
    "rl": (*THREE_FILES, "--max-steps", 10_000),
    "orchestrator": ("@", "configs/debug/orch.toml"),
    "inference": ("@", "configs/debug/infer.toml"),
    "eval": ("@", "examples/reverse_text/tiny/eval.toml", "--model.name", "tiny-qwen3", "--rollouts-per-example", 100),
    "synthesize": (
        *("@", "configs/debug/synthesize/single_turn.toml", "--model.name", "tiny-qwen3"),
        *("--num-examples", 1000, "--rollouts-per-example", 20),
    ),
}
PORTS = {"rl": "--inference.server.port", "inference": "--server.port"}
RANDOM = {"eval": "--model.debug.random_init", "synthesize": "--model.debug.random_init"}
MOMENTS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.3, 1.7, 2.2, 2.8, 3.4, 4.0)
pytestmark = pytest.mark.skipif(
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
    reason="SIGINT is ignored; cure: run the tests in the foreground",
)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Runner]:
    with runner(tmp_path / "logs") as found:
        yield found


def start(run: Runner, name: str, output_dir: Path) -> Command:
    """Start a command and wait until it handles signals, which Python itself does for SIGINT only."""
    options = [PORTS[name], find_free_port()] if name in PORTS else []
    options += [RANDOM[name], "true"] if name in RANDOM else []
    command = run.start(name, *COMMANDS[name], "--output-dir", output_dir, *options)
    until(lambda: signal.SIGTERM in read_caught(command.process.pid), "the handlers", command)
    return command


def check_end(command: Command, code: int, moment: float) -> None:
    where = f"{command.name} after {moment} s:\n{command.out}\n{command.err}"
    assert command.wait(60) == code, where
    assert "Traceback" not in command.out + command.err, where
    assert "Exception ignored" not in command.out + command.err, where
    until(lambda: not command.pids(), f"the end of all processes of {where}", deadline_s=15)


@pytest.mark.parametrize("moment", [0.0, 0.4, 1.2])
def test_ctrl_c_ends_a_starting_command(run: Runner, tmp_path: Path, moment: float) -> None:
    command = start(run, "sft", tmp_path / "out")
    time.sleep(moment)
    command.signal(signal.SIGINT)
    check_end(command, 130, moment)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_signal_ends_every_command(run: Runner, tmp_path: Path, name: str, number: signal.Signals) -> None:
    for moment in MOMENTS:
        command = start(run, name, tmp_path / f"{moment}")
        time.sleep(moment)
        command.signal(number)
        check_end(command, 128 + number, moment)
