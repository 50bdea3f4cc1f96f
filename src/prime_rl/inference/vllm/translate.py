"""Converts chat requests with token id prompts to vLLM completion requests, and the responses back."""

from __future__ import annotations

from typing import Any

import orjson

from prime_rl.inference.request_parsing import LIMITS, ApiError, Json, forces_call, parse_body
from prime_rl.inference.tool_parser import MessageParser

CHAT_ONLY = (
    *("messages", "tokens", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"),
    *("add_generation_prompt", "top_logprobs", "logprobs", "max_completion_tokens", "max_tokens"),
)


def clip_limits(data: bytes, max_model_len: int) -> bytes:
    """The body of a request with token limits of at most `max_model_len`, as in other engines; vLLM refuses larger."""
    body = parse_body(data)
    clipped = {name: max_model_len for name in LIMITS if type(body.get(name)) is int and body[name] > max_model_len}
    return orjson.dumps(body | clipped) if clipped else data


def completion_from_chat(body: Json) -> Json:
    """Build a completion request for `tokens`; without a limit it may fill the context."""
    tokens = body.get("tokens")
    if not isinstance(tokens, list) or not tokens or not all(type(token) is int for token in tokens):
        raise ApiError("tokens must be a list of token ids", param="tokens")
    if body.get("stream"):
        raise ApiError("/v1/chat/completions/tokens does not stream with vLLM: set stream to false", param="stream")
    if forces_call(body):
        raise ApiError(
            "a forced tool_choice is not supported with tokens: use /v1/chat/completions", param="tool_choice"
        )
    completion = {name: value for name, value in body.items() if name not in CHAT_ONLY}
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    logprobs = (body.get("top_logprobs") or 0) if body.get("logprobs") else None
    return {**completion, "prompt": tokens, "max_tokens": limit, "logprobs": logprobs}


def chat_from_completion(completion: Json, body: Json, parser: MessageParser, opened: bool) -> Json:
    """Convert a `text_completion` to a `chat.completion`; `opened`: the prompt ends inside a reasoning block."""
    choices, prompt, num_top = [], None, body.get("top_logprobs") or 0
    tools = body.get("tools") if body.get("tool_choice") != "none" else None
    for source in completion["choices"]:
        parsed = parser.parse(source["text"], has_tools=bool(tools), opened=opened)
        message: Json = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning is not None:
            message["reasoning_content"] = parsed.reasoning
        if parsed.calls:
            message["tool_calls"] = parsed.calls[:1] if body.get("parallel_tool_calls") is False else parsed.calls
        choice = {k: v for k, v in source.items() if k not in ("text", "logprobs", "prompt_token_ids")}
        choice |= {"message": message, "logprobs": _chat_logprobs(source.get("logprobs"), num_top)}
        if parsed.calls and source["finish_reason"] == "stop":
            choice["finish_reason"] = "tool_calls"
        prompt = source.get("prompt_token_ids") or prompt
        choices.append(choice)
    answer = {**completion, "id": "chat" + completion["id"], "object": "chat.completion", "choices": choices}
    return {**answer, "prompt_token_ids": prompt} if prompt is not None else answer


def _chat_logprobs(logprobs: Any, num_top: int) -> Json | None:
    if not logprobs:
        return None

    def entry(token: str, logprob: float) -> Json:
        return {"token": token, "logprob": logprob, "bytes": list(token.encode())}

    tops = logprobs.get("top_logprobs") or []
    content = []
    for i, (token, logprob) in enumerate(zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)):
        top = [entry(*pair) for pair in tops[i].items()] if i < len(tops) and tops[i] else []
        content.append({**entry(token, logprob), "top_logprobs": top[:num_top]})
    return {"content": content}
