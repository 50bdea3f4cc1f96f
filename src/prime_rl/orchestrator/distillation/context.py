"""Teacher contexts: their sources, and their insertion into prompts."""

from __future__ import annotations

import importlib
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prime_rl.orchestrator.config import (
    ContextConfig,
    ContextPosition,
    OrchestratorConfig,
    TeacherConfig,
    TrainEnvConfig,
)

Message = dict[str, Any]
Context = str | list[Message]
Source = Callable[[Mapping[str, Any]], Context | None]
SYSTEM_PROBE = "Probe of the system message."
PROBE_USER: Message = {"role": "user", "content": "a"}
DEFAULT_SYSTEM_PROBES = ([PROBE_USER], [{"role": "system", "content": SYSTEM_PROBE}, PROBE_USER])
"""Two chats whose renderings show the default system message of a chat template (`read_default_system`)."""
PLACEHOLDER = re.compile(r"\{\{\s*example((?:\.\w+)+)\s*\}\}")


def build_source(config: ContextConfig, seed: int) -> Source | None:
    """Build the function from a row to its context; None without a source. `ValueError` for an invalid source."""
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
        if not PLACEHOLDER.search(template):
            raise ValueError("context_template has no {{example.KEY}} placeholder: add one, or use context instead")
        return lambda row: fill_template(template, row)
    if config.context_fn is not None:
        function = load_function(config.context_fn)
        return lambda row: check_context(function(dict(row), random.Random(f"{seed}/{row.get('example_id')}")))
    return None


def load_function(path: str) -> Callable[..., Any]:
    """The function at `package.module:name`; `ValueError` if there is none."""
    module, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"context_fn {path!r} cannot be imported ({error}): write it as package.module:name"
        ) from error
    if not callable(function):
        raise ValueError(f"context_fn {path!r} is a {type(function).__name__}, not a function")
    return function


def check_context(value: Any) -> Context | None:
    """Check the return value of a `context_fn`."""
    is_messages = isinstance(value, list) and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in value)
    if value is None or isinstance(value, str) or is_messages:
        return value
    raise ValueError(f"context_fn returned a {type(value).__name__}: return text, a list of messages, or None")


def fill_template(template: str, row: Mapping[str, Any]) -> str:
    """Fill every {{example.KEY}} of the template; `ValueError` for a key missing in the row."""

    def look_up(match: re.Match[str]) -> str:
        value: Any = row
        for key in match[1].split(".")[1:]:
            if isinstance(value, str):  # environments store `info` as JSON text
                try:
                    value = json.loads(value)
                except (ValueError, RecursionError):
                    value = None
            if not isinstance(value, Mapping) or key not in value:
                known = ", ".join(sorted(value)) if isinstance(value, Mapping) else "nothing"
                raise ValueError(f"context_template: this row has no {match[1][1:]} (available: {known})")
            value = value[key]
        return str(value)

    return PLACEHOLDER.sub(look_up, template)


def read_default_system(plain: str, probed: str) -> str:
    """The system message that a chat template adds to a chat without one; "" if it adds none.

    The arguments are the renderings of DEFAULT_SYSTEM_PROBES. `ValueError` for a template that drops system messages.
    """
    before, probe, after = probed.partition(SYSTEM_PROBE)
    if not probe:
        raise ValueError('the chat template drops system messages: set teacher_model.context_position = "user_prefix"')
    has_default = plain.startswith(before) and plain[len(before) :].endswith(after)
    return plain[len(before) : len(plain) - len(after)] if has_default else ""


def insert_context(
    messages: Sequence[Message], context: Context, position: ContextPosition, separator: str, default_system: str = ""
) -> list[Message]:
    """The teacher's messages: those of the student plus the context. `ValueError` if it cannot be inserted.

    user_prefix      context + separator + the first user message
    system_append    system message + separator + context; without a system message, that of the template
                     (`default_system`), else the context alone
    system_replace   the context as the system message
    message          a separate user message after the system message; also for contexts given as messages
    """
    out = [dict(message) for message in messages]
    has_system = bool(out) and out[0].get("role") == "system"
    if isinstance(context, list) or position == "message":
        new = context if isinstance(context, list) else [{"role": "user", "content": context}]
        return [*out[:has_system], *new, *out[has_system:]]
    if position == "user_prefix":
        first = next((message for message in out if message.get("role") == "user"), None)
        if first is None:
            raise ValueError('the prompt has no user message: set teacher_model.context_position = "system_append"')
        first["content"] = _join(context + separator, first.get("content"))
        return out
    if position == "system_append" and not has_system and default_system:
        out, has_system = [{"role": "system", "content": default_system}, *out], True
    if position == "system_append" and has_system:
        out[0]["content"] = _append(out[0].get("content"), separator + context)
        return out
    return [{"role": "system", "content": context}, *out[has_system:]]


def insert_text(prompt: str, context: Context, position: ContextPosition, separator: str) -> str:
    """`insert_context` for a plain-text prompt, which only supports `user_prefix`."""
    if isinstance(context, list) or position != "user_prefix":
        raise ValueError(
            f'a plain-text prompt only supports a text prefix: context_position = "user_prefix", not "{position}"'
        )
    return context + separator + prompt


def _join(text: str, content: Any) -> Any:
    return [{"type": "text", "text": text}, *content] if isinstance(content, list) else text + (content or "")


def _append(content: Any, text: str) -> Any:
    return [*content, {"type": "text", "text": text}] if isinstance(content, list) else (content or "") + text


class ContextProvider:
    """Contexts of every environment's prompts and their positions."""

    def __init__(self, config: OrchestratorConfig, teacher: TeacherConfig) -> None:
        self.teacher = teacher
        self._default = build_source(teacher, config.seed)
        self._envs: dict[str, TrainEnvConfig] = {env.name or env.id: env for env in config.env}
        self._sources = {name: build_source(env, config.seed) for name, env in self._envs.items()}

    def role(self, env: str) -> str:
        """Teacher role of an environment: context, reference or none."""
        return self._envs[env].teacher if env in self._envs else "context"

    def reference_weight(self, env: str) -> float:
        """Weight of the rollouts of a reference environment."""
        return self._envs[env].reference_weight

    def context_for(self, env: str, row: Mapping[str, Any]) -> Context | None:
        """The teacher's context for a row; None: no teacher; "": a teacher without context."""
        source = self._sources.get(env) or self._default
        return "" if source is None else source(row)

    def position(self, env: str) -> ContextPosition:
        """Position of an environment's context."""
        position = self._envs[env].context_position if env in self._envs else None
        return position or self.teacher.context_position

    def insert(
        self, env: str, chat_request: Mapping[str, Any], context: Context, default_system: str = ""
    ) -> dict[str, Any]:
        """The request that renders to the teacher's prompt; `default_system` is what the template adds."""
        position, separator = self.position(env), self.teacher.separator
        if not context:
            return dict(chat_request)
        if "prompt" in chat_request:
            return {**chat_request, "prompt": insert_text(chat_request["prompt"], context, position, separator)}
        messages = insert_context(chat_request["messages"], context, position, separator, default_system)
        return {**chat_request, "messages": messages}

    def warnings(self) -> list[str]:
        """Warnings about valid but probably unintended settings."""
        configs: list[tuple[str, ContextConfig, ContextPosition]] = [
            ("teacher_model", self.teacher, self.teacher.context_position)
        ]
        configs += [
            (f"env {name}", env, env.context_position or self.teacher.context_position)
            for name, env in self._envs.items()
        ]
        lines = list[str]()
        for where, config, position in configs:
            text = config.context if config.context_file is None else config.context_file.read_text(encoding="utf-8")
            if text and position == "user_prefix" and not self.teacher.separator and not text[-1].isspace():
                lines.append(
                    f"the context of {where} ends with {text[-1]!r} and the prompt follows directly: end it with a "
                    "newline, or set teacher_model.separator"
                )
        return lines


def first_user_text(prompt: str | Sequence[Message]) -> str:
    """Text of the first user message (`prompt_text` of a rollout record); all text if there is none."""
    if isinstance(prompt, str):
        return prompt
    selected = [message for message in prompt if message.get("role") == "user"][:1] or prompt
    return "\n".join(content_text(message.get("content")) for message in selected)


def content_text(content: Any) -> str:
    """Text of a message's content."""
    if isinstance(content, list):
        return "".join(part if isinstance(part, str) else str(part.get("text", "")) for part in content)
    return str(content or "")
