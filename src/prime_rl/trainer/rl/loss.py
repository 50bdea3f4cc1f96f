"""Builds the policy loss of a config and its per-step schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from prime_rl.trainer.rl.config import BOUND_OPTIONS, AnnealConfig, EntropyControlConfig, LossConfig
from rollouts.training.objectives import PRESETS, DistillChoice, Estimator, Objective, choose_distillation
from rollouts.training.rl_losses import PolicyLoss, TokenStats
from rollouts.training.types import Sample


def build_objective(config: LossConfig, longest: int) -> Objective:
    """The preset `loss.type` with the options of the config; `longest` is the maximum response length."""
    options = config.model_dump(exclude={"type", "import_path", "kwargs", "distill", "anneal", "entropy_control"})
    preset = PRESETS[config.type]
    for name in ("ratio", "kl_tau", "loss_aggregation"):
        options[name] = getattr(preset, name) if options[name] is None else options[name]
    options["student_tau"] = config.teacher_tau if config.student_tau is None else config.student_tau
    if options["loss_aggregation"] == "constant":
        options["max_tokens"] = config.max_tokens or longest
    distill = config.distill
    estimator: Estimator = "topk+tail" if distill.estimator == "auto" else distill.estimator
    options["distill"] = DistillChoice(estimator, distill.direction, distill.jsd_beta, distill.clip, distill.gate)
    choices = {BOUND_OPTIONS.get(name, name): value for name, value in options.items()}
    return Objective(**{"name": preset.name, "detached": preset.detached, "advantage": preset.advantage, **choices})


RUN_OPTIONS = "adv_tau teacher_tau student_tau kl_coef kl_estimator entropy_coef old_logprobs behavior_cap distill"
"""Options of an objective that are those of the run in the objectives of environments too."""


def build_loss(
    config: LossConfig, longest: int, env_losses: Mapping[str, LossConfig] = MappingProxyType({})
) -> PolicyLoss:
    """Build the loss of a micro-batch, which returns sum and count."""
    others = {name: build_objective(loss, longest) for name, loss in env_losses.items()}
    return with_objective(PolicyLoss(build_objective(config, longest), config.import_custom(), others))


def with_objective(loss: PolicyLoss, **options: Any) -> PolicyLoss:
    """The loss with changed options of the run, in all of its objectives."""
    objective = replace(loss.objective, **options)
    shared = {name: getattr(objective, name) for name in RUN_OPTIONS.split()}
    return replace(loss, objective=objective, others={k: replace(o, **shared) for k, o in loss.others.items()})


@dataclass
class LossSchedule:
    """The loss of each step: annealed taus, the estimator selected for the batch, and a controlled entropy bonus.

    `max_distance` is the largest batch-mean distance from the teacher so far, in nats per completion, see
    `measure_distance`; `entropy` is the mean of the last step and `entropy_coef` the controlled coefficient. These are
    checkpointed; everything else is a function of the step and its batch.
    """

    loss: PolicyLoss
    anneal: AnnealConfig | None = None
    chooses_estimator: bool = False
    max_distance: float = 0.0
    control: EntropyControlConfig | None = None
    entropy_coef: float = 0.0
    entropy: float = math.inf

    @property
    def progress(self) -> dict[str, float]:
        """State for resuming."""
        state = {"teacher_distance": self.max_distance} if self.max_distance else {}
        is_controlled = self.control is not None and math.isfinite(self.entropy)
        return {**state, "entropy": self.entropy, "entropy_coef": self.entropy_coef} if is_controlled else state

    def observe_entropy(self, stats: TokenStats) -> dict[str, float]:
        """Update the entropy coefficient after a step with `stats`, which may be empty; returns it as a metric."""
        if self.control is None:
            return {}
        used = self.applied_entropy_coef
        if (entropy := stats.mean("entropy")) is not None:
            self.entropy = entropy
            self.entropy_coef = self.control.adjust(self.entropy_coef, self.entropy)
        return {"entropy_coef": used}

    @property
    def applied_entropy_coef(self) -> float:
        """The controlled coefficient, 0 while the entropy is above the target."""
        return self.entropy_coef if self.control is not None and self.entropy <= self.control.target else 0.0

    def loss_for_step(self, step: int, samples: Sequence[Sample]) -> tuple[PolicyLoss, dict[str, float]]:
        """The loss of a step, counted from 1, and its metrics."""
        objective, anneal = self.loss.objective, self.anneal
        distance = measure_distance(samples)
        self.max_distance = max(self.max_distance, distance or 0.0)
        options = dict[str, Any]()
        if anneal is not None:
            target = objective.student_tau * (anneal.margin or 0.0) * self.max_distance
            scale = anneal.scale(step, objective.adv_tau / target if target else 1.0)
            options |= {"teacher_tau": scale * objective.teacher_tau, "student_tau": scale * objective.student_tau}
        if self.control is not None:
            options["entropy_coef"] = self.applied_entropy_coef
        if self.chooses_estimator:
            scored = [s for s in samples if s.teacher_logprobs is not None]
            has_topk = all(sample.teacher_table is not None for sample in scored)
            options["distill"] = replace(choose_distillation(has_topk), gate=objective.distill.gate)
        loss = with_objective(self.loss, **options)
        if distance is None:
            return loss, {}
        return loss, {"teacher/seq_kl": distance, **measure_advantage_terms(samples, loss.objective)}


def build_loss_schedule(
    config: LossConfig,
    longest: int,
    progress: Mapping[str, float] = MappingProxyType({}),
    env_losses: Mapping[str, LossConfig] = MappingProxyType({}),
) -> LossSchedule:
    """Build the loss of a run; `longest` is the maximum response length, `progress` the state of a checkpoint."""
    return LossSchedule(
        build_loss(config, longest, env_losses),
        config.anneal,
        config.distill.estimator == "auto",
        progress.get("teacher_distance", 0.0),
        config.entropy_control,
        progress.get("entropy_coef", 0.0),
        progress.get("entropy", math.inf),
    )


def measure_distance(samples: Sequence[Sample]) -> float | None:
    """Mean over completions of sum_t (li - lt), the distance from the teacher in nats; None without a teacher.

    li, lt: log-probs of the sampler and the teacher. Reference samples do not count: their teacher has the
    same context as the student.
    """
    sums = [
        sum(li - lt for li, lt, mask in _streams(sample) if mask > 0)
        for sample in samples
        if sample.teacher_logprobs is not None and not sample.reference_weight
    ]
    return sum(sums) / len(sums) if sums else None


def measure_advantage_terms(samples: Sequence[Sample], objective: Objective) -> dict[str, float]:
    """Mean absolute advantage per token from the reward, |c A|, and from the teacher, |a lt - b li|."""
    a, b, c = objective.teacher_tau, objective.student_tau, objective.adv_tau
    task = teacher = 0.0
    count = 0
    for sample in samples:
        if sample.teacher_logprobs is None or sample.reference_weight:
            continue
        teacher += sum(abs(a * lt - b * li) for li, lt, mask in _streams(sample) if mask > 0)
        advantages = sample.advantages or [0.0] * len(sample.loss_mask)
        task += sum(abs(c * A) for A, mask in zip(advantages, sample.loss_mask, strict=True) if mask > 0)
        count += sum(mask > 0 for mask in sample.loss_mask)
    return {"adv/reward_abs": task / max(count, 1), "adv/teacher_abs": teacher / max(count, 1), "adv/teacher_tau": a}


def _streams(sample: Sample) -> Iterable[tuple[float, float, float]]:
    """Per-token sampler log-probs, teacher log-probs and loss mask."""
    assert sample.inference_logprobs is not None and sample.teacher_logprobs is not None
    return zip(sample.inference_logprobs, sample.teacher_logprobs, sample.loss_mask, strict=True)
