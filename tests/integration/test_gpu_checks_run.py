"""`make gpu` without a GPU: every check passes with tiny sizes, or is skipped for want of a device.

Two commands run them at once, which takes a third less time.
"""

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
    stages = {check.name.partition(".")[0] for check in CHECKS}
    halves = {"runs": ["runs.*"], "others": [f"{stage}.*" for stage in sorted(stages - {"runs"})]}
    commands = {
        half: subprocess.Popen(
            [sys.executable, "-m", "dev.gpu", "--out", str(tmp_path / half), *patterns],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for half, patterns in halves.items()
    }
    rows, table = [], ""
    printed = {half: command.communicate()[0] for half, command in commands.items()}
    for half, command in commands.items():
        log = (tmp_path / half / "log.txt").read_text()
        assert command.returncode == 0, f"{printed[half]}\n{log[-5000:]}"
        rows += [json.loads(line) for line in (tmp_path / half / "results.jsonl").read_text().splitlines()]
        table += (tmp_path / half / "table.md").read_text()
    assert sorted(row["name"] for row in rows) == sorted(check.name for check in CHECKS)
    needs = {check.name: check.need for check in CHECKS}
    for row in rows:
        expected = "skipped" if needs[row["name"]] != Need.NOTHING else "ok"
        assert row["status"] == expected, row
    assert all(f"| {check.name} |" in table for check in CHECKS)
