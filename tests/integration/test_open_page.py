"""`--open` serves the page of a run that starts, and ends with it."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from cli_runner import Command, Runner, runner, until

from prime_rl.runtime.machine import find_free_port


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Runner]:
    with runner(tmp_path / "said") as found:
        yield found


def read_state(url: str) -> dict[str, Any]:
    with urlopen(f"{url}api/run", timeout=30) as answer:
        state: dict[str, Any] = json.loads(answer.read())["run"]
    return state


def find_url(command: Command) -> str:
    return str(until(lambda: re.findall(r"http://127\.0\.0\.1:\d+/", command.out), "the address", command)[0])


def test_sft_serves_its_page_until_it_ends(run: Runner, tmp_path: Path) -> None:
    options = ["--output-dir", tmp_path / "out", "--max-steps", 10_000, "--open"]
    command = run.start("sft", "@", "configs/debug/sft/train.toml", *options)
    url = find_url(command)
    until(lambda: read_state(url)["state"] == "running", "the state", command)
    until(lambda: "Step 1 |" in command.out + command.err, "the first step", command)  # not while torch is imported
    command.process.send_signal(signal.SIGINT)
    assert command.wait(60) == 130
    assert "Traceback" not in command.out + command.err
    assert f"The page is no longer served; again: monitor {tmp_path / 'out'} --open" in command.out
    assert command.pids() == []


def test_rl_serves_its_page_and_leaves_none(run: Runner, tmp_path: Path) -> None:
    options = ["--inference.server.port", find_free_port(), "--output-dir", tmp_path / "out", "--max-steps", 10_000]
    command = run.start("rl", "@", "tests/integration/letters.toml", *options, "--open")
    url = find_url(command)
    until(lambda: read_state(url)["state"] == "running", "the state", command)
    command.process.kill()
    command.wait()
    until(lambda: not command.pids(), "the end of all processes")
