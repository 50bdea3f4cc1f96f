"""A client of the engine that gives scripted answers and records its requests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from rollouts.training.environments.answers import (
    Answer,
    AnswerMessage,
    Choice,
    FunctionCall,
    Logprobs,
    TokenLogprob,
    ToolCall,
    Usage,
    as_completion,
)

CALL = ToolCall("call_1", "function", FunctionCall("add", '{"a":1,   "b": 2}'))


class RecordedClient:
    """Answers each request with the next script entry: text, tool calls, an exception or a function of the request."""

    def __init__(self, *script: Any) -> None:
        self.requests: list[dict[str, Any]] = []
        self._script = iter(script) if script else itertools.repeat("Hello.")
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))

    async def _create(self, **request: Any) -> Any:
        self.requests.append(request)
        entry = next(self._script)
        if isinstance(entry, Callable):
            entry = await entry(request)
        if isinstance(entry, Exception):
            raise entry
        return build_answer(entry, len(self.requests))


def build_answer(entry: str | Sequence[ToolCall] | Choice, number: int) -> Any:
    """A chat answer with two prompt tokens and three sampled ones, which tell the number of the request."""
    choice = entry
    if not isinstance(choice, Choice):
        text, calls = (entry, None) if isinstance(entry, str) else (None, list(entry))
        message = AnswerMessage(content=text, tool_calls=calls)
        choice = Choice(message=message, finish_reason="tool_calls" if calls else "stop")
    choice.logprobs, choice.token_ids = Logprobs(content=[TokenLogprob(-0.5)] * 3), [number, 7, 8]
    answer = Answer([choice], id="a", prompt_token_ids=[1, 2], usage=Usage(2, 3, 5))
    return as_completion(answer, chat=True)
