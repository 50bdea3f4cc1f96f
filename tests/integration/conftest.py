"""A browser for the tests that need one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_browser import Open, OpenPage

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


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
