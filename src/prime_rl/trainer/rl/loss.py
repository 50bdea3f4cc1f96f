"""From the loss section of a config to a function of per-token streams."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

from prime_rl.trainer.config import BOUND_OPTIONS, LossConfig
from rollouts.training.objectives import PRESETS, DistillChoice, Estimator, Objective, choose_distillation
from rollouts.training.rl_losses import PolicyLoss
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


def adapt_loss(loss: PolicyLoss, config: LossConfig, step: int, samples: Sequence[Sample]) -> PolicyLoss:
    """The loss of one step: taus as far as they are annealed, and the estimator that suits the batch."""
    objective = loss.objective
    if config.anneal is not None:
        scale = config.anneal.scale(step)
        taus = {"teacher_tau": scale * objective.teacher_tau, "student_tau": scale * objective.student_tau}
        objective = replace(objective, **taus)  # type: ignore[arg-type]
    if config.distill.estimator == "auto":
        objective = replace(objective, distill=choose_distillation(*measure_coverage(samples)))
    return replace(loss, objective=objective)


def measure_coverage(samples: Sequence[Sample]) -> tuple[float, bool]:
    """How often the sampled token is the teacher's favourite, and whether the teacher told one for every sample.

    The mean of the former is the probability that the student gives to the teacher's favourite; as it is read off the
    batch alone, a run that is resumed chooses as it would have.
    """
    hits = total = 0
    for sample in samples:
        table = sample.teacher_table
        if sample.teacher_logprobs is None:
            continue
        if table is None:
            return 1.0, False
        ids = array("i", table.ids)
        sampled = [token for token, mask in zip(sample.tokens, sample.loss_mask, strict=True) if mask > 0]
        hits += sum(token == ids[table.k * row] for row, token in enumerate(sampled))
        total += len(sampled)
    return (hits / total if total else 1.0), total > 0


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
