"""Configuration of `evolve`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from string import Formatter
from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from prime_rl.configuration.sections import GenerationClientConfig, GenerationConfig, SamplingConfig
from prime_rl.utils.pydantic_config import BaseConfig

TEMPLATE_FIELDS = ("context", "examples")
TEMPLATE = """\
An assistant was given this context before each task:

<context>
{context}
</context>

These are tasks with its answers, the reference answers and the rewards:

{examples}

Write a better context. Keep what worked, correct what was wrong, and state every fact, rule and strategy from the \
tasks that helps with similar ones. Reply with the new context alone, between ``` lines."""


class ProposerConfig(BaseConfig):
    """Source of new contexts: a model that reads failed examples, or a Python function."""

    function: str | None = None
    """module:function(context, examples, rng) -> new context; examples are dicts with prompt, completion, answer,
    reward, feedback and metrics. Unset: a model."""

    model: str | None = None
    """Model name in requests; unset: model.name."""

    client: GenerationClientConfig = GenerationClientConfig()
    """Server of the proposer; without a base_url the server of the rollouts."""

    sampling: SamplingConfig = SamplingConfig(max_tokens=1024)

    template: str = TEMPLATE
    """Request to the model, with the fields {context} and {examples}; other braces are doubled."""

    @field_validator("template")
    @classmethod
    def _check_template(cls, template: str) -> str:
        try:
            names = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
        except ValueError as error:
            raise ValueError(f"proposer.template is invalid ({error}): double every brace that is text") from error
        for name in names:
            if name not in TEMPLATE_FIELDS:
                raise ValueError(
                    f"proposer.template has an unknown field {{{name}}}: use {{context}} and {{examples}}, and double "
                    "every brace that is text"
                )
        return template

    @model_validator(mode="after")
    def _check_source(self) -> ProposerConfig:
        if self.function is not None and (self.model is not None or self.client.base_url):
            raise ValueError("proposer.function and a proposer model are both set: remove one of them")
        if self.client.base_url and self.model is None:
            raise ValueError("proposer.client.base_url is set but proposer.model is not: set the model's name there")
        return self


class EvolveConfig(GenerationConfig):
    """Configuration of `evolve`: model, environment, initial context, proposer, budget."""

    main_keys: ClassVar[Sequence[str]] = (
        *GenerationConfig.main_keys,
        *("context", "context_file", "context_position", "budget", "minibatch_size", "examples"),
        *("proposer.function", "proposer.model", "proposer.client.base_url"),
    )

    context: str = ""
    """Initial context; empty: none."""

    context_file: Path | None = None
    """File with the initial context."""

    context_position: Literal["user_prefix", "system_replace", "message"] = "user_prefix"
    """Position of the context, as in orchestrator.teacher_model."""

    separator: str = "\n"
    """user_prefix: text between the context and the user message."""

    examples: Literal["all", "failed"] = "all"
    """failed: search only on training examples below stop_reward without a context, which are found first."""

    budget: int = Field(default=1000, ge=1)
    """Maximum rollouts. A larger one continues a finished search."""

    max_proposals: int = Field(default=200, ge=0)
    """Maximum proposals, including rejected ones."""

    max_repeats: int = Field(default=10, ge=1)
    """The search ends after this many proposals in a row that are empty or repeat an earlier context."""

    minibatch_size: int = Field(default=4, ge=1)
    """Examples that the proposer reads and on which its proposal must improve."""

    stop_reward: float = 1.0
    """Reward of a solved example; the search ends when a context solves all of them."""

    proposer: ProposerConfig = ProposerConfig()

    @model_validator(mode="after")
    def _check_search(self) -> EvolveConfig:
        if len(self.env) != 1:
            raise ValueError(
                f"env has {len(self.env)} environments: evolve searches the context of one, run it for each of them"
            )
        if self.env[0].taskset is not None:
            raise ValueError(
                "env.taskset builds its prompts in verifiers, where no context can be inserted: evolve needs an "
                "environment with an id"
            )
        if self.context and self.context_file is not None:
            raise ValueError("context and context_file both set the initial context: remove one of them")
        has_server = self.proposer.client.base_url or self.client.base_url
        if self.proposer.model not in (None, self.model.name) and not has_server:
            raise ValueError(f"proposer.model {self.proposer.model!r} has no server: set proposer.client.base_url")
        return self
