"""From the loss section of a config to a function of per-token streams."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from prime_rl.trainer.config import BOUND_OPTIONS, LossConfig
from rollouts.training.objectives import PRESETS, DistillChoice, Objective
from rollouts.training.rl_losses import PolicyLoss


def build_objective(config: LossConfig, longest: int) -> Objective:
    """The preset that `loss.type` names, with the options of the config; no response is longer than `longest`."""
    given = config.model_dump(exclude={"type", "import_path", "kwargs", "distill"})
    given["student_tau"] = config.teacher_tau if config.student_tau is None else config.student_tau
    if config.normaliser == "constant":
        given["max_tokens"] = config.max_tokens or longest
    preset = PRESETS[config.type]
    distill = config.distill
    given["distill"] = DistillChoice(distill.estimator, distill.direction, distill.jsd_beta, distill.clip)
    choices = {BOUND_OPTIONS.get(name, name): value for name, value in given.items()}
    return Objective(**{"name": preset.name, "detached": preset.detached, "advantage": preset.advantage, **choices})


def build_loss(config: LossConfig, longest: int) -> PolicyLoss:
    """The loss of one micro-batch, as sum and count."""
    custom = None
    if config.type == "custom":
        custom = partial(load_custom(config.import_path), **config.kwargs)
    return PolicyLoss(build_objective(config, longest), custom)


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
