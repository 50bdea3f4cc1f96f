"""Functions that are named in a configuration as `package.module:name`."""

from __future__ import annotations

import math

import pytest

from prime_rl.configuration.imports import import_function


def test_function_is_imported_by_name() -> None:
    assert import_function("math:exp", "loss.import_path") is math.exp


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
