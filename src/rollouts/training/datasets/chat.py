"""Chats as token ids, under the template of a tokenizer."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollouts.training.types import Message

ChatMessage = Mapping[str, Any]


@dataclass
class TemplateRenderer:
    """A tokenizer's chat template as the `ChatRenderer` that `render_conversation` takes."""

    tokenizer: Any
    end_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.end_ids = frozenset(self.tokenizer.all_special_ids)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, add_generation_prompt: bool
    ) -> list[int]:
        """The token ids of a conversation."""
        return render_chat(self.tokenizer, messages, tools, add_generation_prompt)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids."""
        return str(self.tokenizer.decode(list(tokens)))


def render_chat(
    tokenizer: Any,
    messages: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **template_kwargs: Any,
) -> list[int]:
    """The token ids of a chat under the tokenizer's template.

    What a message *says* cannot become a special token: special strings inside messages and tools are encoded as
    ordinary text, so no user can end a turn or open another role. `ValueError` for a chat the template refuses.
    """
    if not tokenizer.chat_template:
        raise ValueError("the model's tokenizer has no chat template: pass one or use completions")
    cleaned = [_clean_message(message) for message in messages]
    specials = sorted(tokenizer.all_special_tokens, key=len, reverse=True)
    payload = json.dumps([cleaned, tools], ensure_ascii=False, default=str)
    # json escapes control characters; a special token that contains a newline also contains a plain part, found below.
    guarded = any(special.split("\n")[0] in payload for special in specials)
    marker = _unused_character(payload) if guarded else ""
    if guarded:
        hide = re.compile("|".join(re.escape(special) for special in specials))
        literals: list[str] = []

        def mark(match: re.Match[str]) -> str:
            literals.append(match.group())
            return f"{marker}{len(literals) - 1}{marker}"

        cleaned, tools = _map_text(cleaned, lambda s: hide.sub(mark, s)), _map_text(tools, lambda s: hide.sub(mark, s))
    try:
        text = tokenizer.apply_chat_template(
            cleaned,
            tools=list(tools) if tools else None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **template_kwargs,
        )
    except Exception as error:  # a template is a program of the model's author: whatever it raises is about the chat
        raise ValueError(f"the chat template refuses these messages: {error}") from error
    if not guarded:
        return list(tokenizer.encode(text, add_special_tokens=False))
    ids: list[int] = []
    for i, piece in enumerate(re.split(f"{marker}(\\d+){marker}", text)):
        if i % 2:
            ids += tokenizer.encode(literals[int(piece)], add_special_tokens=False, split_special_tokens=True)
        elif piece:
            ids += tokenizer.encode(piece, add_special_tokens=False)
    return ids


def _clean_message(message: ChatMessage) -> dict[str, Any]:
    """Make a message what every template expects: text content, no nulls, tool arguments as an object."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not re.fullmatch(r"\w+", role):
        raise ValueError(f"a message needs a role (system, user, assistant or tool), got {role!r}")
    cleaned = {key: value for key, value in message.items() if value is not None} | {"content": _read_text(content)}
    if "tool_calls" in cleaned:
        if not isinstance(cleaned["tool_calls"], list | tuple):
            raise ValueError(f"tool_calls must be a list, got {cleaned['tool_calls']!r}")
        cleaned["tool_calls"] = [_clean_call(call) for call in cleaned["tool_calls"]]
    return cleaned


def _read_text(content: Any) -> str:
    """The text of a message's content: a string, nothing, or a list of strings and text parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ValueError("the content of a message must be text or a list of parts")
    for part in content:
        if not isinstance(part, str | Mapping) or not isinstance(_part_text(part), str):
            raise ValueError(f'a content part must be {{"type": "text", "text": "..."}}, got {part!r}')
        if not isinstance(part, str) and part.get("type", "text") != "text":
            raise ValueError(f"content parts of type {part.get('type')!r} are not supported, only text")
    return "".join(map(_part_text, content))


def _part_text(part: str | Mapping[str, Any]) -> str:
    return part if isinstance(part, str) else part.get("text", "")


def _clean_call(call: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(call, Mapping) or not isinstance(call.get("function") or call, Mapping):
        raise ValueError(f"a tool call must be an object with a function, got {call!r}")
    function = dict(call.get("function") or call)
    if isinstance(function.get("arguments"), str):
        with contextlib.suppress(json.JSONDecodeError):  # what is no JSON is shown to the model as it was written
            function["arguments"] = json.loads(function["arguments"])
    return {**call, "function": function}


def _map_text(value: Any, change: Callable[[str], str]) -> Any:
    """Apply `change` to every string of a JSON tree."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list | tuple):
        return [_map_text(item, change) for item in value]
    if isinstance(value, Mapping):
        return {change(key): _map_text(item, change) for key, item in value.items()}
    return value


def _unused_character(text: str) -> str:
    """A character of a private-use plane that `text` does not contain."""
    return next(chr(code) for code in range(0xF0000, 0xFFFFD) if chr(code) not in text)
