"""Parses generated text into assistant messages: reasoning blocks, and tool calls in model-specific formats."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Call = dict[str, Any]
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
THINK_TAIL = 8
"""An opening reasoning tag is looked for in this many last tokens of a prompt."""
TOOL_OPEN, TOOL_CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
ARGUMENT_KEYS = {"parameters", "arguments"}
CALL_KEYS = {"name", "type", "id", *ARGUMENT_KEYS}
_BEFORE_CALL = re.compile(rf"{TOOL_OPEN}\s*")
_AFTER_CALL = re.compile(rf"\s*(?:{TOOL_OPEN}|{TOOL_CLOSE}|\Z)")


@dataclass(frozen=True)
class Message:
    """An assistant message; `content` is None if it only calls tools."""

    content: str | None
    reasoning: str | None = None
    calls: list[Call] = field(default_factory=list)


@dataclass(frozen=True)
class MessageParser:
    """Splits a completion into reasoning, content and tool calls. Malformed tool calls remain text."""

    tools: str = "hermes"
    reasoning: bool = False

    @property
    def tags(self) -> set[str]:
        """The tags that it looks for, some of which may be special tokens."""
        dialect = TOOL_DIALECTS[self.tools]
        tags = {tag for tag in (*dialect.opening, *dialect.closing) if tag.strip()}
        return tags | ({THINK_OPEN, THINK_CLOSE} if self.reasoning else set())

    def opens(self, prompt: list[int], decode: Callable[[list[int]], str]) -> bool:
        """Whether the prompt ends with an opening reasoning tag, as some chat templates write it."""
        return self.reasoning and decode(prompt[-THINK_TAIL:]).rstrip().endswith(THINK_OPEN)

    def parse(self, text: str, *, has_tools: bool = False, opened: bool = False) -> Message:
        """Parse a complete text; `opened`: the prompt ended inside a reasoning block."""
        reasoning, rest, _ = self._split(text, opened)
        if not has_tools:
            return Message(rest, reasoning)
        content, calls = TOOL_DIALECTS[self.tools].parse(rest)
        return Message(content, reasoning, calls)

    def parse_open(self, text: str, *, has_tools: bool = False, opened: bool = False) -> tuple[str, str]:
        """`(reasoning, content)` of a partial text, without a suffix that may become a tag or a tool call."""
        if self.reasoning and THINK_OPEN.startswith(text.lstrip()):
            return "", ""
        reasoning, rest, closed = self._split(text, opened)
        if reasoning is not None and not closed:
            return _without_start_of(THINK_CLOSE, reasoning), ""
        return reasoning or "", TOOL_DIALECTS[self.tools].plain(rest) if has_tools else rest

    def _split(self, text: str, opened: bool) -> tuple[str | None, str, bool]:
        """`(reasoning, rest, whether the reasoning has ended)`."""
        if not self.reasoning:
            return None, text, True
        begins = text.lstrip().startswith(THINK_OPEN)
        if not begins and not opened:
            return None, text, False
        inner = text.split(THINK_OPEN, 1)[1] if begins else text
        reasoning, mark, rest = inner.partition(THINK_CLOSE)
        return reasoning, rest, bool(mark)


@dataclass(frozen=True)
class ToolDialect:
    """A tool call format: `parse` returns text and calls, `plain` the prefix that is certainly not a call.

    A call is written as `opening`, `{"name": ..., <arguments>: ...}`, `closing`; several are joined by `separator`.
    """

    parse: Callable[[str], tuple[str | None, list[Call]]]
    plain: Callable[[str], str]
    arguments: str
    opening: tuple[str, ...] = ()
    closing: tuple[str, ...] = ()
    separator: str = "\n"


def parse_hermes(text: str) -> tuple[str | None, list[Call]]:
    """Parse `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; text before the first call is content."""
    calls: list[Call] = []
    first = opening = _BEFORE_CALL.search(text)
    try:
        while opening:
            # Arguments may contain the tags, so a call ends with its JSON.
            parsed, end = json.JSONDecoder().raw_decode(text, opening.end())
            calls.append(_build_call(parsed, "arguments"))
            if not _AFTER_CALL.match(text, end):
                raise ValueError("not a tool call")
            opening = _BEFORE_CALL.search(text, end)
    except (ValueError, RecursionError):
        return text or None, []
    head = text[: first.start()] if first else text
    return (head if head.strip() or not calls else None) or None, calls


def parse_llama(text: str) -> tuple[str | None, list[Call]]:
    """Parse a text that is entirely `{"name": ..., "parameters": {...}}`, several separated by semicolons.

    Other JSON objects, such as structured output with a name, remain text.
    """
    rest = text.strip().removeprefix(PYTHON_TAG).strip()
    calls = []
    try:
        while rest:
            parsed, end = json.JSONDecoder().raw_decode(rest)
            if not isinstance(parsed, dict) or parsed.keys() - CALL_KEYS or not parsed.keys() & ARGUMENT_KEYS:
                raise ValueError("not a tool call")
            calls.append(_build_call(parsed, "parameters"))
            rest = rest[end:].lstrip().removeprefix(";").lstrip()
    except (ValueError, RecursionError):
        return text or None, []
    return (None if calls else text or None), calls


def _build_call(parsed: Any, key: str) -> Call:
    """Build a call in OpenAI's format.

    `ValueError` if `parsed` is not a call, or has NaN, infinity or half of a surrogate pair.
    """
    if not isinstance(parsed, dict) or not isinstance(parsed.get("name"), str):
        raise ValueError("a tool call must have a name")
    arguments = parsed.get(key) or parsed.get("arguments") or {}
    raw = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    function = {"name": parsed["name"], "arguments": raw}
    "".join(function.values()).encode()  # `UnicodeEncodeError` is a `ValueError`
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _plain_hermes(text: str) -> str:
    at = text.find(TOOL_OPEN)
    return text[:at] if at >= 0 else _without_start_of(TOOL_OPEN, text)


def _plain_llama(text: str) -> str:
    start = text.lstrip()
    return "" if not start or start[0] == "{" or PYTHON_TAG.startswith(start[: len(PYTHON_TAG)]) else text


def _without_start_of(mark: str, text: str) -> str:
    """`text` without a suffix that is a prefix of `mark`."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return text[:-length]
    return text


TOOL_DIALECTS = {
    "hermes": ToolDialect(parse_hermes, _plain_hermes, "arguments", (TOOL_OPEN, "\n"), ("\n", TOOL_CLOSE)),
    "llama": ToolDialect(parse_llama, _plain_llama, "parameters", separator="; "),
}
