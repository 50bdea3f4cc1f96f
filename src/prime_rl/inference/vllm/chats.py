"""Renders chats that vLLM would render differently: control-token strings in data, and tool calls as JSON text."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import Any

import orjson

from prime_rl.inference.request_parsing import ApiError, Json, forces_call, parse_body
from rollouts.training.datasets.chat import find_role, render_chat
from rollouts.training.datasets.chat_template import inspect_template

RENDERED_BY_VLLM = ("continue_final_message", "chat_template", "documents", "reasoning_effort", "echo", "stream")


class ChatGuard:
    """Renders chats that vLLM must not render; `load` returns the tokenizer and is called for the first chat."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer, with the chat template that vLLM uses."""
        return self._load()

    def name_roles(self, data: bytes) -> bytes:
        """The body of a request with the roles that the chat template knows; see `find_role`."""
        if b'"developer"' not in data or not self.tokenizer.chat_template:
            return data
        body = parse_body(data)
        messages = body.get("messages")
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, dict) and isinstance(message.get("role"), str):
                message["role"] = find_role(message["role"], str(self.tokenizer.chat_template))
        return orjson.dumps(body)

    def render(self, body: Json) -> list[int] | None:
        """Token ids of a chat that vLLM must not render; None if it may.

        vLLM would tokenize control-token strings in data as control tokens, and gives calls to templates in one format.
        `ApiError` if rendering fails, the chat template drops tools or messages, or an option needs vLLM's rendering.
        """
        messages, options = body.get("messages"), body.get("chat_template_kwargs") or {}
        tools = None if body.get("tool_choice") == "none" else body.get("tools") or None
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            return None  # vLLM reports the error
        if not self.tokenizer.chat_template:
            return None
        data = [messages, _parse_arguments(messages), tools, options]
        profile = inspect_template(self.tokenizer)
        token = profile.control.find(data)
        obstacle = None if token is None else repr(token)
        if obstacle is None and profile.reads_text_calls and any(message.get("tool_calls") for message in messages):
            obstacle = "tool calls, which the chat template reads as JSON text"
        if obstacle is None and not tools and not any(map(_may_be_dropped, messages)):
            return None
        if obstacle is not None and (option := _find_unsupported(body)):
            raise ApiError(f"the chat contains {obstacle}, so {option} is not supported with vLLM: remove one of them")
        try:
            ids = render_chat(
                self.tokenizer, messages, tools, body.get("add_generation_prompt") is not False, **options
            )
        except (ValueError, TypeError) as error:
            raise ApiError(str(error), param="messages") from error
        return None if obstacle is None else ids


def _find_unsupported(body: Json) -> str | None:
    """An option of a chat that vLLM would apply to messages, but not to token ids."""
    if forces_call(body):
        return "a forced tool_choice"
    return next((name for name in RENDERED_BY_VLLM if body.get(name)), None)


def _may_be_dropped(message: Json) -> bool:
    return bool(message.get("tool_calls")) or message.get("role") not in ("user", "assistant")


def _parse_arguments(messages: list[Json]) -> list[Any]:
    """Parse the arguments of all tool calls: templates receive them parsed, with JSON escapes resolved."""
    arguments = []
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            with suppress(KeyError, TypeError, ValueError):  # malformed calls have no arguments
                arguments.append(json.loads(call["function"]["arguments"]))
    return arguments
