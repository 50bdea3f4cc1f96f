"""End-to-end: `rl` with truncated sampling, in which engine and trainer agree bit for bit after every update."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_runner import ROOT, metric_rows, runner

from prime_rl.runtime.machine import find_free_port

CONFIG = ROOT / "tests" / "integration" / "chaos.toml"


@pytest.mark.slow
@pytest.mark.parametrize("replay", [True, False])
def test_truncated_runs_have_no_mismatch_with_replay(tmp_path: Path, replay: bool) -> None:
    truncated = ["--orchestrator.sampling.top_p", 0.9, "--orchestrator.sampling_support_replay", str(replay).lower()]
    with runner(tmp_path / "said") as run:
        options = ["--output-dir", tmp_path / "out", "--inference.server.port", find_free_port()]
        run.run_well("rl", "@", CONFIG, *truncated, *options)
    rows = metric_rows(tmp_path / "out", "trainer", "mismatch_kl/max")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6] and all(row["optim/grad_norm"] > 0 for row in rows)
    for row in rows:
        extremes = row["importance_ratio/min"], row["importance_ratio/max"]
        if replay:
            assert row["mismatch_kl/max"] == 0.0 and extremes == (1.0, 1.0)
            assert row["importance_ratio/ess"] == 1.0 and "first_mismatch/min" not in row
        else:
            assert row["mismatch_kl/mean"] > 1e-3 and row["importance_ratio/mean"] < 0.97
