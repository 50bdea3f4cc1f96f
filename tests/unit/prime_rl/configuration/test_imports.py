"""Functions that are named in a configuration as `package.module:name`."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from prime_rl.configuration.imports import import_function


def test_function_is_imported_by_name() -> None:
    assert import_function("math:exp", "loss.import_path") is math.exp


def test_modules_of_the_working_directory_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "functions_of_a_user.py").write_text("def hint(example, rng):\n    return 'a'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert import_function("functions_of_a_user:hint", "context_fn")({}, None) == "a"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere:f", r"key = 'nowhere:f' cannot be imported .*: write it as package\.module:name"),
        ("math:nothing", "key = 'math:nothing' cannot be imported"),
        ("math", "key = 'math' cannot be imported"),
        ("", "key = '' cannot be imported"),
        ("math:pi", "key = 'math:pi' is a float, not a function"),
    ],
)
def test_bad_names_are_rejected_with_their_key(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        import_function(path, "key")
