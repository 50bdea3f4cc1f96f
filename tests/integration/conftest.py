"""The order of the files, and a browser for the tests that need one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_browser import Open, OpenPage

LONGEST_FIRST = (
    *("test_rl_command", "test_gpu_checks_run", "test_chaos", "test_killed_ranks", "test_distillation"),
    *("test_eval_commands", "test_integration_training", "test_page", "test_page_views", "test_first_run"),
)
"""Files that take most of the time. `make test-integration` hands out whole files: their fixtures are built once."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that no worker is left alone with one at the end."""
    ranks = {name: rank for rank, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(ranks)))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium without a window; the tests are skipped where there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; cure: make test-extras")
    with api.sync_playwright() as playwright:
        found = next(filter(None, map(shutil.which, BROWSERS)), None)
        if found is None and not Path(playwright.chromium.executable_path).exists():
            pytest.skip("no chromium; cure: apt-get install chromium")
        instance = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield instance
        instance.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    opened: list[OpenPage] = []

    def opening(url: str) -> OpenPage:
        opened.append(OpenPage(browser, url))
        return opened[-1]

    yield opening
    for one in opened:
        one.close()
        assert one.wrong == [], "the page complained"
