"""The page of a run that starts: the hint, and the server that ends with the run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from prime_rl.runtime import run_page
from prime_rl.runtime.process_tree import TOKEN_VARIABLE


def test_the_first_line_names_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with run_page.offer_page(tmp_path / "a run", False):
        assert capsys.readouterr().out == f"Page of this run: monitor '{tmp_path}/a run' --open\n"


@pytest.mark.parametrize("variable", [TOKEN_VARIABLE, "WORLD_SIZE"])
def test_processes_of_another_command_print_nothing(
    variable: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    with run_page.offer_page(tmp_path, True):
        assert capsys.readouterr().out == ""


def test_the_server_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    class Recorded(run_page.subprocess.Popen):  # type: ignore[name-defined, misc]
        def __init__(self, command: list[str], **options: object) -> None:
            assert command[1:] == ["-m", "prime_rl.monitor.wandb_monitor", str(tmp_path), "--open"]
            super().__init__([sys.executable, "-c", "import time; time.sleep(60)"], **options)
            started.append(self)

    monkeypatch.setattr(run_page.subprocess, "Popen", Recorded)
    with pytest.raises(KeyboardInterrupt), run_page.offer_page(tmp_path, True):
        assert started[0].poll() is None
        raise KeyboardInterrupt
    assert started[0].poll() is not None
