"""Files that are replaced in one step."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from rollouts.training.files import replace_file


def test_a_file_is_replaced_whole_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.toml"
    replace_file(path, "h\u00e9\n", mode=0o600)
    assert path.read_bytes() == "h\u00e9\n".encode() and stat.S_IMODE(path.stat().st_mode) == 0o600
    replace_file(path, b"second")
    assert path.read_bytes() == b"second" and [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_failed_replacement_keeps_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    replace_file(path, "old")

    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match="no space"):
        replace_file(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
