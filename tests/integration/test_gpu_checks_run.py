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


RESUMES = ["runs.rl_resume", "runs.sft_resume"]
"""Checks of kills that test_killed_ranks.py has, too."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("resumes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_check_passes_or_needs_a_device(resumes: bool, tmp_path: Path) -> None:
    checks = [check for check in CHECKS if (check.name in RESUMES) == resumes]
    command = subprocess.run(
        [sys.executable, "-m", "dev.gpu", "--out", str(tmp_path / "out"), *(check.name for check in checks)],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    log = (tmp_path / "out/log.txt").read_text()
    assert command.returncode == 0, f"{command.stdout}\n{log[-5000:]}"
    rows = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]
    assert sorted(row["name"] for row in rows) == sorted(check.name for check in checks)
    needs = {check.name: check.need for check in checks}
    for row in rows:
        expected = "skipped" if needs[row["name"]] != Need.NOTHING else "ok"
        assert row["status"] == expected, row
    table = (tmp_path / "out/table.md").read_text()
    assert all(f"| {check.name} |" in table for check in checks)
