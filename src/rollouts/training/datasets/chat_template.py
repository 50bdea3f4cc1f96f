"""Properties of a tokenizer's chat template: control tokens, and support for tools and roles."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any
from weakref import WeakKeyDictionary

from rollouts.training.datasets.control_tokens import ControlTokens, find_control_tokens

Chat = Sequence[Mapping[str, Any]]
Write = Callable[[Chat, Sequence[Any] | None], str]
TURNS = ("user", "assistant")
"""Roles that every template has."""
USER = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}
PLAIN_TURNS: Chat = [USER, ANSWER, {"role": "user", "content": "c"}]
CALL_NAME, ARGUMENTS = "look_up", '{"a": 1}'
CALL = {"id": "1", "type": "function", "function": {"name": CALL_NAME, "arguments": json.loads(ARGUMENTS)}}
CALL_TURNS: Chat = [USER, {**ANSWER, "tool_calls": [CALL]}, {"role": "tool", "content": "c", "tool_call_id": "1"}]


@dataclass
class TemplateProfile:
    """Properties of a chat template; `shown` lists the parts that it is known to render."""

    template: Any
    num_tokens: int
    control: ControlTokens
    turn_end: list[int]
    """Tokens that the template appends to an answer."""
    next_turn: Mapping[str, int]
    """See `TemplateRenderer.next_turn`."""
    reads_text_calls: bool
    """Whether it writes calls only in OpenAI's format: arguments as JSON text, and null for no content (DeepSeek)."""
    shown: set[str] = field(default_factory=set)

    def check(self, write: Write, messages: Chat, tools: Sequence[Any] | None) -> None:
        """Raise `ValueError` if the template silently drops tools, calls, results or messages of this chat.

        `write` renders a chat to text. Positive results are cached.
        """
        calls = {bool(m["content"]): m for m in reversed(messages) if m.get("tool_calls")}
        others = {m["role"]: m for m in reversed(messages) if m["role"] not in TURNS and m["content"].strip()}

        def depends_on(change: Callable[[Chat], Chat]) -> Callable[[Chat], bool]:
            return lambda chat: write(chat, tools) != write(change(chat), tools)

        if tools:
            self._check("tools", lambda chat: write(chat, tools) != write(chat, None), [USER], messages)
        for has_text, message in calls.items():  # that of DeepSeek-V3 writes one of both
            what = "tool calls beside text" if has_text else "tool calls"
            self._check(what, depends_on(partial(_without_calls, has_text)), [USER, message], messages)
        for role, message in others.items():
            what = "results of tools" if role == "tool" else f"messages of role {role!r}"
            short = [USER, *list(calls.values())[:1], message] if role == "tool" else [message, USER]
            self._check(what, depends_on(partial(_with_longer_content, role)), short, messages)

    def _check(self, what: str, is_shown: Callable[[Chat], bool], short: Chat, messages: Chat) -> None:
        """Try a short chat, then the complete one: some templates render tools in certain positions only."""
        if what in self.shown:
            return
        for chat in (short, messages):
            try:
                if is_shown(chat):
                    self.shown.add(what)
                    return
            except Exception:  # the template rejects this chat or its variant: inconclusive
                if chat is messages:
                    return
        raise ValueError(
            f"the chat template drops {what}, so the model would never see them: give the model a template that "
            "writes them (chat_template.jinja in its directory; tokenizer.chat_template for sft), or leave them out"
        )


_profiles: WeakKeyDictionary[Any, TemplateProfile] = WeakKeyDictionary()
_lock = threading.Lock()


def inspect_template(tokenizer: Any) -> TemplateProfile:
    """The profile of a tokenizer and its chat template; cached until one of them changes."""
    with _lock:
        profile = _profiles.get(tokenizer)
        if profile is None or (profile.template, profile.num_tokens) != (tokenizer.chat_template, len(tokenizer)):
            control = find_control_tokens(tokenizer, _write_plain_chats(tokenizer))
            end = _read_turn_end(tokenizer)
            profile = TemplateProfile(
                tokenizer.chat_template,
                len(tokenizer),
                control,
                end,
                next_turn=_read_next_turn(tokenizer, control) if control.ids.isdisjoint(end) else {},
                reads_text_calls=_reads_text_calls(tokenizer),
            )
            _profiles[tokenizer] = profile
        return profile


def _write_plain_chats(tokenizer: Any) -> list[str]:
    """Rendered plain conversations, with and, if supported, without a system message."""
    texts: list[str] = []
    for system in ([], [{"role": "system", "content": "d"}]) if tokenizer.chat_template else ():
        with suppress(Exception):  # a template may raise anything
            texts.append(tokenizer.apply_chat_template([*system, *PLAIN_TURNS], tokenize=False))
    return texts


def _read_turn_end(tokenizer: Any) -> list[int]:
    """The common end of two conversations with different answers; empty if the template does not render them."""
    ends: list[list[int]] = []
    with suppress(Exception):  # a template may raise anything
        for text in ("A", "B"):
            rendered = tokenizer.apply_chat_template([USER, {"role": "assistant", "content": text}], tokenize=False)
            ends.append(tokenizer.encode(rendered, add_special_tokens=False)[::-1])
    same = takewhile(lambda pair: pair[0] == pair[1], zip(*ends, strict=False)) if len(ends) == 2 else ()
    return [token for token, _ in same][::-1]


def _read_next_turn(tokenizer: Any, control: ControlTokens) -> dict[str, int]:
    """The control token that follows an answer once there is a reply of a user, or a result of calls; by its role."""
    found: dict[str, int] = {}
    for chat in (PLAIN_TURNS, CALL_TURNS):
        with suppress(Exception):  # a template may raise anything
            texts = [tokenizer.apply_chat_template(part, tokenize=False) for part in (chat[:-1], chat)]
            before, after = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
            if after[: len(before)] == before and after[len(before)] in control.ids:
                found[chat[-1]["role"]] = after[len(before)]
    return found


def _reads_text_calls(tokenizer: Any) -> bool:
    """See `TemplateProfile.reads_text_calls`."""

    def write(content: str | None, arguments: object) -> str:
        call = {**CALL, "function": {"name": CALL_NAME, "arguments": arguments}}
        chat = [USER, {"role": "assistant", "content": content, "tool_calls": [call]}]
        with suppress(Exception):  # a template may raise anything
            return str(tokenizer.apply_chat_template(chat, tokenize=False))
        return ""

    return CALL_NAME not in write("", json.loads(ARGUMENTS)) and ARGUMENTS in write(None, ARGUMENTS)


def _without_calls(has_text: bool, chat: Chat) -> Chat:
    """The chat without the calls that are beside text, or without the others."""
    return [
        {key: value for key, value in message.items() if key != "tool_calls" or bool(message["content"]) != has_text}
        for message in chat
    ]


def _with_longer_content(role: str, chat: Chat) -> Chat:
    return [
        {**message, "content": message["content"] + "a"} if message["role"] == role else message for message in chat
    ]
