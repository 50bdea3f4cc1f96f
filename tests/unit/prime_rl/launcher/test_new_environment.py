"""`rl init`: the written environment loads, its configuration parses, its own test passes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from prime_rl.config import RLConfig
from prime_rl.launcher.new_environment import init, write_environment
from prime_rl.utils.pydantic_config import parse_argv
from rollouts.training.environments import load_environment


def test_the_written_files_fit_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert init(["count-vowels"]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    assert any("rl @ environments/count_vowels/rl.toml" in line for line in lines)
    assert len({line.rindex("   ") for line in lines}) == 1, "the purposes are aligned"
    folder = tmp_path / "environments" / "count_vowels"
    names = {"count_vowels.py", "pyproject.toml", "rl.toml", "test_count_vowels.py"}
    assert {file.name for file in folder.iterdir()} == names
    assert not [file for file in folder.iterdir() if "my_task" in file.read_text() or "my-task" in file.read_text()]
    config, _ = parse_argv(RLConfig, ["@", str(folder / "rl.toml")], "rl", {})
    [env] = config.orchestrator.env
    environment = load_environment(env.id, env.args)
    train, held_out = environment.rows(), environment.rows("eval")
    assert len(train) > len(held_out) > 0 and len(train[0]["answer"]) == env.args["length"]
    assert not {row["answer"] for row in train} & {row["answer"] for row in held_out}
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    done = subprocess.run(tests, capture_output=True, text=True, cwd=tmp_path)
    assert "2 passed" in done.stdout, done.stdout


@pytest.mark.parametrize("name", ["9lives", "json", "class", "Task", "a.b", ""])
def test_a_name_that_cannot_be_imported_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be a module|is a module of Python"):
        write_environment(name, tmp_path)
    assert not list(tmp_path.iterdir())


def test_existing_files_are_kept(tmp_path: Path) -> None:
    write_environment("one", tmp_path)
    with pytest.raises(ValueError, match="exists"):
        write_environment("one", tmp_path)
