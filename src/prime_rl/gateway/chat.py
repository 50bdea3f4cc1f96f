"""Chat requests of agents: the fields that are used, and messages in one form, so that histories can be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from rollouts.training.types import Message

THOUGHTS = ("reasoning", "thinking", "redacted_thinking")
CONTEXT_LENGTH = "context_length_exceeded"
EXACT_INTEGERS = 2**53
"""JavaScript writes floats that are integers, here up to this number, as integers: 2.0 as 2."""


class RequestError(ValueError):
    """A request that is refused; the message says what to change.

    `code` is OpenAI's error code, `param` the field that the server has named.
    """

    def __init__(self, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


class ChatRequest(msgspec.Struct):
    """The fields of a chat completion request that have an effect; decoding skips all others."""

    messages: list[dict[str, Any]]
    model: str = "policy"
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = True
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    n: int | None = 1
    logprobs: bool | None = False
    functions: list[Any] | None = None

    def check(self) -> None:
        """Raise `RequestError` for what an agent in training cannot have."""
        if not self.messages:
            raise RequestError("messages is empty: send at least one message")
        if self.n not in (None, 1):
            raise RequestError("n must be 1 for agents in training: send one request for each answer")
        if self.logprobs:
            raise RequestError("logprobs is not supported for agents in training: leave it out")
        if self.functions:
            raise RequestError("functions is not supported: use tools")


def normalize_message(message: Mapping[str, Any]) -> Message:
    """Role, text and tool calls of a message, the same for every way of writing them; `RequestError` if not text."""
    role = message.get("role")
    if not isinstance(role, str):
        raise RequestError("a message must have a role")
    plain: Message = {"role": "system" if role == "developer" else role, "content": read_text(message.get("content"))}
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise RequestError("tool_calls must be a list")
        plain["tool_calls"] = [_normalize_call(call) for call in calls]
    return plain | {name: message[name] for name in ("tool_call_id", "name") if message.get(name) is not None}


def read_text(content: Any) -> str:
    """The text of a message's content: None, text, or a list of parts. `RequestError` for images and other parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestError("content must be text or a list of parts")
    return "".join(_read_part(part) for part in content)


def parse_arguments(text: str, decode: Callable[[str], Any] = msgspec.json.decode) -> dict[str, Any]:
    """Arguments of a tool call as an object; other text, or too deep JSON, becomes the value of `arguments`."""
    try:
        value = decode(text or "{}")
    except (ValueError, RecursionError):
        value = text
    return value if isinstance(value, dict) else {"arguments": value}


def encode_exact(value: Any) -> bytes:
    """Bytes that are equal for equal plain data."""
    return msgspec.json.encode(value, order="deterministic")


def digest_texts(messages: Sequence[Message]) -> int:
    """A number of 64 bits for the roles, texts and calls of messages, without the ids of calls, which are random."""
    texts = [[m["role"], m["content"], [call["function"] for call in m.get("tool_calls", [])]] for m in messages]
    return int.from_bytes(hashlib.blake2b(encode_exact(texts), digest_size=8).digest())


def encode_loose(message: Message) -> bytes:
    """Bytes that are equal for messages that differ in surrounding white space, or in how their JSON is written."""
    calls = [
        [call["id"], call["function"]["name"], parse_arguments(call["function"]["arguments"], DECODE_LOOSE)]
        for call in message.get("tool_calls", [])
    ]
    return encode_exact([message["content"].strip(), calls])


def _read_float(text: str) -> float:
    number = float(text)
    return int(number) if number.is_integer() and abs(number) < EXACT_INTEGERS else number


DECODE_LOOSE = msgspec.json.Decoder(float_hook=_read_float).decode


def _read_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind in THOUGHTS:
        return ""
    text = part.get("text", part.get("refusal")) if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        raise RequestError(f"a part of type {kind!r} is not supported: send text")
    return text


def _normalize_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise RequestError("a tool call must be an object with an id and a function")
    plain = {"name": str(function.get("name") or ""), "arguments": str(function.get("arguments") or "")}
    return {"id": str(call.get("id") or ""), "type": "function", "function": plain}
