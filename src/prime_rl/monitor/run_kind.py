"""The kind of a run, which determines its relevant metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from prime_rl.monitor.series import Series

Tables = Mapping[str, Mapping[str, Any]]
"""Process -> its resolved configuration."""

CONTEXT_KEYS = ("context", "context_file", "context_template", "context_fn", "context_from")

SEARCH_METRIC = "evolve/best"
"""Logged by every search of contexts."""


class Kind(StrEnum):
    """Kind of a run."""

    RL = "rl"
    DISTILLATION = "distillation"
    MIXED = "mixed"
    SFT = "sft"
    EVALUATION = "evaluation"
    SEARCH = "search"
    SERVER = "server"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class RunKind:
    """The kind of a run with derived display properties."""

    kind: Kind
    scores_rewards: bool = True
    """Whether rollouts are scored; a distillation may skip the reward functions."""
    has_context: bool = False
    """Whether the teacher has a context that the student does not have."""
    compares_group: bool = True
    """Whether a reward counts relative to those of its group, so that groups of equal rewards have no gradient."""

    @property
    def has_teacher(self) -> bool:
        """Whether the policy is trained toward a teacher."""
        return self.kind in (Kind.DISTILLATION, Kind.MIXED)

    @property
    def trains_on_rewards(self) -> bool:
        """Whether rewards contribute to the loss."""
        return self.kind in (Kind.RL, Kind.MIXED)

    @property
    def title(self) -> str:
        """Title for display."""
        return {
            Kind.RL: "Asynchronous reinforcement learning",
            Kind.DISTILLATION: "Context distillation" if self.has_context else "On-policy distillation",
            Kind.MIXED: "Reinforcement learning with a teacher",
            Kind.SFT: "Supervised fine-tuning",
            Kind.EVALUATION: "Evaluation",
            Kind.SEARCH: "Search of contexts",
            Kind.SERVER: "Training API",
            Kind.UNKNOWN: "A run",
        }[self.kind]


def find_kind(series: Mapping[str, Series], configs: Tables, has_evaluations: bool = False) -> RunKind:
    """The kind of a run from its configuration, else from its metrics (all processes joined)."""
    if "serve" in configs:
        return RunKind(Kind.SERVER, scores_rewards=False)
    orchestrator = configs.get("orchestrator", {})
    if not orchestrator and "reward/mean" not in series:
        if "sft" in configs or "loss/mean" in series:
            return RunKind(Kind.SFT)
        if "evolve" in configs or SEARCH_METRIC in series:
            return RunKind(Kind.SEARCH)
        return RunKind(Kind.EVALUATION if has_evaluations else Kind.UNKNOWN)
    loss = configs.get("trainer", {}).get("loss")
    if orchestrator and isinstance(loss, Mapping):
        return _from_config(orchestrator, loss)
    return _from_metrics(series)


def _from_config(orchestrator: Mapping[str, Any], loss: Mapping[str, Any]) -> RunKind:
    teacher = orchestrator.get("teacher_model")
    buffer = orchestrator.get("buffer")
    is_scored = not (isinstance(buffer, Mapping) and buffer.get("skip_verification") is True)
    taus = [_number(loss.get(name)) for name in ("teacher_tau", "student_tau")]
    if not isinstance(teacher, Mapping) or not any(taus):
        return RunKind(Kind.RL, is_scored, compares_group=_compares_group(orchestrator))
    envs = orchestrator.get("env")
    sections = [teacher, *(env for env in (envs if isinstance(envs, list) else []) if isinstance(env, Mapping))]
    has_context = any(section.get(key) not in (None, "None") for section in sections for key in CONTEXT_KEYS)
    kind = Kind.MIXED if _number(loss.get("adv_tau", 1.0)) else Kind.DISTILLATION
    return RunKind(kind, is_scored, has_context, _compares_group(orchestrator))


def _compares_group(orchestrator: Mapping[str, Any]) -> bool:
    """Whether the advantages of all environments compare the rewards of a group."""
    envs = orchestrator.get("env")
    sections = [env for env in envs if isinstance(env, Mapping)] if isinstance(envs, list) else []
    chosen = [section.get("advantage") for section in sections or [orchestrator]]
    advantages = [own if isinstance(own, Mapping) else orchestrator.get("advantage") for own in chosen]
    return all(
        advantage.get("baseline") not in ("none", "role") and advantage.get("import_path") in (None, "None")
        for advantage in advantages
        if isinstance(advantage, Mapping)
    )


def _from_metrics(series: Mapping[str, Series]) -> RunKind:
    if not series.get("teacher_kl/mean"):
        return RunKind(Kind.RL)
    has_context = any(name.startswith("distill/") and name.endswith("/student_context/avg") for name in series)
    rewards = [value for _, value in series.get("reward/mean", [])]
    # Magnitude of the reward term of the advantages, logged by trainers with a teacher.
    pulls = [value for _, value in series.get("adv/reward_abs", [])]
    kind = Kind.DISTILLATION if pulls and not any(pulls) else Kind.MIXED
    return RunKind(kind, kind is Kind.MIXED or any(rewards), has_context)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
