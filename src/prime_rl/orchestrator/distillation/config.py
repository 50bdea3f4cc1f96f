"""Configuration of a distillation: the teacher and its context."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from prime_rl.client.contexts import ContextPosition
from prime_rl.configuration.sections import ClientConfig
from prime_rl.utils.pydantic_config import BaseConfig

CONTEXT_SOURCES = ("context", "context_file", "context_template", "context_fn")


class ContextConfig(BaseConfig):
    """Context in the teacher's prompt only; at most one of the four sources."""

    context: str | None = None
    """Context text."""

    context_file: Path | None = None
    """File with the context text."""

    context_template: str | None = None
    """Template with {{example.KEY}} placeholders, filled from each prompt's row: {{example.info.hint}}."""

    context_fn: str | None = None
    """module:function(example, rng) -> text, a list of messages, or None to skip the teacher."""

    @property
    def source(self) -> str | None:
        """The key that sets the context, if any."""
        given = [name for name in CONTEXT_SOURCES if getattr(self, name) is not None]
        return given[0] if given else None

    @model_validator(mode="after")
    def _check_one_source(self) -> ContextConfig:
        given = [name for name in CONTEXT_SOURCES if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]} both set the context: remove one of them")
        return self


class TeacherModelConfig(BaseConfig):
    """The teacher model."""

    name: str | None = None
    """Model name in requests; unset: the student's model before training."""


class TeacherClientConfig(ClientConfig):
    """Client of a running teacher server."""

    base_url: list[str] = []
    """Addresses including /v1; any server that returns prompt_logprobs. Unset: rl starts one."""


class TeacherConfig(ContextConfig):
    """Teacher of a distillation, with a context that the student does not see."""

    model: TeacherModelConfig = TeacherModelConfig()

    client: TeacherClientConfig = TeacherClientConfig()

    context_position: ContextPosition = "user_prefix"
    """Position of the context: before the first user message, appended to the system message, replacing it, or as a
    separate message after it."""

    separator: str = ""
    """Separator between the context and the adjacent text."""

    weights: Literal["frozen", "ema", "live"] = "frozen"
    """Teacher weights: frozen: those before training; ema: moving average of the student; live: the student's."""

    ema_decay: float = Field(default=0.98, gt=0, lt=1)
    """ema: decay per trainer step; 0.98 averages over about 50 steps."""

    temperature: float | None = Field(default=None, gt=0)
    """Temperature of the teacher's distribution; unset: the sampling temperature, so that both are comparable."""

    top_logprobs: int = Field(default=0, ge=-1)
    """Top tokens scored in addition to the sampled one; -1: all. rl sets what trainer.loss.distill needs."""

    inspect_context: int | None = Field(default=None, ge=1)
    """Print this many prompts of each environment as student and teacher see them, then exit."""

    eval_baseline: bool = False
    """Evaluate student and teacher with and without the context, before training and at every evaluation."""
