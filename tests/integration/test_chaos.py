"""Short chaos test: one exact run with a crashed server, a stopped process and a corrupt checkpoint."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from chaos import NUM_STEPS, Fault, Trial, check, draw_trial, run_reference, run_trial
from cli_runner import digests, metric_rows, runner

from rollouts.training.steps import step_path


@pytest.mark.timeout(400)
def test_a_run_that_is_hit_ends_where_the_undisturbed_one_does(tmp_path: Path) -> None:
    """Weights, optimizer, random states and data position byte for byte; no process is left."""
    reference = run_reference(tmp_path)
    assert digests(step_path(reference / "weights", 2)) != digests(step_path(reference / "weights", 4))
    batches = metric_rows(reference, "orchestrator", "reward/mean")
    assert [row["step"] for row in batches] == list(range(1, NUM_STEPS + 1))
    assert all(row["batch/off_policy_level/max"] == 0 and row["reward/mean"] > 0 for row in batches)
    steps = metric_rows(reference, "trainer", "mismatch_kl/max")
    assert [(row["step"], row["mismatch_kl/max"]) for row in steps] == [(n + 1, 0) for n in range(NUM_STEPS)]
    assert all(row["optim/grad_norm"] > 0 for row in steps)
    faults = [Fault("kill inference", 1, 0.1), Fault("stop", 3, 0.0), Fault("truncate", 4, 0.3)]
    trial = Trial(0, tmp_path / "hit" / "out", 0, faults, random.Random(3))
    with runner(tmp_path / "said") as run:
        run_trial(trial, run)
        reported = (trial.out / "logs" / "orchestrator.log").read_text()
        # Its return is reported at the next check, possibly after the end of the run.
        assert "does not respond" in reported and "Verified version 1: engine log-probs match" in reported
    check(trial, reference)
    assert trial.hits.total() == 3 and trial.attempts == 2


def test_every_kind_of_fault_gets_its_share() -> None:
    kinds = [fault.kind for seed in range(60) for fault in draw_trial(seed, Path("out")).faults]
    assert all(kinds.count(kind) >= 12 for kind in set(kinds)) and len(set(kinds)) == 9
