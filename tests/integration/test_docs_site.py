"""The documentation site builds without a network and without a warning: a dead link or a missing page is one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_site_builds_without_warnings_and_links_every_page(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="needs the extra docs: pip install 'prime-rl[docs]'")
    offline = os.environ | {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy")}
    build = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "docs", str(tmp_path / "html")]
    result = subprocess.run(build, cwd=ROOT, env=offline, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]

    home = (tmp_path / "html/index.html").read_text()
    linked = set(re.findall(r'href="([\w/.-]+)\.html', home))
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    assert pages <= linked, f"not in a toctree of docs/index.md: {sorted(pages - linked)}"
    assert {"generated/config/rl", "generated/api/rollouts.training"} <= linked
    assert "max_async_level" in (tmp_path / "html/generated/config/rl.html").read_text()
