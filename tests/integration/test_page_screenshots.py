"""Every tab in a real browser at 1440 and 390 pixels, light and dark: no overflow, readable text, named axes.

PAGE_SCREENSHOTS=<folder> keeps the pictures.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_browser import serve_page
from page_runs import write_context_search, write_evaluation, write_page_run

pytestmark = pytest.mark.timeout(400)

SECTIONS = ("overview", "curves", "timeline", "rollouts", "prompts", "logs", "config")
READY = {
    "overview": ".checks",
    "curves": ".chart svg .axis",
    "timeline": "canvas.lanes",
    "rollouts": ".detail .tabs",
    "prompts": ".answer",
    "logs": ".log li",
    "config": ".settings",
}
DIAGNOSTICS = (
    "importance_ratio/ess",
    "ratios by staleness, 5 %",
    "ratios by staleness, 95 %",
    "effective sample size by staleness",
    "mismatch by position",
)
MISMATCH = ((0, "2.20e-6"), (16, "3.74e-5"), (128, "0.0002838"), (1024, "0.002255"))
POSITIONS = [f"from token {first}\n{value}" for first, value in MISMATCH]
LOG = """\
12:00:01    INFO Step 1 | Reward: 0.1
12:00:02 WARNING health check mask: a long message that names a cure, trainer.parallel.dp, and goes on for a while
12:00:03   ERROR worker failed
"""

# Text with too little contrast to what is behind it: [contrast, text, element].
FAINT_TEXT = """() => {
  const pen = document.createElement('canvas').getContext('2d', { willReadFrequently: true }), known = new Map();
  const rgba = (color) => {
    if (!known.has(color)) {
      pen.clearRect(0, 0, 1, 1); pen.fillStyle = color; pen.fillRect(0, 0, 1, 1);
      known.set(color, [...pen.getImageData(0, 0, 1, 1).data].map((v, i) => i === 3 ? v / 255 : v));
    }
    return known.get(color);
  };
  const over = (top, below) => below.map((v, i) => top[i] * top[3] + v * (1 - top[3]));
  const linear = (v) => v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b) + 0.05;
  const behind = (node) => {
    if (!node) return [255, 255, 255];
    const style = getComputedStyle(node), own = rgba(style.backgroundColor);
    return own[3] === 1 ? own.slice(0, 3) : over(own, behind(node.parentElement));
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.data.trim(), node = walker.currentNode.parentElement;
    if (!text || /SCRIPT|STYLE|OPTION/.test(node.tagName)) continue;
    if (!node.checkVisibility({ visibilityProperty: true })) continue;
    const style = getComputedStyle(node), below = behind(node);
    const ink = over(rgba(node instanceof SVGElement ? style.fill : style.color), below);
    const ratio = Math.max(light(ink) / light(below), light(below) / light(ink));
    if (ratio < 4.5) found.push([ratio.toFixed(2), text.slice(0, 40), `${node.tagName}.${node.getAttribute('class')}`]);
  }
  return found;
}"""
OVERFLOW = """() => document.documentElement.scrollWidth <= innerWidth ? [] : [...document.querySelectorAll('body *')]
  .filter((node) => node.getBoundingClientRect().right > innerWidth + 1).map((node) => node.outerHTML.slice(0, 80))"""
UNNAMED_AXES = """() => [...document.querySelectorAll('.chart')].filter((chart) => chart.querySelector('.line'))
  .filter((chart) => ['.axis.x', '.axis.y'].some((axis) => !chart.querySelector(axis)?.textContent.trim()))
  .map((chart) => chart.getAttribute('aria-label'))"""

COVERED_TICKS = """() => [...document.querySelectorAll('.chart')].flatMap((chart) => {
  const name = chart.querySelector('.axis.y')?.getBoundingClientRect();
  return [...chart.querySelectorAll('.tick[text-anchor="end"]')]
    .filter((tick) => tick.getBoundingClientRect().left < name.right)
    .map((tick) => `${chart.getAttribute('aria-label')}: ${tick.textContent}`);
})"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The page of all runs of a folder with two runs and a search of contexts."""
    folder = tmp_path_factory.mktemp("shots") / "outputs"
    run = write_page_run(folder / "first")
    write_page_run(folder / "second", num_steps=5)
    write_context_search(folder / "search")
    for step, rewards in ((0, [0.0, 0.0, 1.0, 0.0]), (6, [1.0, 0.5, 1.0, 1.0])):
        write_evaluation(run, step, list(rewards))
    (run / "logs").mkdir()
    (run / "logs" / "trainer.log").write_text(LOG * 20)
    with serve_page(folder) as address:
        yield address


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_every_tab_is_readable(url: str, browser: Any, theme: str, width: int, tmp_path: Path) -> None:
    folder = Path(os.environ.get("PAGE_SCREENSHOTS", tmp_path))
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
    page.set_default_timeout(90_000)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda line: errors.append(line.text) if line.type in ("error", "warning") else None)

    def check(name: str) -> None:
        page.screenshot(path=folder / f"{name}-{width}-{theme}.png", full_page=True)
        assert page.evaluate(OVERFLOW) == [], name
        assert page.evaluate(FAINT_TEXT) == [], name
        assert page.evaluate(UNNAMED_AXES) == [], name
        assert page.evaluate(COVERED_TICKS) == [], name

    try:
        page.goto(url)
        page.wait_for_selector(".runs input")
        for name in ("first", "second"):
            page.locator(f".runs input[aria-label='compare {name}']").check()
        page.wait_for_selector(".differences tbody tr")
        page.wait_for_selector(".chart svg .axis")
        check("runs")
        for section in SECTIONS:
            page.goto(f"{url}runs/first/#{section}")
            page.wait_for_selector(READY[section])
            if section == "curves":
                for title in DIAGNOSTICS:
                    page.wait_for_selector(f".chart[aria-label='{title}'] .line", state="attached")
                assert page.locator(".chart[aria-label='mismatch by position'] .key").all_inner_texts() == POSITIONS
            check(section)
        page.goto(f"{url}runs/first/#rollouts?kind=training&step=3&group=301&index=2&view=tokens")
        page.wait_for_selector(".tokens .token")
        check("tokens")
        page.keyboard.press("g")
        page.wait_for_selector(".cards .card")
        check("group")
        page.goto(f"{url}runs/search/#overview")
        page.wait_for_selector(".contexts [open] .added")
        assert page.locator(".contexts li").count() == 17
        assert page.locator(".sentence").inner_text().strip() == (
            "Search of contexts for tiny: 17 contexts, the best one with a mean score of 1."
        )
        check("contexts")
        assert errors == []
    finally:
        page.close()
