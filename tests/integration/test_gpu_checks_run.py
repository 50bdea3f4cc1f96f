"""`make gpu` without a GPU: every check passes with tiny sizes, or is skipped for want of a device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from dev.gpu.registry import CHECKS, Need

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(600)
def test_every_check_passes_or_needs_a_device(tmp_path: Path) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "dev.gpu", "--out", str(tmp_path)],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    log = (tmp_path / "log.txt").read_text()
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{log[-5000:]}"
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [row["name"] for row in rows] == [check.name for check in CHECKS]
    needs = {check.name: check.need for check in CHECKS}
    for row in rows:
        expected = "skipped" if needs[row["name"]] != Need.NOTHING else "ok"
        assert row["status"] == expected, row
    table = (tmp_path / "table.md").read_text()
    assert all(f"| {check.name} |" in table for check in CHECKS)
