"""Configuration of `eval`."""

from __future__ import annotations

from pathlib import Path

from pydantic import model_validator

from prime_rl.utils.config import AskConfig


class EvalConfig(AskConfig):
    """Which model, in which environments, how often."""

    pass_threshold: float = 1.0
    """A rollout with at least this reward counts as passed in pass@k."""

    weights_dir: Path | None = None
    """Directory of step_N weights that are evaluated one after the other, in place of model.name."""

    steps: list[int] = []
    """Steps of weights_dir; unset: all."""

    @model_validator(mode="after")
    def _check_steps(self) -> EvalConfig:
        if self.steps and self.weights_dir is None:
            raise ValueError("steps is set but weights_dir is not: say where the steps lie, e.g. outputs/weights")
        return self
