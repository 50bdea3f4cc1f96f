"""Shipped files: found by their name in the repository from any directory, after those of the working directory."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from rollouts.training import shipped
from rollouts.training.datasets.rows import load_rows
from rollouts.training.shipped import FOLDERS, find_file, shipped_dir

ROOT = Path(__file__).parents[3]


def test_files_are_found_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = "examples/reverse_text/tiny/sft.jsonl"
    assert find_file(name) == ROOT / name and load_rows(name)
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text('{"mine": 1}\n')
    assert load_rows(name) == [{"mine": 1}]
    for other in ("examples/none.toml", "docs/overview.md", "none/examples", "/examples/reverse_text", "."):
        assert find_file(other) == Path(other)


def test_an_installed_package_has_its_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "_PACKAGE", tmp_path)
    (tmp_path / "shipped" / "examples").mkdir(parents=True)
    assert shipped_dir("examples") == tmp_path / "shipped" / "examples"


def test_the_wheel_contains_the_folders() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"] == {folder: f"rollouts/shipped/{folder}" for folder in FOLDERS}
