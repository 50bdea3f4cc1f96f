"""The OpenAI APIs: answers to chat completions and their streams; Responses requests to chat requests and back."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from prime_rl.gateway.chat import ChatRequest, RequestError
from rollouts.training.types import Message

Event = tuple[str, dict[str, Any]]


def write_chat(answer: Any, model: str) -> dict[str, Any]:
    """The chat completion of an answer."""
    choice = answer.choices[0]
    message: dict[str, Any] = {"role": "assistant", "content": choice.message.content, "refusal": None}
    if choice.message.tool_calls:
        message["tool_calls"] = [call.model_dump() for call in choice.message.tool_calls]
    if choice.message.reasoning_content:
        message["reasoning_content"] = choice.message.reasoning_content
    return {
        "id": answer.id or f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": choice.finish_reason, "logprobs": None}],
        "usage": _chat_usage(answer.usage),
    }


def stream_chat(completion: dict[str, Any], options: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
    """The chunks of a finished chat completion."""
    [choice] = completion["choices"]
    head = {name: completion[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}

    def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        return {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}

    message, opening = choice["message"], {"role": "assistant"}
    if reasoning := message.get("reasoning_content"):
        yield chunk({**opening, "reasoning_content": reasoning})
        opening = {}
    yield chunk({**opening, "content": message["content"]})
    for index, call in enumerate(message.get("tool_calls", [])):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    yield chunk({}, choice["finish_reason"])
    if (options or {}).get("include_usage"):
        yield {**head, "choices": [], "usage": completion["usage"]}


class ResponsesRequest(msgspec.Struct):
    """The fields of a Responses request that have an effect; decoding skips all others."""

    input: str | list[dict[str, Any]]
    model: str = "policy"
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    text: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    conversation: Any = None
    prompt: Any = None


def read_response_request(body: ResponsesRequest, stored: Mapping[str, list[Message]]) -> ChatRequest:
    """The chat request of a Responses request; `stored` holds the messages behind each `previous_response_id`."""
    for name in ("conversation", "prompt"):
        if getattr(body, name) is not None:
            raise RequestError(f"{name} is stored at the provider: leave it out, and give all messages in input")
    messages: list[Message] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if (previous := body.previous_response_id) is not None:
        if previous not in stored:
            raise RequestError(f"previous_response_id {previous!r} is not a response of this session")
        messages += stored[previous]
    return ChatRequest(
        messages + _read_items(body.input),
        body.model,
        tools=[_read_tool(tool) for tool in body.tools or []],
        tool_choice=_read_tool_choice(body.tool_choice),
        response_format=_read_format((body.text or {}).get("format") or {"type": "text"}),
        parallel_tool_calls=body.parallel_tool_calls,
        max_tokens=body.max_output_tokens,
    )


def write_response(answer: Any, body: ResponsesRequest) -> dict[str, Any]:
    """The response object of an answer."""
    choice, usage = answer.choices[0], answer.usage
    is_complete = choice.finish_reason != "length"
    status = "completed" if is_complete else "incomplete"
    output: list[dict[str, Any]] = []
    if choice.message.content or not choice.message.tool_calls:
        part: dict[str, Any] = {
            "type": "output_text",
            "text": choice.message.content or "",
            "annotations": [],
            "logprobs": [],
        }
        item: dict[str, Any] = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant"}
        output.append({**item, "status": status, "content": [part]})
    for call in choice.message.tool_calls or []:
        item = {"id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "call_id": call.id}
        output.append({**item, **call.model_dump()["function"], "status": "completed"})
    prompt, completion = (usage.prompt_tokens, usage.completion_tokens) if usage else (0, 0)
    return {
        "id": f"resp_{secrets.token_hex(12)}",
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": None if is_complete else {"reason": "max_output_tokens"},
        "instructions": body.instructions,
        "metadata": body.metadata or {},
        "model": body.model,
        "output": output,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "temperature": None,
        "top_p": None,
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + completion,
        },
    }


def stream_response(response: dict[str, Any]) -> Iterator[Event]:
    """The events of a finished response."""
    opening = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield "response.created", {"response": opening}
    yield "response.in_progress", {"response": opening}
    for index, item in enumerate(response["output"]):
        place = {"item_id": item["id"], "output_index": index}
        if item["type"] == "function_call":
            empty = {**item, "arguments": "", "status": "in_progress"}
            yield "response.output_item.added", {"output_index": index, "item": empty}
            yield "response.function_call_arguments.delta", {**place, "delta": item["arguments"]}
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield "response.function_call_arguments.done", {**place, **done}
        else:
            yield from _stream_text(item, place)
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield f"response.{response['status']}", {"response": response}


def _stream_text(item: dict[str, Any], place: dict[str, Any]) -> Iterator[Event]:
    [part] = item["content"]
    inside = {**place, "content_index": 0}
    empty = {**item, "content": [], "status": "in_progress"}
    yield "response.output_item.added", {"output_index": place["output_index"], "item": empty}
    yield "response.content_part.added", {**inside, "part": {**part, "text": ""}}
    yield "response.output_text.delta", {**inside, "delta": part["text"], "logprobs": []}
    yield "response.output_text.done", {**inside, "text": part["text"], "logprobs": []}
    yield "response.content_part.done", {**inside, "part": part}


def _read_items(items: str | list[dict[str, Any]]) -> list[Message]:
    """Messages of input items; a text and the calls after it are one message, as they were written."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Message] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "reasoning":
            continue
        if kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item.get("name", ""), "arguments": item.get("arguments", "")}
            call = {"id": item.get("call_id", ""), "type": "function", "function": function}
            messages[-1] = {**messages[-1], "tool_calls": [*messages[-1].get("tool_calls", []), call]}
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        else:
            raise RequestError(f"input: an item of type {kind!r} is not supported")
    return messages


def _read_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise RequestError(f"tools: {tool.get('type')!r} runs at the provider: give tools of type 'function'")
    function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _read_format(style: Any) -> dict[str, Any] | None:
    """The `response_format` of a chat; None for plain text."""
    kind = style.get("type") if isinstance(style, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": kind}
    if kind != "json_schema":
        raise RequestError(f"text.format {style!r} is not supported: give type 'text', 'json_object' or 'json_schema'")
    return {"type": kind, kind: {name: value for name, value in style.items() if name != "type"}}


def _read_tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return None if choice == "auto" else choice
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise RequestError(
            f"tool_choice {choice!r} is not supported: give 'auto', 'none', 'required' or "
            '{"type": "function", "name": ...}, and only the tools that are allowed'
        )
    return {"type": "function", "function": {"name": choice["name"]}}


def _chat_usage(usage: Any) -> dict[str, int]:
    prompt, completion = (usage.prompt_tokens, usage.completion_tokens) if usage else (0, 0)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
