"""`python -m prime_rl`: the same commands as the console scripts."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from prime_rl import __main__, __version__

PYPROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())


def test_the_commands_are_those_that_pip_installs() -> None:
    assert {name: function for name, (function, _) in __main__.COMMANDS.items()} == PYPROJECT["project"]["scripts"]


def test_a_command_is_run_by_name() -> None:
    done = subprocess.run([sys.executable, "-m", "prime_rl", "eval", "--version"], capture_output=True, text=True)
    assert done.stdout == f"prime-rl {__version__}\n" and done.returncode == 0


@pytest.mark.parametrize("command", __main__.COMMANDS)
def test_every_command_prints_the_version(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["prime_rl", command, "--version"])
    with pytest.raises(SystemExit) as end:
        __main__.main()
    assert end.value.code in (0, None) and capsys.readouterr().out == f"prime-rl {__version__}\n"


@pytest.mark.parametrize(("argv", "code", "text"), [([], 0, "synthesize"), (["evall"], 2, "did you mean eval?")])
def test_unknown_commands_and_the_list(
    argv: list[str], code: int, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["prime_rl", *argv])
    try:
        __main__.main()
    except SystemExit as end:
        assert end.code == code
    shown = capsys.readouterr()
    assert text in shown.out + shown.err


@pytest.mark.parametrize(
    ("given", "rounds"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
    ids=["default", "rounds", "policy"],
)
def test_threads_wait_briefly_unless_told_otherwise(given: dict[str, str], rounds: str) -> None:
    code = "import prime_rl, os, sys; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_"))}
    done = subprocess.run([sys.executable, "-c", code], env={**kept, **given}, capture_output=True, text=True)
    assert done.stdout == f"{rounds} False\n", done.stderr
