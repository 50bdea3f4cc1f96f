"""Two environments of different reward scale in one CPU run through the real processes, over a socket."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runner import Command, metric_rows, runner

from prime_rl.runtime.machine import find_free_port
from rollouts.training.metrics import load_jsonl
from rollouts.training.steps import complete_steps

MIXED = ("@", "tests/integration/mixed.toml")


def options(out: Path) -> list[object]:
    ports = ("--inference.server.port", find_free_port(), "--transport.port", find_free_port())
    return ["--output_dir", out, *ports]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Command]:
    """The output directory of the run, and the command that has ended."""
    root = tmp_path_factory.mktemp("mixed")
    with runner(root / "said") as run:
        return root / "out", run.run_well("rl", *MIXED, *options(root / "out"))


def test_groups_are_mixed_by_ratio_and_compared_within(mixed: tuple[Path, Command]) -> None:
    out, _ = mixed
    rows = metric_rows(out, "orchestrator", "reward/mean")[:4]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert sum(row["batch/letters"] for row in rows) / 4 == 0.75, "three of four groups"
    for row in rows:
        assert row["reward/letters"] <= 1 < row["reward/loud"] <= 100
        counted = sum(row[f"groups/{name}"] for name in ("trained", "filtered", "quarantined", "in_flight"))
        assert row["groups/drawn"] == counted and row["batch/off_policy_level/max"] <= 1
    by_env: dict[str, list[float]] = {}
    for sample in load_jsonl(out / "samples.jsonl"):
        by_env.setdefault(sample["env"], []).append(abs(sample["advantage"]))
    assert max(by_env["letters"]) <= 1 < max(by_env["loud"])
    assert [row["step"] for row in metric_rows(out, "trainer", "loss/mean")][:4] == [1, 2, 3, 4]
    assert set(complete_steps(out / "rollouts")) <= {3, 4}, "trained on and covered by checkpoint 2: removed"


def test_validation_and_evaluation_run_during_training(mixed: tuple[Path, Command]) -> None:
    out, command = mixed
    validated = metric_rows(out, "orchestrator", "val_reward/mean")
    assert 4 in [row["step"] for row in validated] and {"val_reward/letters", "val_reward/loud"} <= set(validated[-1])
    evaluated = [row for row in metric_rows(out, "orchestrator", "eval/held-out/avg@1") if row["step"] <= 4]
    assert (evaluated[0]["step"], evaluated[-1]["step"]) == (0, 4)
    for row in evaluated:
        assert row["step"] <= row["eval/held-out/version/min"] <= row["eval/held-out/version/max"] <= 4
    summary = json.loads((out / "evals" / "step_4" / "held-out" / "summary.json").read_text())
    assert summary["avg@1"] == evaluated[-1]["eval/held-out/avg@1"]
    for output in ("Val. Reward:", "Evaluated held-out at version 4"):
        assert output in command.out


@pytest.mark.slow
def test_resume_needs_a_checkpoint(mixed: tuple[Path, Command], tmp_path: Path) -> None:
    out, _ = mixed
    with runner(tmp_path) as run:
        command = run.run("rl", *MIXED, "--ckpt.resume_step", 3, *options(out))
        assert command.process.returncode == 2 and "resume_step = 3" in command.err and "complete: 2, 4" in command.err
        assert "trainer" not in command.out, "before anything is started"
        run.run_well("rl", *MIXED, "--max_steps", 6, "--ckpt.resume_step", -1, *options(out))
    rows = metric_rows(out, "orchestrator", "reward/mean")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[-1]["progress/total_samples"] == 96
