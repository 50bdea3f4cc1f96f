"""--inspect-context: the prompts of student and teacher side by side, before anything is started."""

from __future__ import annotations

import shutil
import textwrap
from typing import Any

from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.orchestrator.context import Contexts
from prime_rl.utils.tokenizer import load_tokenizer, render_chat
from prime_rl.utils.vf import open_environments

GUTTER = " | "


def inspect_contexts(config: OrchestratorConfig, num: int, width: int | None = None) -> str:
    """The first `num` prompts of each environment, rendered, with their lengths in tokens.

    Tools are not shown: they belong to a rollout, not to a row. `ValueError` where a context has no place.
    """
    assert config.teacher_model is not None, "checked with the configuration"
    contexts, tokenizer = Contexts(config, config.teacher_model), load_tokenizer(config.model.name)
    width = width or shutil.get_terminal_size((120, 40)).columns
    blocks = [f"warning: {line}" for line in contexts.warnings()]
    with open_environments([env.model_copy(update={"num_workers": 0}) for env in config.env]) as environments:
        for name, environment in environments.items():
            for number, row in enumerate(environment.rows("train")[:num]):
                context = "" if contexts.role(name) == "anchor" else contexts.of(name, row)
                if contexts.role(name) == "none" or context is None:
                    blocks.append(f"{name}, prompt {number}: no teacher")
                    continue
                asked = {"prompt" if isinstance(row["prompt"], str) else "messages": row["prompt"]}
                pair = [render(tokenizer, asked), render(tokenizer, contexts.insert(name, asked, context))]
                blocks.append(f"{name}, prompt {number}\n" + draw_pair(pair, width))
    return "\n\n".join(blocks) + "\n"


def render(tokenizer: Any, asked: dict[str, Any]) -> tuple[str, int]:
    """The text that a model gets, and how many tokens it is."""
    if "prompt" in asked:
        ids = list(tokenizer.encode(asked["prompt"]))
    else:
        ids = render_chat(tokenizer, asked["messages"])
    return str(tokenizer.decode(ids)), len(ids)


def draw_pair(pair: list[tuple[str, int]], width: int) -> str:
    """Two texts in two columns."""
    half = max(20, (width - len(GUTTER)) // 2)
    columns = []
    for (text, num_tokens), who in zip(pair, ("student", "teacher"), strict=True):
        lines = [piece for line in text.splitlines() for piece in textwrap.wrap(line, half) or [""]]
        columns.append([f"{who} ({num_tokens} tokens)", "-" * half, *lines])
    height = max(map(len, columns))
    left, right = (column + [""] * (height - len(column)) for column in columns)
    return "\n".join(f"{a:<{half}}{GUTTER}{b}".rstrip() for a, b in zip(left, right, strict=True))
