"""Short chaos test: one exact run with a crashed server, a stopped process and a corrupt checkpoint."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path

import pytest
from chaos import CONFIG, NUM_STEPS, Fault, Trial, check, check_asynchronous, draw_trial, run_reference, run_trial
from cli_runner import digests, metric_rows, runner

from prime_rl.config import RLConfig
from prime_rl.trainer.rl.train import train
from prime_rl.utils.pydantic_config import parse_argv
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
        # By an update, or by a health check: one that begins after the restart waits for the server.
        assert "unreachable" in reported or re.search(r"http\S+ failed \(", reported)
        assert "Verified version 1: engine log-probs match" in reported
    check(trial, reference)
    assert trial.hits.total() == 3 and trial.attempts == 2


@pytest.mark.timeout(400)
def test_a_resumed_trainer_with_a_critic_is_exact(tmp_path: Path) -> None:
    """From the third checkpoint of a run, with the same batches, it ends where the run did, byte for byte."""
    settings = ("--trainer.critic.warmup_steps", 1, "--trainer.critic.gae_lambda", 0.9, "--orchestrator.keep_rollouts")
    whole, again = run_reference(tmp_path, settings), tmp_path / "again"
    check_asynchronous(whole, 0)
    steps = metric_rows(whole, "trainer", "value_loss/mean")
    assert [row["step"] for row in steps] == list(range(1, NUM_STEPS + 1)) and steps[-1]["values/max"] != 0
    for part in ("rollouts", "checkpoints/step_3"):
        shutil.copytree(whole / part, again / part)
    argv = ["@", str(CONFIG), "--output_dir", str(again), "--max_async_level", "0", "--ckpt.resume_step", "3"]
    config, _ = parse_argv(RLConfig, [*argv, *map(str, settings)], "rl", {})
    assert train(config.trainer) == 0
    for part in (f"weights/step_{NUM_STEPS}", f"checkpoints/step_{NUM_STEPS}/trainer"):
        ours, theirs = (sorted((root / part).iterdir()) for root in (whole, again))
        assert [path.name for path in ours] == [path.name for path in theirs]
        for one, other in zip(ours, theirs, strict=True):
            assert one.read_bytes() == other.read_bytes(), f"{part}/{one.name}"
    first, second = (digests(step_path(whole / "weights", step)) for step in (1, 2))
    assert first != second and not any(name.startswith("value") for name in second)


def test_every_kind_of_fault_gets_its_share() -> None:
    kinds = [fault.kind for seed in range(60) for fault in draw_trial(seed, Path("out")).faults]
    assert all(kinds.count(kind) >= 12 for kind in set(kinds)) and len(set(kinds)) == 9
