"""--inspect-context: prints the prompts of student and teacher side by side."""

from __future__ import annotations

import math
import shutil
import textwrap
from typing import Any

from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.orchestrator.distillation.context import DEFAULT_SYSTEM_PROBES, ContextProvider, read_default_system
from prime_rl.orchestrator.distillation.outcomes import RolloutOutcome
from prime_rl.runtime.tokenizer import load_tokenizer
from prime_rl.utils.vf import open_environments
from rollouts.training.datasets.chat import render_chat

GUTTER = " | "
EXAMPLE = RolloutOutcome(0, "(a completion)", math.inf, "(its feedback)")
"""Stands for the rollouts in contexts from outcomes."""


def inspect_contexts(config: OrchestratorConfig, num: int, width: int | None = None) -> str:
    """Render the first `num` prompts of each environment, with their lengths in tokens.

    Tools are not shown: they belong to a rollout, not to a row. `ValueError` if a context cannot be inserted.
    """
    assert config.teacher_model is not None, "validated by the config"
    contexts = ContextProvider(config.teacher_model, config.env, config.seed)
    tokenizer = load_tokenizer(config.model.name)
    options = {"chat_template_kwargs": config.sampling.extra_body.get("chat_template_kwargs") or {}}
    width = width or shutil.get_terminal_size((120, 40)).columns
    blocks = [f"warning: {line}" for line in contexts.warnings()]
    with open_environments([env.model_copy(update={"num_workers": 0}) for env in config.env]) as environments:
        for name, environment in environments.items():
            for number, row in enumerate(environment.rows("train")[:num]):
                role = contexts.role(name)
                context = contexts.context_for(name, row, group=[EXAMPLE]) if role == "context" else ""
                if role == "none" or context is None:
                    blocks.append(f"{name}, prompt {number}: no teacher")
                    continue
                chat_request = {"prompt" if isinstance(row["prompt"], str) else "messages": row["prompt"], **options}
                default_system = ""
                if "messages" in chat_request and contexts.position(name) == "system_append":
                    probes = [render(tokenizer, {"messages": chat, **options})[0] for chat in DEFAULT_SYSTEM_PROBES]
                    default_system = read_default_system(*probes)
                teacher_request = contexts.insert(name, chat_request, context, default_system)
                pair = [render(tokenizer, chat_request), render(tokenizer, teacher_request)]
                blocks.append(f"{name}, prompt {number}\n" + format_pair(pair, width))
    return "\n\n".join(blocks) + "\n"


def render(tokenizer: Any, chat_request: dict[str, Any]) -> tuple[str, int]:
    """Rendered prompt and its length in tokens."""
    if "prompt" in chat_request:
        ids = list(tokenizer.encode(chat_request["prompt"]))
    else:
        ids = render_chat(tokenizer, chat_request["messages"], **chat_request["chat_template_kwargs"])
    return str(tokenizer.decode(ids)), len(ids)


def format_pair(pair: list[tuple[str, int]], width: int) -> str:
    """Two texts in two columns of a table `width` characters wide."""
    half = max(20, (width - len(GUTTER)) // 2)
    columns = []
    for (text, num_tokens), role in zip(pair, ("student", "teacher"), strict=True):
        lines = [piece for line in text.splitlines() for piece in textwrap.wrap(line, half) or [""]]
        columns.append([f"{role} ({num_tokens} tokens)", "-" * half, *lines])
    height = max(map(len, columns))
    left, right = (column + [""] * (height - len(column)) for column in columns)
    return "\n".join(f"{a:<{half}}{GUTTER}{b}".rstrip() for a, b in zip(left, right, strict=True))
