"""The Anthropic Messages API: requests to chat requests, answers to messages and event streams."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from prime_rl.gateway.chat import ChatRequest, RequestError, parse_arguments

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
TOOL_CHOICES = {"auto": None, "any": "required", "none": "none"}
Event = tuple[str, dict[str, Any]]


class MessagesRequest(msgspec.Struct):
    """The fields of a Messages request that have an effect; decoding skips all others."""

    messages: list[dict[str, Any]]
    model: str = "policy"
    system: Any = None
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: Any = None
    mcp_servers: list[Any] | None = None


def read_request(body: MessagesRequest) -> ChatRequest:
    """The chat request of a Messages request."""
    if body.output_format is not None or (body.output_config or {}).get("format") is not None:
        raise RequestError("output_config.format is not supported: leave it out, or use the OpenAI APIs")
    if body.mcp_servers:
        raise RequestError("mcp_servers run at the provider: give tools with name, description and input_schema")
    if body.messages and body.messages[-1].get("role") == "assistant":
        raise RequestError("the last message is of the assistant, whose beginning cannot be set: leave it out")
    messages = [{"role": "system", "content": body.system}] if body.system else []
    for message in body.messages:
        messages += _read_message(message)
    return ChatRequest(
        messages,
        body.model,
        tools=[_read_tool(tool) for tool in body.tools or []],
        tool_choice=_read_choice(body.tool_choice or {}),
        parallel_tool_calls=not (body.tool_choice or {}).get("disable_parallel_tool_use"),
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
    )


def write_answer(answer: Any, model: str) -> dict[str, Any]:
    """The message of an answer."""
    choice = answer.choices[0]
    content: list[dict[str, Any]] = []
    if choice.message.content or not choice.message.tool_calls:
        content.append({"type": "text", "text": choice.message.content or ""})
    for call in choice.message.tool_calls or []:
        arguments = parse_arguments(call.function.arguments)
        content.append({"type": "tool_use", "id": call.id, "name": call.function.name, "input": arguments})
    usage = answer.usage
    matched = choice.stop_reason if isinstance(choice.stop_reason, str) and choice.finish_reason == "stop" else None
    ended = STOP_REASONS.get(choice.finish_reason, "end_turn")
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": "stop_sequence" if matched is not None else ended,
        "stop_sequence": matched,
        "usage": {
            "input_tokens": usage.prompt_tokens if usage else 0,
            "output_tokens": usage.completion_tokens if usage else 0,
        },
    }


def stream_events(message: dict[str, Any]) -> Iterator[Event]:
    """The events of a finished message."""
    usage = message["usage"]
    opening = {
        **message,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**usage, "output_tokens": 0},
    }
    yield "message_start", {"message": opening}
    for index, block in enumerate(message["content"]):
        is_text = block["type"] == "text"
        empty = {**block, "text": ""} if is_text else {**block, "input": {}}
        yield "content_block_start", {"index": index, "content_block": empty}
        if is_text:
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield "content_block_delta", {"index": index, "delta": delta}
        yield "content_block_stop", {"index": index}
    end = {name: message[name] for name in ("stop_reason", "stop_sequence")}
    yield "message_delta", {"delta": end, "usage": {"output_tokens": usage["output_tokens"]}}
    yield "message_stop", {}


def _read_message(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A message with its tool calls; tool results become messages of their own."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    found: list[dict[str, Any]] = []
    parts: list[Any] = []
    calls: list[dict[str, Any]] = []
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_use":
            calls.append(_read_call(block))
        elif kind == "tool_result":
            if parts:
                found.append({"role": role, "content": parts})
                parts = []
            found.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content")})
        else:
            parts.append(block)
    if parts or calls or not found:
        found.append({"role": role, "content": parts, **({"tool_calls": calls} if calls else {})})
    return found


def _read_call(block: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
    return {"id": block.get("id"), "type": "function", "function": function}


def _read_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if "input_schema" not in tool:
        raise RequestError(
            f"tools: {tool.get('type')!r} runs at the provider: give tools with name, description and input_schema"
        )
    function = {"name": tool.get("name"), "description": tool.get("description") or ""}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def _read_choice(choice: Mapping[str, Any]) -> Any:
    kind = choice.get("type", "auto")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or kind not in TOOL_CHOICES:
        raise RequestError(f"tool_choice of type {kind!r} is not supported: give 'auto', 'any', 'tool' or 'none'")
    return TOOL_CHOICES[kind]
