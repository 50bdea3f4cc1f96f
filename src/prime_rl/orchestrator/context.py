"""What the teacher is told and the student is not: where the words come from, and where they go in the prompt."""

from __future__ import annotations

import importlib
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prime_rl.orchestrator.config import ContextConfig, Insert, OrchestratorConfig, TeacherConfig, TrainEnvConfig

Message = dict[str, Any]
Context = str | list[Message]
Source = Callable[[Mapping[str, Any]], Context | None]
PLACE = re.compile(r"\{\{\s*example((?:\.\w+)+)\s*\}\}")


def build_source(config: ContextConfig, seed: int) -> Source | None:
    """From a prompt's row to its context; None where the section names no source. `ValueError` for one that fails."""
    if config.context is not None:
        text = config.context
        return lambda _: text
    if config.context_file is not None:
        try:
            read = config.context_file.read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"context_file {config.context_file} cannot be read: {error.strerror}") from error
        return lambda _: read
    if config.context_template is not None:
        template = config.context_template
        if not PLACE.search(template):
            raise ValueError("context_template has no {{example.KEY}} in it: add one, or call it context")
        return lambda row: fill_template(template, row)
    if config.context_fn is not None:
        function = load_function(config.context_fn)
        return lambda row: check_context(function(dict(row), random.Random(f"{seed}/{row.get('example_id')}")))
    return None


def load_function(path: str) -> Callable[..., Any]:
    """The function at `package.module:name`; `ValueError` where there is none."""
    module, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"context_fn {path!r} leads nowhere: {error}; write package.module:name") from error
    if not callable(function):
        raise ValueError(f"context_fn {path!r} is a {type(function).__name__}, not a function")
    return function


def check_context(value: Any) -> Context | None:
    """What a function gave, if it is a context."""
    is_messages = isinstance(value, list) and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in value)
    if value is None or isinstance(value, str) or is_messages:
        return value
    raise ValueError(f"context_fn returned a {type(value).__name__}: return text, a list of messages, or None")


def fill_template(template: str, row: Mapping[str, Any]) -> str:
    """The template with every {{example.KEY}} replaced; `ValueError` for a key that the row does not have."""

    def look_up(match: re.Match[str]) -> str:
        value: Any = row
        for key in match[1].split(".")[1:]:
            if isinstance(value, str):  # environments keep `info` as JSON
                try:
                    value = json.loads(value)
                except ValueError:
                    value = None
            if not isinstance(value, Mapping) or key not in value:
                known = ", ".join(sorted(value)) if isinstance(value, Mapping) else "nothing"
                raise ValueError(f"context_template: this row has no {match[1][1:]} (there is {known})")
            value = value[key]
        return str(value)

    return PLACE.sub(look_up, template)


def insert_context(messages: Sequence[Message], context: Context, insert: Insert, separator: str) -> list[Message]:
    """The teacher's messages: those of the student, all kept, and the context. `ValueError` where it has no place.

    user_prefix      context + separator + the first user message
    system_append    the system message + separator + context; a new one where there is none
    system_replace   the context as the system message
    message          a user message of its own after the system message; so go contexts that are messages already
    """
    out = [dict(message) for message in messages]
    has_system = bool(out) and out[0].get("role") == "system"
    if isinstance(context, list) or insert == "message":
        new = context if isinstance(context, list) else [{"role": "user", "content": context}]
        return [*out[:has_system], *new, *out[has_system:]]
    if insert == "user_prefix":
        first = next((message for message in out if message.get("role") == "user"), None)
        if first is None:
            raise ValueError('the prompt has no user message: set teacher_model.insert = "system_append"')
        first["content"] = _join(context + separator, first.get("content"))
        return out
    if insert == "system_append" and has_system:
        out[0]["content"] = _append(out[0].get("content"), separator + context)
        return out
    return [{"role": "system", "content": context}, *out[has_system:]]


def insert_text(prompt: str, context: Context, insert: Insert, separator: str) -> str:
    """The same for a prompt that is plain text, where there is only one place."""
    if isinstance(context, list) or insert != "user_prefix":
        raise ValueError(f'a prompt of plain text takes text in front of it: insert = "user_prefix", not "{insert}"')
    return context + separator + prompt


def _join(text: str, content: Any) -> Any:
    return [{"type": "text", "text": text}, *content] if isinstance(content, list) else text + (content or "")


def _append(content: Any, text: str) -> Any:
    return [*content, {"type": "text", "text": text}] if isinstance(content, list) else (content or "") + text


class Contexts:
    """The context of every environment's prompts, and where it goes."""

    def __init__(self, config: OrchestratorConfig, teacher: TeacherConfig) -> None:
        self.teacher = teacher
        self._default = build_source(teacher, config.seed)
        self._envs: dict[str, TrainEnvConfig] = {env.name or env.id: env for env in config.env}
        self._sources = {name: build_source(env, config.seed) for name, env in self._envs.items()}

    def role(self, env: str) -> str:
        """How an environment is taught: context, anchor or none."""
        return self._envs[env].teacher if env in self._envs else "context"

    def anchor_weight(self, env: str) -> float:
        """Weight of an anchor's rollouts."""
        return self._envs[env].anchor_weight

    def of(self, env: str, row: Mapping[str, Any]) -> Context | None:
        """What the teacher is told about this row; None: it is not asked. An empty text tells it nothing."""
        source = self._sources.get(env) or self._default
        return "" if source is None else source(row)

    def insert(self, env: str, asked: Mapping[str, Any], context: Context) -> dict[str, Any]:
        """The request that renders to the teacher's prompt."""
        own = self._envs[env].insert if env in self._envs else None
        insert, separator = own or self.teacher.insert, self.teacher.separator
        if not context:
            return dict(asked)
        if "prompt" in asked:
            return {**asked, "prompt": insert_text(asked["prompt"], context, insert, separator)}
        return {**asked, "messages": insert_context(asked["messages"], context, insert, separator)}

    def warnings(self) -> list[str]:
        """What is allowed but seldom meant."""
        found: list[tuple[str, ContextConfig, Insert]] = [("teacher_model", self.teacher, self.teacher.insert)]
        found += [(f"env {name}", env, env.insert or self.teacher.insert) for name, env in self._envs.items()]
        lines = list[str]()
        for where, config, insert in found:
            text = config.context if config.context_file is None else config.context_file.read_text(encoding="utf-8")
            if text and insert == "user_prefix" and not self.teacher.separator and not text[-1].isspace():
                lines.append(
                    f"the context of {where} ends with {text[-1]!r} and the prompt follows at once: end it with a "
                    "newline, or set teacher_model.separator"
                )
        return lines


def first_user_text(prompt: str | Sequence[Message]) -> str:
    """The words of the first user message (`prompt_text` of a rollout record); all words where there is none."""
    if isinstance(prompt, str):
        return prompt
    said = [message for message in prompt if message.get("role") == "user"][:1] or prompt
    return "\n".join(content_text(message.get("content")) for message in said)


def content_text(content: Any) -> str:
    """The text of a message's content."""
    if isinstance(content, list):
        return "".join(part if isinstance(part, str) else str(part.get("text", "")) for part in content)
    return str(content or "")
