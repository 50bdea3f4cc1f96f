"""Teacher contexts: their sources, and the prompts with contexts of each environment."""

from __future__ import annotations

import inspect
import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from prime_rl.client.contexts import Context, ContextPosition, Message, insert_context, insert_text, read_context_file
from prime_rl.configuration.imports import import_function
from prime_rl.orchestrator.config import TrainEnvConfig
from prime_rl.orchestrator.distillation.config import ContextConfig, ContextFrom, TeacherConfig
from prime_rl.orchestrator.distillation.outcomes import RolloutOutcome, Source, build_outcome_source, format_value
from prime_rl.runtime.tokenizer import check_window

SYSTEM_PROBE = "Probe of the system message."
PROBE_USER: Message = {"role": "user", "content": "a"}
DEFAULT_SYSTEM_PROBES = ([PROBE_USER], [{"role": "system", "content": SYSTEM_PROBE}, PROBE_USER])
"""Two chats whose renderings show the default system message of a chat template (`read_default_system`)."""
MAX_CHECKED_ROWS = 1000
PLACEHOLDER = re.compile(r"\{\{\s*(\w+)((?:\.\w+)*)\s*\}\}")


def build_source(config: ContextConfig, seed: int, success_reward: float = 1.0) -> Source | None:
    """Build the function from a row and its rollouts to a context; None without a source.

    `ValueError` for an invalid source.
    """
    if config.is_outcome:
        assert config.context_from is not None
        return build_outcome_source(config.context_from, config.context_template, success_reward, seed, fill_template)
    if config.context is not None:
        text = config.context
        return lambda row, rollout, group: text
    if config.context_file is not None:
        read = read_context_file(config.context_file)
        return lambda row, rollout, group: read
    if config.context_template is not None:
        template = config.context_template
        if not PLACEHOLDER.search(template):
            raise ValueError("context_template has no {{example.KEY}} placeholder: add one, or use context instead")
        return lambda row, rollout, group: fill_template(template, row, {})
    if config.context_fn is not None:
        return build_function_source(config.context_fn, seed)
    return None


def build_function_source(path: str, seed: int) -> Source:
    """The source of `context_fn`; `rollout` and `group` are passed if the function has these parameters."""
    function = import_function(path, "context_fn")
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = [name for name in ("rollout", "group") if takes_all or name in {parameter.name for parameter in parameters}]

    def build(
        row: Mapping[str, Any], rollout: RolloutOutcome | None, group: Sequence[RolloutOutcome]
    ) -> Context | None:
        place = f"/{rollout.index}" if names and rollout is not None else ""
        rng = random.Random(f"{seed}/{row.get('example_id')}{place}")
        given = {"rollout": rollout, "group": list(group) if group else None}
        try:
            value = function(dict(row), rng, **{name: given[name] for name in names})
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise ValueError(f"context_fn {path} failed on example {row.get('example_id')}: {what}") from error
        return check_context(value)

    return build


def check_context(value: Any) -> Context | None:
    """Check the return value of a `context_fn`."""
    is_messages = isinstance(value, list) and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in value)
    if value is None or isinstance(value, str) or is_messages:
        return value
    raise ValueError(f"context_fn returned a {type(value).__name__}: return text, a list of messages, or None")


def look_up(row: Mapping[str, Any], path: str, where: str) -> str:
    """The value at a dotted path of a row as text, of a list or dict as JSON; `ValueError` if there is none."""
    value: Any = row
    for key in path.split("."):
        if isinstance(value, str):  # environments store `info` as JSON text
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                value = None
        if not isinstance(value, Mapping) or key not in value:
            known = ", ".join(sorted(value)) if isinstance(value, Mapping) else "nothing"
            raise ValueError(f"{where}: this row has no {path} (available: {known})")
        value = value[key]
    if value is None:  # `datasets` also fills keys that other rows have
        raise ValueError(f"{where}: {path} of this row is null: give it a value, or leave the row out")
    return format_value(value)


def fill_template(template: str, row: Mapping[str, Any], fields: Mapping[str, str]) -> str:
    """Fill {{example.KEY}} from the row and {{FIELD}} from `fields`; `ValueError` for a key missing in the row."""

    def fill(match: re.Match[str]) -> str:
        return look_up(row, match[2][1:], "context_template") if match[1] == "example" else fields[match[1]]

    return PLACEHOLDER.sub(fill, template)


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
        self._default = build_source(teacher, seed, teacher.success_reward)
        self._envs = {env.display_name: env for env in envs}
        self._sources = {name: build_source(env, seed, teacher.success_reward) for name, env in self._envs.items()}

    def role(self, env: str) -> str:
        """Teacher role of an environment: context, reference or none.

        Evaluation environments that are not trained have the teacher's context; none if only trained ones have one.
        """
        if env in self._envs:
            return self._envs[env].teacher
        return "context" if self._default is not None or not any(self._sources.values()) else "none"

    def reference_weight(self, env: str) -> float:
        """Weight of the rollouts of a reference environment."""
        return self._envs[env].reference_weight

    def context_from(self, env: str) -> ContextFrom:
        """What the contexts of an environment are made of."""
        return self._config(env).context_from or "row"

    def _config(self, env: str) -> ContextConfig:
        """The section that sets the contexts of an environment: its own, or the teacher's."""
        return self.teacher if self._sources.get(env) is None else self._envs[env]

    def context_for(
        self,
        env: str,
        row: Mapping[str, Any],
        rollout: RolloutOutcome | None = None,
        group: Sequence[RolloutOutcome] = (),
    ) -> Context | None:
        """The teacher's context for a row, and for a rollout of it; None: no teacher; "": a teacher without context.

        Without `rollout` (evaluation of the teacher) a context from outcomes may use any of `group`.
        """
        source = self._sources.get(env) or self._default
        return "" if source is None else source(row, rollout, group)

    def label(self, row: Mapping[str, Any]) -> str | None:
        """The name of a row's context in metrics; None without `context_key`."""
        key = self.teacher.context_key
        return None if key is None else to_metric_part(look_up(row, key, "context_key"))

    def check_rows(self, env: str, rows: Sequence[Mapping[str, Any]], model: str) -> None:
        """`ValueError` if the contexts of an environment cannot be built from its rows, or do not fit the window."""
        if self.role(env) != "context" or not rows:
            return
        if self.context_from(env) == "answer" and not any(row.get("answer") not in (None, "") for row in rows):
            raise ValueError(f'context_from = "answer", but no row of {env} has an answer: use another context_from')
        self._check_template(env, rows)
        self.label(rows[0])
        texts = self._try_contexts(env, rows)
        if texts and self.teacher.max_model_len is not None:
            number = max(range(len(texts)), key=lambda i: len(texts[i]))
            what, key = f"the context of row {number} of {env}", "max_model_len of the teacher's server"
            check_window(texts[number], model, self.teacher.max_model_len, what, key)

    def check_eval_rows(self, env: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """`ValueError` if the context of a row, or its name, cannot be built, or two names are one in metrics."""
        if self.role(env) == "context":
            self._check_template(env, rows)
            self._try_contexts(env, rows)
            key = self.teacher.context_key
            names = [] if key is None else [look_up(row, key, "context_key") for row in rows]
            found: dict[str, str] = {}
            for name in names:
                if (other := found.setdefault(to_metric_part(name), name)) != name:
                    raise ValueError(
                        f"context_key {key}: {other!r} and {name!r} of {env} are both {to_metric_part(name)!r} in "
                        "metrics: use letters and digits that tell them apart, or another key"
                    )

    def _try_contexts(self, env: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """The contexts of the first rows, for which a `context_fn` may fail; none if they are made of rollouts."""
        if self.context_from(env) not in ("row", "answer"):
            return []
        return [context_text(self.context_for(env, row)) for row in rows[:MAX_CHECKED_ROWS]]

    def _check_template(self, env: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """`ValueError` for a row without a key of the template."""
        matches = PLACEHOLDER.finditer(self._config(env).context_template or "")
        paths = {match[2][1:] for match in matches if match[1] == "example"}
        needs_answer = self.context_from(env) == "answer"
        for number, row in enumerate(rows):
            if needs_answer and row.get("answer") in (None, ""):
                continue  # has no context
            for path in paths:
                look_up(row, path, f"context_template, row {number} of {env}")

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
        configs += [(f"env {name}", env, self.position(name)) for name, env in self._envs.items()]
        lines = list[str]()
        for where, config, position in configs:
            text = config.context if config.context_file is None else read_context_file(config.context_file)
            if text and position == "user_prefix" and not self.teacher.separator and not text[-1].isspace():
                lines.append(
                    f"the context of {where} ends with {text[-1]!r} and the prompt follows directly: end it with a "
                    "newline, or set teacher_model.separator"
                )
        return lines


def to_metric_part(name: str) -> str:
    """A name as a part of the name of a metric."""
    return re.sub(r"[^\w.-]", "_", name)


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


def context_text(context: Context | None) -> str:
    """Text of a context, without the roles of its messages."""
    if isinstance(context, list):
        return "\n".join(content_text(message.get("content")) for message in context)
    return context or ""
