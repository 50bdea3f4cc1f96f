"""Benchmark page: new results replace their sections, others stay."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import report
from results import Row, finish

MACHINE: dict[str, Any] = {"cpu": "a processor", "cores": 2, "load": 0.5}


def write(folder: Path, name: str, value: float, cpu: str = "a processor") -> None:
    finish(name, [Row("speed", value, ">=", 2.0)], MACHINE | {"cpu": cpu}, path=folder / f"{name}.json")


def make(monkeypatch: pytest.MonkeyPatch, results: Path, page: Path) -> str:
    monkeypatch.setattr(sys, "argv", ["report.py", "--results", str(results), "--output", str(page)])
    report.main()
    return page.read_text()


def list_headings(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("## ")]


def test_tables_are_replaced_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, first, second = tmp_path / "page.md", tmp_path / "first", tmp_path / "second"
    write(first, "long_tail", 3.0)
    write(first, "engine_real", 4.0)
    text = make(monkeypatch, first, page)
    assert text.startswith("# Benchmarks\n") and list_headings(text) == ["## engine_real", "## long_tail"]
    assert "| speed | 4 | >= 2 | ok |" in text and text.count("All thresholds hold (1).") == 2
    page.write_text(text.replace("## long_tail\n", "## long_tail\n\nA note by hand.\n"))
    write(second, "engine_real", 1.0)
    write(second, "engine", 5.0)
    text = make(monkeypatch, second, page)
    assert list_headings(text) == ["## engine", "## engine_real", "## long_tail"]
    assert "| speed | 1 | >= 2 | MISSED |" in text and "| speed | 4 |" not in text
    assert "Misses 1 of 1 thresholds: speed." in text
    assert "A note by hand." in text and "| speed | 3 |" in text
    assert make(monkeypatch, second, page) == text


def test_tables_of_other_processors_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, other = tmp_path / "page.md", tmp_path / "other"
    write(tmp_path, "sync_delta_real", 3.0)
    make(monkeypatch, tmp_path, page)
    write(other, "sync_delta_real", 4.0, "another")
    text = make(monkeypatch, other, page)
    assert list_headings(text) == ["## sync_delta_real"]
    first, second = (text.index(f"### 2 x {cpu}\n") for cpu in ("a processor", "another"))
    assert first < text.index("| speed | 3 |") < second < text.index("| speed | 4 |")
    assert text.count(report.ABOUT["sync_delta"]) == 1


def test_notes_above_a_table_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, notes = tmp_path / "page.md", "Two threads; `speed` is a ratio.\n\nMeasured on an idle machine."
    write(tmp_path, "engine", 3.0)
    summary, table = make(monkeypatch, tmp_path, page).split("\n\n| | measured")
    page.write_text(f"{summary}\n\n{notes}\n\n| | measured{table}")
    write(tmp_path, "engine", 1.0)
    text = make(monkeypatch, tmp_path, page)
    assert f"thresholds: speed.\n\n{notes}\n\n| | measured | threshold |" in text
    assert "| speed | 1 |" in text and "| speed | 3 |" not in text


def test_a_missed_threshold_is_an_exit_code(tmp_path: Path) -> None:
    assert finish("x", [Row("a", 1.0, "<=", 2.0), Row("b", 1.0)], MACHINE, path=tmp_path / "x.json") == 0
    assert finish("x", [Row("a", 3.0, "<=", 2.0)], MACHINE, path=tmp_path / "x.json") == 1
    assert json.loads((tmp_path / "x.json").read_text())["rows"][0]["ok"] is False


def test_empty_results_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="holds no results"):
        make(monkeypatch, tmp_path, tmp_path / "page.md")
