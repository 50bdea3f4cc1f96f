"""Configuration of a distillation: the teacher and its context."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from prime_rl.client.contexts import ContextPosition
from prime_rl.configuration.sections import ClientConfig
from prime_rl.utils.pydantic_config import BaseConfig

CONTEXT_SOURCES = ("context", "context_file", "context_template", "context_fn")
ContextFrom = Literal["row", "answer", "sibling", "feedback"]
TEMPLATES: dict[ContextFrom, tuple[str, tuple[str, ...]]] = {
    "row": ("", ()),
    "answer": ("The correct answer to the following task is: {{answer}}\n\n", ("answer",)),
    "sibling": ("A correct solution of the following task:\n{{demonstration}}\n\n", ("demonstration", "reward")),
    "feedback": (
        "Feedback on an earlier attempt at the following task:\n{{feedback}}\n\n",
        ("feedback", "completion", "reward"),
    ),
}
"""By `context_from`: the default template, and its fields, of which the first is required."""
FIELD = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
EXAMPLE_FIELD = re.compile(r"\s*example((?:\.\w+)+)\s*")


def check_template(template: str, context_from: ContextFrom) -> None:
    """`ValueError` for a placeholder that is unknown, and for a template without the one that is required."""
    fields = TEMPLATES[context_from][1]
    shown = ", ".join([*(f"{{{{{field}}}}}" for field in fields), "{{example.KEY}}"])
    found = [match[1] for match in FIELD.finditer(template)]
    for name in found:
        if name.strip() not in fields and not EXAMPLE_FIELD.fullmatch(name):
            raise ValueError(
                f'context_template has an unknown field {{{{{name.strip()}}}}}: with context_from = "{context_from}" '
                f"the fields are {shown}"
            )
    if fields and not any(name.strip() == fields[0] for name in found):
        raise ValueError(
            f"context_template has no {{{{{fields[0]}}}}}, so it would not show what "
            f'context_from = "{context_from}" is about: add it'
        )


class ContextConfig(BaseConfig):
    """Context in the teacher's prompt only: from each prompt's row (at most one of four sources), or from outcomes."""

    context_from: ContextFrom | None = None
    """row: one of the four keys below; answer: the reference answer; sibling: a successful other rollout of the group;
    feedback: what the environment put into state["feedback"] of the rollout. Rollouts without such a context keep
    their advantage alone, weighted by adv_tau. Unset: row."""

    context: str | None = None
    """Context text."""

    context_file: Path | None = None
    """File with the context text."""

    context_template: str | None = None
    """Template with {{example.KEY}} placeholders, filled from each prompt's row: {{example.info.hint}}. With
    context_from also {{answer}}; {{demonstration}}; or {{feedback}} and {{completion}}; and {{reward}}."""

    context_fn: str | None = None
    """module:function(example, rng) -> text, a list of messages, or None to skip the teacher. With parameters rollout
    and group it is called for every finished rollout."""

    @property
    def source(self) -> str | None:
        """The key that sets the context, if any."""
        if self.is_outcome:
            return "context_from"
        given = [name for name in CONTEXT_SOURCES if getattr(self, name) is not None]
        return given[0] if given else None

    @property
    def is_outcome(self) -> bool:
        """Whether the context is an answer or made of rollouts."""
        return self.context_from not in (None, "row")

    @model_validator(mode="after")
    def _check_one_source(self) -> ContextConfig:
        given = [name for name in CONTEXT_SOURCES if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]} both set the context: remove one of them")
        if self.is_outcome and given and given[0] != "context_template":
            raise ValueError(f'context_from = "{self.context_from}" and {given[0]} both set the context: remove one')
        if self.context_from == "row" and not given:
            raise ValueError(f'context_from = "row" needs one of {", ".join(CONTEXT_SOURCES)}: set one')
        if self.context is not None and not self.context.strip():
            raise ValueError(
                'context is empty: write one, or leave it out; an environment has none with teacher = "reference"'
            )
        if self.context_template is not None:
            check_template(self.context_template, self.context_from or "row")
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

    context_key: str | None = None
    """Key of a row, such as info.sheet, whose value names the context of the row: eval_baseline then also reports gap
    and interference of each context."""

    success_reward: float = 1.0
    """context_from sibling: least reward of a rollout that is shown to others."""

    weights: Literal["frozen", "ema", "live"] = "frozen"
    """Teacher weights: frozen: those before training; ema: moving average of the student; live: the student's."""

    ema_decay: float = Field(default=0.98, gt=0, lt=1)
    """ema: decay per optimizer step; 0.98 averages over about 50 of them."""

    temperature: float | None = Field(default=None, gt=0)
    """Temperature of the teacher's distribution; unset: the sampling temperature, so that both are comparable."""

    top_logprobs: int = Field(default=0, ge=-1)
    """Top tokens scored in addition to the sampled one; -1: all. rl sets what trainer.loss.distill needs."""

    max_model_len: int | None = Field(default=None, ge=1)
    """Window of the teacher's server: contexts from rows that do not fit are an error at the start. rl sets it for its
    servers."""

    inspect_context: int | None = Field(default=None, ge=1)
    """Print this many prompts of each environment as student and teacher see them, then exit."""

    eval_baseline: bool = False
    """Evaluate student and teacher with and without the context, before training and at every evaluation."""
