"""Builds the policy loss of a config and its per-step schedule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from prime_rl.trainer.config import BOUND_OPTIONS, AnnealConfig, LossConfig
from rollouts.training.objectives import PRESETS, DistillChoice, Estimator, Objective, choose_distillation
from rollouts.training.rl_losses import PolicyLoss
from rollouts.training.types import Sample


def build_objective(config: LossConfig, longest: int) -> Objective:
    """The preset `loss.type` with the options of the config; `longest` is the maximum response length."""
    options = config.model_dump(exclude={"type", "import_path", "kwargs", "distill", "anneal"})
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


def build_loss(config: LossConfig, longest: int) -> PolicyLoss:
    """Build the loss of a micro-batch, which returns sum and count."""
    return PolicyLoss(build_objective(config, longest), config.import_custom())


@dataclass
class LossSchedule:
    """The loss of each step: annealed taus, and the estimator selected for the batch.

    `max_distance` is the largest batch-mean distance from the teacher so far, in nats per completion, see
    `measure_distance`. It is checkpointed; everything else is a function of the step and its batch.
    """

    loss: PolicyLoss
    anneal: AnnealConfig | None = None
    chooses_estimator: bool = False
    max_distance: float = 0.0

    @property
    def progress(self) -> dict[str, float]:
        """State for resuming."""
        return {"teacher_distance": self.max_distance} if self.max_distance else {}

    def loss_for_step(self, step: int, samples: Sequence[Sample]) -> tuple[PolicyLoss, dict[str, float]]:
        """The loss of a step, counted from 1, and its metrics."""
        objective, anneal = self.loss.objective, self.anneal
        distance = measure_distance(samples)
        self.max_distance = max(self.max_distance, distance or 0.0)
        if anneal is not None:
            target = objective.student_tau * (anneal.margin or 0.0) * self.max_distance
            scale = anneal.scale(step, objective.adv_tau / target if target else 1.0)
            taus = {"teacher_tau": scale * objective.teacher_tau, "student_tau": scale * objective.student_tau}
            objective = replace(objective, **taus)  # type: ignore[arg-type]
        if self.chooses_estimator:
            scored = [s for s in samples if s.teacher_logprobs is not None]
            has_topk = all(sample.teacher_table is not None for sample in scored)
            objective = replace(objective, distill=choose_distillation(has_topk))
        loss = replace(self.loss, objective=objective)
        if distance is None:
            return loss, {}
        return loss, {"teacher/seq_kl": distance, **measure_advantage_terms(samples, objective)}


def build_loss_schedule(config: LossConfig, longest: int, max_distance: float = 0.0) -> LossSchedule:
    """Build the loss of a run; `longest` is the maximum response length, `max_distance` comes from a checkpoint."""
    is_auto = config.distill.estimator == "auto"
    return LossSchedule(build_loss(config, longest), config.anneal, is_auto, max_distance)


def measure_distance(samples: Sequence[Sample]) -> float | None:
    """Mean over completions of sum_t (li - lt), the distance from the teacher in nats; None without a teacher.

    li, lt: log-probs of the sampler and the teacher. Reference (anchor) samples do not count: their teacher has the
    same context as the student.
    """
    sums = [
        sum(li - lt for li, lt, mask in _streams(sample) if mask > 0)
        for sample in samples
        if sample.teacher_logprobs is not None and not sample.anchor
    ]
    return sum(sums) / len(sums) if sums else None


def measure_advantage_terms(samples: Sequence[Sample], objective: Objective) -> dict[str, float]:
    """Mean absolute advantage per token from the reward, |c A|, and from the teacher, |a lt - b li|."""
    a, b, c = objective.teacher_tau, objective.student_tau, objective.adv_tau
    task = teacher = 0.0
    count = 0
    for sample in samples:
        if sample.teacher_logprobs is None or sample.anchor:
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
