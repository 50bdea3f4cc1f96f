"""Teacher contexts: their sources, and the prompts with contexts of each environment."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prime_rl.client.contexts import Context, ContextPosition, Message, insert_context, insert_text
from prime_rl.configuration.imports import import_function
from prime_rl.orchestrator.config import TrainEnvConfig
from prime_rl.orchestrator.distillation.config import ContextConfig, TeacherConfig

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
        function = import_function(config.context_fn, "context_fn")
        return lambda row: check_context(function(dict(row), random.Random(f"{seed}/{row.get('example_id')}")))
    return None


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


class ContextProvider:
    """Contexts of every environment's prompts and their positions."""

    def __init__(self, teacher: TeacherConfig, envs: Sequence[TrainEnvConfig], seed: int) -> None:
        self.teacher = teacher
        self._default = build_source(teacher, seed)
        self._envs = {env.name or env.id: env for env in envs}
        self._sources = {name: build_source(env, seed) for name, env in self._envs.items()}

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
