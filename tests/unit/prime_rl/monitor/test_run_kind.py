"""Kind of a run from its configuration and its metrics."""

from __future__ import annotations

from typing import Any

import pytest

from prime_rl.monitor.run_kind import Kind, RunKind, find_kind
from prime_rl.monitor.series import Series

REWARD: dict[str, Series] = {"reward/mean": [(1, 0.5)], "loss/mean": [(1, 0.1)]}
TAUGHT: dict[str, Series] = {**REWARD, "teacher_kl/mean": [(1, 0.3)]}
TEACHER = {"context": "None", "context_file": "c.txt"}


def config(teacher: Any = "None", skip: bool = False, **taus: Any) -> dict[str, dict[str, Any]]:
    loss = {"adv_tau": 1.0, "teacher_tau": 0.0, "student_tau": "None", **taus}
    return {
        "trainer": {"loss": loss},
        "orchestrator": {"teacher_model": teacher, "buffer": {"skip_verification": skip}},
    }


@pytest.mark.parametrize(
    ("configs", "kind"),
    [
        (config(), RunKind(Kind.RL)),
        (config(TEACHER, adv_tau=0, teacher_tau=1.0), RunKind(Kind.DISTILLATION, has_context=True)),
        (config({}, skip=True, adv_tau=0, student_tau=1.0), RunKind(Kind.DISTILLATION, scores_rewards=False)),
        (config(TEACHER, teacher_tau=0.5), RunKind(Kind.MIXED, has_context=True)),
        (config(TEACHER, kl_coef=0.1), RunKind(Kind.RL)),
        ({"serve": {}}, RunKind(Kind.SERVER, scores_rewards=False)),
    ],
    ids=["rl", "distillation", "unverified", "mixed", "reference KL", "server"],
)
def test_configuration_decides(configs: dict[str, dict[str, Any]], kind: RunKind) -> None:
    assert find_kind({}, configs) == kind, "also before the first metric"
    assert find_kind(TAUGHT, configs) == kind


@pytest.mark.parametrize(
    ("series", "kind"),
    [
        (REWARD, RunKind(Kind.RL)),
        ({**TAUGHT, "adv/reward_abs": [(1, 0.2)]}, RunKind(Kind.MIXED)),
        ({**TAUGHT, "adv/reward_abs": [(1, 0.0)]}, RunKind(Kind.DISTILLATION)),
        ({**TAUGHT, "adv/reward_abs": [(1, 0.0)], "reward/mean": [(1, 0.0)]}, RunKind(Kind.DISTILLATION, False)),
        ({"loss/mean": [(1, 1.0)]}, RunKind(Kind.SFT)),
        ({"evolve/best": [(1, 1.0)]}, RunKind(Kind.SEARCH)),
        ({}, RunKind(Kind.UNKNOWN)),
    ],
    ids=["rl", "mixed", "distillation", "unverified", "sft", "search", "empty"],
)
def test_metrics_decide_without_a_configuration(series: dict[str, Series], kind: RunKind) -> None:
    assert find_kind(series, {}) == kind


def test_sft_and_evaluations() -> None:
    assert find_kind({}, {"sft": {}}).kind is Kind.SFT
    assert find_kind({}, {"eval": {}}, has_evaluations=True).kind is Kind.EVALUATION
