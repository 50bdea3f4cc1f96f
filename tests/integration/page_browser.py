"""A page in headless Chromium, and the real command that serves the page of a run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

ROOT = Path(__file__).parents[2]
PATIENCE_S = 90.0
SECTIONS = ["overview", "curves", "timeline", "rollouts", "prompts", "logs", "config"]
Open = Callable[[str], "OpenPage"]


class OpenPage:
    """A page with its requests and errors."""

    opened: ClassVar[list[OpenPage]] = []
    """All pages that were not closed."""

    def __init__(self, browser: Any, url: str) -> None:
        self.url, self.page = url, browser.new_page(viewport={"width": 1300, "height": 800})
        self.opened.append(self)
        self.asked: list[str] = []
        self.wrong: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", lambda m: self.wrong.append(m.text) if m.type in ("error", "warning") else None)
        self.page.set_default_timeout(1000 * PATIENCE_S)
        self.page.goto(url)
        self.page.wait_for_selector(".sentence, .list li, .runs li, .lead")

    def close(self) -> None:
        if self in self.opened:
            self.opened.remove(self)
            self.page.close()

    def open_section(self, name: str) -> None:
        """Open a section by its key and wait until it is there, its charts drawn."""
        self.page.keyboard.press(str(1 + SECTIONS.index(name)))
        self.page.wait_for_selector(f"main.{name}" + (" .chart svg .line" if name == "curves" else ""))

    def texts(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_inner_texts()

    def rewards(self) -> list[float]:
        """Rewards of the list, by text content: a row not painted yet has no inner text (content-visibility)."""
        return [float(text) for text in self.page.locator(".list .chip").all_text_contents()]

    def counter(self) -> str:
        return self.page.locator(".filters output").inner_text()

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        """Look again until it holds; nothing is evaluated in the page by text, which its policy forbids."""
        until = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < until, f"{what}; errors of the page: {self.wrong}"
            self.page.wait_for_timeout(20)

    def wait_counter(self, text: str) -> None:
        self.wait_until(lambda: self.counter().startswith(text), f"the counter says {self.counter()}, not {text}")


@contextmanager
def serve_page(run: Path) -> Iterator[str]:
    """The address at which the real command shows a run, or all runs of a folder.

    Its pages are closed before it ends, since they would report that they cannot reach it.
    """
    with start_page(run) as (url, _):
        yield url
        for page in [page for page in OpenPage.opened if page.url.startswith(url)]:
            page.close()


@contextmanager
def start_page(run: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address of a page, and the process that serves it."""
    command = [sys.executable, "-m", "prime_rl.monitor.wandb_monitor", str(run), "--serve", "--port", "0"]
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")])),
    }
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
    try:
        assert process.stdout is not None
        [url] = re.findall(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
        yield url, process
    finally:
        process.terminate()
        process.wait(30)
