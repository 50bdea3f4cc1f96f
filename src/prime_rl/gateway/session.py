"""One rollout of an agent: its requests, answered by the engine and recorded as tokens."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Mapping
from typing import Any

from prime_rl.gateway.chat import (
    CONTEXT_LENGTH,
    ChatRequest,
    RequestError,
    digest_texts,
    encode_exact,
    encode_loose,
    normalize_message,
)
from prime_rl.utils.client import read_cause
from rollouts.agents import Turn
from rollouts.training.environments.plain import add_reasoning, build_request, read_message, read_turn
from rollouts.training.environments.protocol import add_usage, describe_failure
from rollouts.training.seeds import derive_seed
from rollouts.training.types import Message

PASSED_ON = ("tools", "tool_choice", "response_format", "chat_template_kwargs")
"""Fields of an agent's request that reach the engine; sampling is that of the run."""


class NoAnswer(Exception):
    """The engine could not answer."""


class Session:
    """The conversation of one rollout with the model, in any number of branches. `client` is of this rollout alone.

    A request that repeats an earlier conversation and its answer is sent as the sampled tokens plus the new messages;
    any other request is rendered from its messages and starts a branch.
    """

    def __init__(self, client: Any, model: str, sampling_args: Mapping[str, Any], key: str | None = None) -> None:
        self.key = key or f"session-{secrets.token_urlsafe(24)}"
        self.first_request = asyncio.Event()
        """Set by the first request."""
        self.model = model
        self.turns: list[Turn] = []
        self.conversations: list[list[Message]] = []
        """Messages of each request with its answer, in the order of the answers."""
        self.tools: list[dict[str, Any]] | None = None
        """Of the last conversation."""
        self.finish_reason: str | None = None
        """Of the last answer."""
        self.num_unmatched = 0
        """Requests with an assistant message that the engine did not write: the agent has edited its history."""
        self.num_completion_tokens: int | None = None
        self.reward: float | None = None
        """Reward that the agent reported itself."""
        self.is_overlong = False
        """Whether the last request was too long for the model."""
        self.refusal: RequestError | None = None
        """Why the last request was refused; None if it was not."""
        self.responses: dict[str, list[Message]] = {}
        """Messages up to each answer of the Responses API, by its id."""
        self._client = client
        self._sampling_args = build_request(sampling_args)
        self._written: dict[bytes, list[int]] = {}
        """The engine's messages, each with the numbers of the conversations that it ends."""
        self._reasoned: list[Message] = []
        """The last message of each conversation with its reasoning, which is not compared or sent again."""
        self._written_loosely: dict[bytes, Message] = {}
        self._answers: dict[bytes, Any] = {}
        self._unanswered: Counter[bytes] = Counter()
        """Cancelled requests, by their key in `_answers`, that no retry has followed yet."""
        self._repeats: Counter[int] = Counter()
        self._failure: Exception | None = None
        """The first failure of the engine."""
        self._overlong: Exception | None = None
        """The last request that was too long for the model."""

    @property
    def error(self) -> Exception | None:
        """What the rollout fails with: a failure of the engine, or without any answer that a request was too long."""
        return self._failure or (None if self.conversations else self._overlong)

    async def complete(self, request: ChatRequest, *, is_retry: bool = False) -> Any:
        """Answer a request as OpenAI's chat completions do; raises `RequestError` or `NoAnswer`.

        The same request again draws again, except that a retry of a client that lost the answer gets that answer. It
        draws again if an equal request was cancelled: then the answer may be that of another sample.
        """
        self.first_request.set()
        request.check()
        messages = [normalize_message(message) for message in request.messages]
        body = self._build_body(request)
        key = encode_exact([messages, body])
        if is_retry and self._unanswered[key]:
            self._unanswered[key] -= 1
        elif is_retry and key in self._answers:
            return self._answers[key]
        messages = self._restore(messages)
        if body.get("seed") is not None:
            body["seed"] = self._derive_seed(body["seed"], messages)
        try:
            answer = await self._client.chat.completions.create(model=self.model, messages=messages, **body)
        except asyncio.CancelledError:
            self._unanswered[key] += 1
            raise
        except Exception as error:
            raise self._explain(error) from error
        self._record(messages, body.get("tools"), answer)
        self._answers[key] = answer
        return answer

    def split_last(self) -> tuple[list[Message], list[Message]]:
        """The last conversation: the messages before the engine's first one, and the others."""
        last = self.conversations[-1]
        start = next(i for i, message in enumerate(last) if self._is_written(message))
        return last[:start], [self._add_reasoning(last[: i + 1]) for i in range(start, len(last))]

    def _add_reasoning(self, messages: list[Message]) -> Message:
        """The last one of these messages, with its reasoning if the engine wrote it; no loss on another assistant's.

        Of equal answers, it is the one with the most of these messages before it: a history may be shortened.
        """

        def likeness(number: int) -> tuple[int, int, int]:
            known = self.conversations[number]
            return _count_common_end(known, messages), -len(known), number

        ended = self._written.get(encode_exact(messages[-1]))
        if ended is None:
            return messages[-1] | ({"weight": 0} if messages[-1]["role"] == "assistant" else {})
        return self._reasoned[max(ended, key=likeness)]

    def _build_body(self, request: ChatRequest) -> dict[str, Any]:
        body = dict(self._sampling_args)
        body |= {name: value for name in PASSED_ON if (value := getattr(request, name))}
        if request.tools and request.parallel_tool_calls is False:
            body["parallel_tool_calls"] = False
        if stop := [*(body.get("stop") or []), *_as_list(request.stop)]:
            body["stop"] = stop
        limits = (body.get("max_completion_tokens"), request.max_completion_tokens, request.max_tokens)
        if known := [limit for limit in limits if limit is not None]:
            limit = body["max_completion_tokens"] = min(known)
            extra = body.get("extra_body") or {}
            if (extra.get("min_tokens") or 0) > limit:
                body["extra_body"] = {**extra, "min_tokens": limit}
        return body

    def _derive_seed(self, seed: int, messages: list[Message]) -> int:
        """The seed of the next draw for these messages, the same in a repeated run.

        An engine draws by seed and position: with one seed, branches of equal length would be correlated.
        """
        digest = digest_texts(messages)
        self._repeats[digest] += 1
        return derive_seed(seed, digest + self._repeats[digest])

    def _restore(self, messages: list[Message]) -> list[Message]:
        """The messages, those of the engine as it wrote them; counts a history that the agent has edited."""
        restored = [
            self._written_loosely.get(encode_loose(message), message)
            if message["role"] == "assistant" and not self._is_written(message)
            else message
            for message in messages
        ]
        self.num_unmatched += any(m["role"] == "assistant" and not self._is_written(m) for m in restored)
        return restored

    def _is_written(self, message: Message) -> bool:
        return message["role"] == "assistant" and encode_exact(message) in self._written

    def _explain(self, error: Any) -> Exception:
        kind, text = describe_failure(error)
        self.is_overlong = kind == "OverlongPrompt"
        if self.is_overlong:
            self._overlong = error
            response = error.response  # agents look for the words of the server
            return RequestError(read_cause(response.content).message or response.text, CONTEXT_LENGTH)
        if getattr(error, "status_code", None) == 400:
            return RequestError(text, param=read_cause(error.response.content).param)
        self._failure = self._failure or error
        return NoAnswer(f"{kind}: {text}")

    def _record(self, messages: list[Message], tools: list[dict[str, Any]] | None, answer: Any) -> None:
        choice = answer.choices[0]
        message = read_message(choice.message)
        self._written.setdefault(encode_exact(message), []).append(len(self.conversations))
        self._reasoned.append(add_reasoning(message, choice.message))
        self._written_loosely[encode_loose(message)] = message
        self.conversations.append([*messages, message])
        self.tools = tools
        self.finish_reason, self.is_overlong, self.refusal = choice.finish_reason, False, None
        self.num_completion_tokens = add_usage(self.num_completion_tokens, answer)
        if (turn := read_turn(answer)) is not None:
            self.turns.append(turn)


def _count_common_end(one: list[Message], other: list[Message]) -> int:
    pairs = zip(reversed(one), reversed(other), strict=False)
    return next((i for i, (first, second) in enumerate(pairs) if first != second), min(len(one), len(other)))


def _as_list(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else value or []
