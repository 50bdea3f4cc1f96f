"""Health checks: warnings beyond the noise, and the rollouts they point to."""

from __future__ import annotations

import pytest

from prime_rl.monitor.checks import run_checks
from prime_rl.monitor.run_kind import Kind, RunKind, find_kind


def states(series: dict[str, list[float]], kind: Kind = Kind.RL) -> dict[str, str]:
    points = {name: list(enumerate(values, 1)) for name, values in series.items()}
    return {check.label: check.state for check in run_checks(points, RunKind(kind))}


def test_checks_wait_for_evidence_then_pass_or_warn() -> None:
    few = {"is_truncated/mean": [0.9] * 6, "error/mean": [0.0] * 6}
    assert states(few) == {"Truncation": "waiting", "Errors": "waiting"}
    many = {"is_truncated/mean": [0.9] * 9, "error/mean": [0.0] * 9, "batch/effective_batch_size": [0.2] * 9}
    assert states(many) == {"Varied rewards": "warning", "Truncation": "warning", "Errors": "ok"}
    assert "Varied rewards" not in states(many, Kind.DISTILLATION), "rewards are not trained on"
    assert states({"batch/effective_batch_size": [0.8] * 9}) == {"Varied rewards": "ok"}


@pytest.mark.parametrize(
    ("advantage", "is_checked"),
    [
        ({"baseline": "mean", "import_path": "None"}, True),
        ({"baseline": "none", "import_path": "None"}, False),
        ({"baseline": "role", "import_path": "None"}, False),
        ({"baseline": "mean", "import_path": "mine:advantage"}, False),
    ],
    ids=["mean", "none, as with a critic", "role", "custom"],
)
def test_rewards_vary_where_they_are_compared_in_groups(advantage: dict[str, str], is_checked: bool) -> None:
    points = {"batch/effective_batch_size": [(step, 0.0) for step in range(1, 10)]}
    default = {"baseline": "mean", "import_path": "None"}
    for orchestrator in (
        {"advantage": advantage, "env": [{"id": "a", "advantage": "None"}]},
        {"advantage": default, "env": [{"id": "a", "advantage": "None"}, {"id": "b", "advantage": advantage}]},
    ):
        kind = find_kind(points, {"orchestrator": orchestrator, "trainer": {"loss": {}}})
        assert bool(run_checks(points, kind)) == is_checked


def test_equal_rewards_are_explained_by_easy_and_hard_groups() -> None:
    values = {"batch/effective_batch_size": 0.2, "batch/solve_all": 0.7, "batch/solve_none": 0.1}
    points = {name: [(step, value) for step in range(1, 10)] for name, value in values.items()}
    [check] = run_checks(points, RunKind(Kind.RL))
    assert check.text == (
        "only 20% of the groups have different rewards and a gradient (70% are solved by all, 10% by none)"
    )
    assert check.query == {"equal": True} and "online_difficulty_filtering" in (check.advice or "")


def test_rewards_of_zero_alone_question_the_reward_function() -> None:
    values = {"batch/effective_batch_size": 0.0, "batch/solve_all": 0.0, "batch/solve_none": 1.0}
    [check] = run_checks({name: [(s, value) for s in range(1, 10)] for name, value in values.items()}, RunKind(Kind.RL))
    assert check.state == "warning" and "the reward function does not find the answer" in (check.advice or "")


def test_failed_checks_name_a_cure_and_example_rollouts() -> None:
    points = {"is_truncated/mean": [(step, 0.5) for step in range(1, 10)]}
    [check] = run_checks(points, RunKind(Kind.RL))
    assert check.text.startswith("50% of the rollouts are cut off") and "max_tokens" in (check.advice or "")
    assert check.query == {"status": "truncated", "sort": "tokens"}
