"""Fixtures of the tests of `monitor`."""

from __future__ import annotations

from pathlib import Path

import pytest
from page_runs import write_page_run


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that tests only read."""
    return write_page_run(tmp_path_factory.mktemp("page") / "run")
