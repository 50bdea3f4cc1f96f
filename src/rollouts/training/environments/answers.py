"""Chat responses as `openai` types where `verifiers` expects them, filled with lightweight structs."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import msgspec


class Response(SimpleNamespace):
    """A completion in a process that has not imported `openai`: no code there can test for its types."""


class FunctionCall(msgspec.Struct):
    """Tool name and JSON arguments."""

    name: str = ""
    arguments: str = ""


class ToolCall(msgspec.Struct):
    """One tool call of an answer."""

    id: str = ""
    type: str = "function"
    function: FunctionCall = msgspec.field(default_factory=FunctionCall)

    def model_dump(self) -> dict[str, Any]:
        """The call as plain data (the pydantic method that `verifiers` calls)."""
        return {"id": self.id, "type": self.type, "function": msgspec.structs.asdict(self.function)}


class AnswerMessage(msgspec.Struct):
    """The assistant's message."""

    role: str = "assistant"
    content: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    """The newer name of vLLM and OpenRouter; `read_completion` copies it to `reasoning_content`."""


class TokenLogprob(msgspec.Struct):
    """Log-probability of one sampled token."""

    logprob: float
    token: str = ""


class Logprobs(msgspec.Struct):
    """Log-probs of a chat answer (`content`) or of a plain completion (`token_logprobs`)."""

    content: list[TokenLogprob] | None = None
    token_logprobs: list[float] | None = None


class Choice(msgspec.Struct):
    """One completion. `versions` are `[start, version]` spans over its tokens, reported by our own server."""

    index: int = 0
    message: AnswerMessage = msgspec.field(default_factory=AnswerMessage)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """The stop string or token that ended it."""
    logprobs: Logprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    versions: list[tuple[int, int]] | None = None
    sampling_support: bytes = b""
    """See `Turn.sampling_support`; base64 in JSON."""
    chat_request: dict[str, Any] | None = None
    """The chat request that the server rendered to this choice's prompt; set by the multi-turn client."""
    constrained_by: str | None = None
    """The request field whose grammar restricted sampling; set by the multi-turn client."""


class Usage(msgspec.Struct):
    """Token counts of a request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0


class Answer(msgspec.Struct):
    """The used fields of a response; decoding skips all others."""

    choices: list[Choice] | None
    id: str = ""
    created: int = 0
    model: str = ""
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


def read_completion(data: bytes, *, chat: bool) -> Any:
    """Decode a response. Log-probs without token ids are removed: ids would have to be guessed. `ValueError` if it is
    not a completion.
    """
    try:
        answer = _decode_answer(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"the server's response is not a completion: {error}") from error
    for choice in answer.choices or []:
        if isinstance(choice.message.reasoning, str):
            choice.message.reasoning_content = choice.message.reasoning_content or choice.message.reasoning
        prompt_ids = answer.prompt_token_ids if chat else choice.prompt_token_ids
        if choice.token_ids is None or prompt_ids is None:
            choice.logprobs = None
    return as_completion(answer, chat=chat)


def as_completion(answer: Answer, *, chat: bool) -> Any:
    """A completion with our fields: a `ChatCompletion` or `Completion` of `openai` if that package is imported.

    It is built without their validation, which costs milliseconds; the import takes over a second.
    """
    fields = {name: getattr(answer, name) for name in Answer.__struct_fields__}
    if "openai" not in sys.modules:
        return Response(**fields)
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

    kind: Any = ChatCompletion if chat else Completion
    completion = kind.__new__(kind)
    completion.__dict__.update(fields)
    for slot in ("__pydantic_extra__", "__pydantic_private__"):
        object.__setattr__(completion, slot, None)
    object.__setattr__(completion, "__pydantic_fields_set__", set(fields))
    return completion


_decode_answer = msgspec.json.Decoder(Answer).decode
