"""From the loss section of a config to a function of per-token streams."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch

from prime_rl.trainer.config import BOUND_OPTIONS, LossConfig
from rollouts.training.objectives import PRESETS, DistillChoice, Estimator, Objective, choose_distillation
from rollouts.training.rl_losses import PolicyLoss, estimate_coverage
from rollouts.training.types import Sample


def build_objective(config: LossConfig, longest: int) -> Objective:
    """The preset that `loss.type` names, with the options of the config; no response is longer than `longest`."""
    given = config.model_dump(exclude={"type", "import_path", "kwargs", "distill", "anneal"})
    given["student_tau"] = config.teacher_tau if config.student_tau is None else config.student_tau
    if config.normaliser == "constant":
        given["max_tokens"] = config.max_tokens or longest
    preset = PRESETS[config.type]
    distill = config.distill
    estimator: Estimator = "topk+tail" if distill.estimator == "auto" else distill.estimator
    given["distill"] = DistillChoice(estimator, distill.direction, distill.jsd_beta, distill.clip)
    choices = {BOUND_OPTIONS.get(name, name): value for name, value in given.items()}
    return Objective(**{"name": preset.name, "detached": preset.detached, "advantage": preset.advantage, **choices})


def build_loss(config: LossConfig, longest: int) -> PolicyLoss:
    """The loss of one micro-batch, as sum and count."""
    custom = None
    if config.type == "custom":
        custom = partial(load_custom(config.import_path), **config.kwargs)
    return PolicyLoss(build_objective(config, longest), custom)


@dataclass
class LossSchedule:
    """The loss of each step: taus as far as they are annealed, and the estimator that suits the batch.

    `farthest` is the most nats by which the answers of a batch were from their teacher, see `measure_distance`; a run
    that is resumed brings it along, everything else is read off the step and its batch.
    """

    loss: PolicyLoss
    config: LossConfig
    farthest: float = 0.0

    @property
    def progress(self) -> dict[str, float]:
        """What a resumed run needs."""
        return {"teacher_distance": self.farthest} if self.farthest else {}

    def at(self, step: int, samples: Sequence[Sample]) -> tuple[PolicyLoss, dict[str, float]]:
        """The loss of a step, counted from 1, and what is to be told of it."""
        objective, config = self.loss.objective, self.config
        distance = measure_distance(samples)
        self.farthest = max(self.farthest, distance or 0.0)
        if config.anneal is not None:
            wanted = objective.student_tau * (config.anneal.margin or 0.0) * self.farthest
            scale = config.anneal.scale(step, objective.adv_tau / wanted if wanted else 1.0)
            taus = {"teacher_tau": scale * objective.teacher_tau, "student_tau": scale * objective.student_tau}
            objective = replace(objective, **taus)  # type: ignore[arg-type]
        if config.distill.estimator == "auto":
            objective = replace(objective, distill=choose_distillation(*measure_coverage(samples)))
        loss = replace(self.loss, objective=objective)
        if distance is None:
            return loss, {}
        return loss, {"teacher_distance": distance, **measure_pulls(samples, objective)}


def measure_distance(samples: Sequence[Sample]) -> float | None:
    """Mean over the answers of sum_t (li - lt): nats by which they are from their teacher; None without one.

    li, lt: log-probs of the sampler and the teacher. Anchors, whose teacher saw what the student saw, do not count.
    """
    sums = [
        sum(li - lt for li, lt, mask in _streams(sample) if mask > 0)
        for sample in samples
        if sample.teacher_logprobs is not None and not sample.anchor
    ]
    return sum(sums) / len(sums) if sums else None


def measure_pulls(samples: Sequence[Sample], objective: Objective) -> dict[str, float]:
    """Mean size of what a reward and what the teacher add to the advantage of a token, |c A| and |a lt - b li|."""
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
    return {"pull/task": task / max(count, 1), "pull/teacher": teacher / max(count, 1), "pull/teacher_tau": a}


def _streams(sample: Sample) -> Iterable[tuple[float, float, float]]:
    """Log-probs of the sampler and of the teacher, and the loss mask."""
    assert sample.inference_logprobs is not None and sample.teacher_logprobs is not None
    return zip(sample.inference_logprobs, sample.teacher_logprobs, sample.loss_mask, strict=True)


def measure_coverage(samples: Sequence[Sample]) -> tuple[float, bool]:
    """How often students say what the teacher would where that is not settled, and whether all teachers told a top k.

    It is read off the batch alone, by `estimate_coverage`, so a run that is resumed chooses as it would have.
    """
    hits, logprobs = list[bool](), list[float]()
    for sample in samples:
        table = sample.teacher_table
        if sample.teacher_logprobs is None or sample.anchor:
            continue
        if table is None:
            return 1.0, False
        ids, inference = array("i", table.ids), sample.inference_logprobs or []
        spoken = [i for i, mask in enumerate(sample.loss_mask) if mask > 0]
        hits += [sample.tokens[i] == ids[table.k * row] for row, i in enumerate(spoken)]
        logprobs += [inference[i] for i in spoken]
    return estimate_coverage(torch.tensor(hits, dtype=torch.bool), torch.tensor(logprobs)), bool(hits)


def load_custom(import_path: str | None) -> Callable[..., Any]:
    """The function at `package.module:name`; `ValueError` where there is none."""
    module, _, name = (import_path or "").partition(":")
    try:
        function = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"loss.import_path {import_path!r} leads nowhere: {error}; write package.module:name"
        ) from error
    if not callable(function):
        raise ValueError(f"loss.import_path {import_path!r} is a {type(function).__name__}, not a function")
    return function
