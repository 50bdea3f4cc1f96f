"""Make a picture of the page of a run: `python dev/page_picture.py outputs/rl docs/monitor.png`.

Needs playwright and a Chromium (`make test-extras`).
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from prime_rl.monitor.local_runs import open_run
from prime_rl.monitor.report import write_report

ROOT = Path(__file__).parents[1]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTH = 1180


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="directory of a run")
    parser.add_argument("picture", type=Path, nargs="?", default=ROOT / "docs" / "monitor.png")
    parser.add_argument("--section", default="overview", help="tab of the page (overview)")
    parser.add_argument("--theme", choices=("light", "dark"), default="light")
    parser.add_argument("--height", type=int, default=880, help="pixels from the top (880)")
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        report = Path(folder) / "report.html"
        write_report(open_run(options.run), report)
        path = next(filter(None, map(shutil.which, BROWSERS)), None)
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(
            viewport={"width": WIDTH, "height": options.height}, color_scheme=options.theme, reduced_motion="reduce"
        )
        page.goto(f"{report.as_uri()}#{options.section}")
        page.wait_for_selector("main > *:not(.loading)")
        page.wait_for_timeout(500)
        page.screenshot(path=options.picture)
        browser.close()
    print(f"{options.picture}: {options.picture.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
