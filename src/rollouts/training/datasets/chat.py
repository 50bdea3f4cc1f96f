"""Renders chats to token ids with a tokenizer's chat template."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from rollouts.training.datasets.chat_template import inspect_template
from rollouts.training.types import Message

ChatMessage = Mapping[str, Any]
ROLES = frozenset("system developer user assistant tool function ipython".split())
"""Roles common in data sets and templates."""
RENDER_OPTIONS = frozenset(
    "tokenizer conversation messages tools chat_template add_generation_prompt continue_final_message tokenize padding "
    "truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs".split()
)
"""Renderer arguments that template arguments of requests and rows must not set; a template is a program."""

NO_TEMPLATE = (
    "the model has no chat template, like most base models: add one to its directory (chat_template.jinja), set one "
    "with `sft --tokenizer.chat-template FILE`, or use text instead of messages (completions, prompt and completion)"
)


@dataclass
class TemplateRenderer:
    """A tokenizer with its chat template.

    Templates that write the current date (`strftime_now`) write `date` instead, the same one in all chats.
    """

    tokenizer: Any
    date: datetime = field(default_factory=datetime.now)
    end_ids: frozenset[int] = field(init=False)
    """Special tokens, one of which ends a turn."""
    turn_end: list[int] = field(init=False)
    """Tokens that the template appends to an answer: its end token, and what the model does not generate."""
    next_turn: Mapping[str, int] = field(init=False)
    """Role -> token with which its message after an answer begins, and with which a model therefore ends the answer
    (GLM). Empty if the template appends an end token to answers, or begins messages without control tokens."""

    def __post_init__(self) -> None:
        profile = inspect_template(self.tokenizer)
        self.end_ids, self.turn_end, self.next_turn = profile.control.ids, profile.turn_end, profile.next_turn

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        add_generation_prompt: bool,
        **template_kwargs: Any,
    ) -> list[int]:
        """The token ids of a conversation."""
        clock = {"strftime_now": self.date.strftime} if "strftime_now" in str(self.tokenizer.chat_template) else {}
        return render_chat(self.tokenizer, messages, tools, add_generation_prompt, **clock | template_kwargs)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids."""
        return str(self.tokenizer.decode(list(tokens)))


@dataclass(frozen=True)
class RenderedChat:
    """A rendered chat: text to encode, interleaved with token ids of escaped control tokens."""

    pieces: list[str | tuple[int, ...]]


def render_chat(
    tokenizer: Any,
    messages: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **template_kwargs: Any,
) -> list[int]:
    """The token ids of a chat under the tokenizer's template; see `render_pieces`."""
    chat = render_pieces(tokenizer, messages, tools, add_generation_prompt, **template_kwargs)
    ids: list[int] = []
    for piece in chat.pieces:
        ids += encode_text(tokenizer, piece) if isinstance(piece, str) else piece
    return ids


def encode_text(tokenizer: Any, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """The token ids of text; `ValueError` for text that is not valid Unicode."""
    try:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except (TypeError, UnicodeError) as error:  # fast tokenizers raise TypeError
        try:
            text.encode()
        except UnicodeError:
            raise ValueError("the text is not valid Unicode: remove its lone surrogates") from error
        raise
    return ids


def render_pieces(
    tokenizer: Any,
    messages: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **template_kwargs: Any,
) -> RenderedChat:
    """Render a chat with the tokenizer's template, before encoding.

    Control tokens (see `find_control_tokens`) inside messages, tools and template arguments are encoded as plain text,
    so data cannot end a turn or start a role. `ValueError` for a chat that the template rejects, and for tools, calls,
    results and roles that it drops.
    """
    if not tokenizer.chat_template:
        raise ValueError(NO_TEMPLATE)
    template = str(tokenizer.chat_template)
    profile = inspect_template(tokenizer)
    as_text = profile.reads_text_calls
    cleaned = [_clean_message(message, f"messages[{i}]", template, as_text) for i, message in enumerate(messages)]
    data, marker = profile.control.hide([cleaned, tools, template_kwargs])
    hidden, hidden_tools, hidden_kwargs = data

    def write(chat: Sequence[ChatMessage], offered: Sequence[Any] | None, open_answer: bool = False) -> str:
        text: str = tokenizer.apply_chat_template(
            list(chat),
            tools=list(offered) if offered else None,
            tokenize=False,
            add_generation_prompt=open_answer,
            **hidden_kwargs,
        )
        return text

    try:
        text = write(hidden, hidden_tools, add_generation_prompt)
    except Exception as error:  # a template may raise anything
        raise ValueError(f"the chat template refuses these messages: {error}") from error
    profile.check(write, hidden, hidden_tools)
    return RenderedChat(profile.control.split(text, marker))


def check_message(message: ChatMessage, where: str, template: str = "") -> None:
    """Raise `ValueError` for a message with an unknown role or without content.

    `where` identifies the message. Known roles are the common ones and those in `template`. An assistant's content may
    be null.
    """
    role = message.get("role")
    if not isinstance(role, str) or not (role in ROLES or _names_role(template, role)):
        raise ValueError(
            f"{where}.role is {role!r}: it must be system, user, assistant or tool, or one that the template names"
        )
    is_empty_answer = role == "assistant" and "content" in message
    if message.get("content") is None and not is_empty_answer and not has_more_than_content(message):
        raise ValueError(f"{where}.content is missing: give the message a text")


def has_more_than_content(message: ChatMessage) -> bool:
    """Whether a message has tool calls or reasoning."""
    return bool(message.get("tool_calls") or message.get("reasoning_content"))


def _names_role(template: str, role: str) -> bool:
    return re.fullmatch(r"\w+", role) is not None and (f"'{role}'" in template or f'"{role}"' in template)


def find_role(role: str, template: str) -> str:
    """The role that a template is given: system instead of developer, its newer name, unless the template names it."""
    return "system" if role == "developer" and not _names_role(template, role) else role


def _clean_message(message: ChatMessage, where: str, template: str, text_calls: bool) -> dict[str, Any]:
    """Normalize a message for templates: a role they know, text content, no nulls, tool arguments as an object.

    With `text_calls`, tool arguments are JSON text, and an answer of calls without text has null for its content.
    """
    check_message(message, where, template)
    try:
        content = read_text(message.get("content"))
        cleaned = {key: value for key, value in message.items() if value is not None} | {"content": content}
        cleaned["role"] = find_role(message["role"], template)
        if "tool_calls" in cleaned:
            if not isinstance(cleaned["tool_calls"], list | tuple):
                raise ValueError(f"tool_calls must be a list, got {cleaned['tool_calls']!r}")
            cleaned["tool_calls"] = [_clean_call(call, text_calls) for call in cleaned["tool_calls"]]
            if not cleaned["tool_calls"]:  # that of Llama 3 takes any list for calls
                del cleaned["tool_calls"]
            elif text_calls and message["role"] == "assistant":
                cleaned["content"] = content or None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return cleaned


def read_text(content: Any) -> str:
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


def _clean_call(call: Mapping[str, Any], as_text: bool) -> dict[str, Any]:
    if not isinstance(call, Mapping) or not isinstance(call.get("function") or call, Mapping):
        raise ValueError(f"a tool call must be an object with a function, got {call!r}")
    function = dict(call.get("function") or call)
    arguments = function.get("arguments")
    if isinstance(arguments, str) and not arguments.strip():  # as many clients write none
        arguments = "{}"
    if as_text and not isinstance(arguments, str):
        function["arguments"] = json.dumps(arguments or {}, ensure_ascii=False)
    elif isinstance(arguments, str):
        function["arguments"] = arguments
        if not as_text:  # arguments that are not JSON are rendered unchanged
            with contextlib.suppress(json.JSONDecodeError, RecursionError):
                function["arguments"] = json.loads(arguments)
    return {**call, "function": function}
