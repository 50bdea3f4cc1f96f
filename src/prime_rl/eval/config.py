"""Configuration of `eval`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from pydantic import model_validator

from prime_rl.configuration.sections import GenerationConfig


class EvalConfig(GenerationConfig):
    """Configuration of `eval`: model, environments, rollouts."""

    main_keys: ClassVar[Sequence[str]] = (*GenerationConfig.main_keys, "pass_threshold", "weights_dir", "steps")

    pass_threshold: float = 1.0
    """A rollout with at least this reward counts as passed in pass@k."""

    weights_dir: Path | None = None
    """Directory of step_N weights, evaluated in order instead of model.name."""

    steps: list[int] = []
    """Steps of weights_dir; unset: all."""

    @model_validator(mode="after")
    def _check_steps(self) -> EvalConfig:
        if self.steps and self.weights_dir is None:
            raise ValueError("steps is set but weights_dir is not: set it, e.g. to outputs/weights")
        return self
