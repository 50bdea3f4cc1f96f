"""Kept help pages: shown as long as the sources they were made from stand, and never in the way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from prime_rl.utils.command import run_command
from prime_rl.utils.help_page import keep_page, read_page

PAGE = "usage: made-up\n\n[section]  Ünïcode, and a blank line\n"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("PRIME_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "prime-rl" / "help"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of ours that is loaded."""
    module = ModuleType("prime_rl.made_up")
    module.__file__ = str(tmp_path / "with a space.py")
    Path(module.__file__).write_text("x = 1\n")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return Path(module.__file__)


def ask_help(monkeypatch: pytest.MonkeyPatch, config_cls: str, *argv: str) -> int | None:
    monkeypatch.setattr("sys.argv", ["made-up", *argv])
    with pytest.raises(SystemExit) as stop:
        run_command("made-up", config_cls, lambda _: pytest.fail("must not run"), summary="Makes up.")
    return stop.value.code  # type: ignore[return-value]


def test_a_page_stands_while_its_sources_do(source: Path) -> None:
    assert read_page("made-up") is None
    keep_page("made-up", PAGE)
    assert read_page("made-up") == PAGE and read_page("other") is None
    source.write_text("x = 22\n")
    assert read_page("made-up") is None
    keep_page("made-up", PAGE)
    assert read_page("made-up") == PAGE
    os.utime(source, ns=(0, 0))
    assert read_page("made-up") is None
    keep_page("made-up", PAGE)
    source.unlink()
    assert read_page("made-up") is None


@pytest.mark.parametrize("damage", [b"", b"\n\n", b"no stamps\n\npage", b"\xff\xfe", b"1 2 /nowhere.py\n\npage"])
def test_a_damaged_page_is_no_page(cache: Path, damage: bytes) -> None:
    keep_page("made-up", PAGE)
    (kept,) = cache.iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(damage)
    assert read_page("made-up") is None
    kept.write_bytes(whole[: whole.index(b"\n\n")])  # cut off before the page
    assert read_page("made-up") is None


def test_where_nothing_can_be_written_nothing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert ask_help(monkeypatch, "prime_rl.eval.config:EvalConfig", "--help") == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("usage: made-up") and not shown.err


def test_help_alone_shows_the_kept_page_and_imports_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keep_page("made-up", PAGE)
    for word in ("--help", "-h"):
        assert ask_help(monkeypatch, "nowhere:Nothing", word) == 0
        assert capsys.readouterr().out == PAGE


def test_the_first_help_keeps_what_the_second_shows(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask_help(monkeypatch, "prime_rl.eval.config:EvalConfig", "--help") == 0
    first = capsys.readouterr().out
    assert first.startswith("usage: made-up") and len(list(cache.iterdir())) == 1
    assert ask_help(monkeypatch, "nowhere:Nothing", "--help") == 0
    assert capsys.readouterr().out == first


def test_credentials_are_no_configuration(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    keep_page("made-up", PAGE)
    monkeypatch.setenv("PRIME_API_KEY", "secret")
    monkeypatch.setenv("PRIME_MAX_STEPS", "")
    assert ask_help(monkeypatch, "nowhere:Nothing", "--help") == 0
    assert capsys.readouterr().out == PAGE


def test_a_relative_cache_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    keep_page("made-up", PAGE)
    assert read_page("made-up") == PAGE and not (tmp_path / "here").exists()
    assert len(list((tmp_path / "home/.cache/prime-rl/help").iterdir())) == 1


def test_pages_without_docstrings_are_others() -> None:
    code = "from prime_rl.utils.help_page import _page_path; print(_page_path('made-up'))"
    paths = {subprocess.check_output([sys.executable, *flags, "-c", code]) for flags in ([], ["-OO"])}
    assert len(paths) == 2


def test_a_full_disk_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, *_: object, **__: object) -> None:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    keep_page("made-up", PAGE)
    assert list(cache.iterdir()) == []


def test_values_that_are_given_are_shown_and_not_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keep_page("made-up", PAGE)
    config_cls = "prime_rl.eval.config:EvalConfig"
    assert ask_help(monkeypatch, config_cls, "--help", "--num-examples", "77") == 0
    assert "77" in capsys.readouterr().out
    monkeypatch.setenv("PRIME_NUM_EXAMPLES", "78")
    assert ask_help(monkeypatch, config_cls, "--help") == 0
    assert "78" in capsys.readouterr().out
    assert read_page("made-up") == PAGE and len(list(cache.iterdir())) == 1
