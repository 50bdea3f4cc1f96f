"""Client of one multi-turn rollout: sampled tokens are sent back as tokens, never decoded and re-tokenized.

    turn 1   messages            ->  P1 + C1                       the server renders the prompt
    turn 2   P1 + C1 + bridge    ->  C2                            tokens; the bridge closes C1, renders what is new

The bridge is derived from the server's chat template: with R1 = render(messages up to C1) and R = render(all, with the
generation prompt), R1 must start with the previous rendered prompt and R with R1. Then the template only appends, and
the bridge is the part of R after C1's text. If the template rewrites the history (for example drops past reasoning),
the messages are sent instead: the prompt differs, and training starts a new sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import msgspec

from prime_rl.client.constraints import find_constraint
from rollouts.training.seeds import RequestSeeds

Body = dict[str, Any]


class TokenClient(Protocol):
    """The requests to a server that a conversation needs; implemented by `InferenceClient`."""

    @property
    def supports_token_prompts(self) -> bool:
        """Whether the server accepts prompts as token ids."""
        ...

    @property
    def seq_len(self) -> int | None:
        """Maximum tokens of a conversation."""
        ...

    async def generate(self, path: str, body: Body) -> Any: ...

    async def generate_from_tokens(self, body: Body) -> Any: ...

    async def tokenize(self, body: Body) -> list[int] | None: ...

    async def tokenize_continuation(self, model: str, text: str) -> list[int] | None: ...

    async def detokenize(self, body: Body) -> str: ...

    async def read_turn_end(self, body: Body) -> list[int] | None: ...

    def overlong(self, num_tokens: int) -> Exception: ...


RENDERED = ("messages", "tools", "chat_template_kwargs")
"""Request fields that the chat template renders."""

LIMITS = ("max_completion_tokens", "max_tokens")
"""Request fields that limit the length of a completion."""


@dataclass(frozen=True)
class _Turn:
    """Messages and tokens of a turn: the prompt tokens sent to the server and the sampled ones."""

    model: str
    tools: bytes
    keys: list[bytes]
    """Prompt and completion, encoded, because an environment may mutate its messages."""
    messages: list[Body]
    """The same messages with the complete model output including reasoning, for the template."""
    prompt_ids: list[int]
    completion_ids: list[int]
    rendered: list[int]
    """The prompt as rendered by the template; equals `prompt_ids` unless earlier turns were sent as tokens."""
    has_end: bool
    """Whether the last sampled token is an end token of the model."""


@dataclass(frozen=True)
class _Extended:
    """A prompt that extends a turn: as tokens, as rendered by the template, and as messages."""

    tokens: list[int]
    rendered: list[int]
    messages: list[Body]


@dataclass(frozen=True)
class _TextTurn:
    """A turn of a plain text completion."""

    model: str
    text: str
    """Prompt and completion, without a stop string that ended it."""
    tokens: list[int]
    answer: str
    completion_ids: list[int]
    stopped: bool
    """Whether a stop string ended it: the tokens stand for more than `text`."""


class MultiTurnClient:
    """A client for one rollout, shaped like `InferenceClient`; several conversations share its connections.

    Every request has a seed of its own, see `RequestSeeds`.
    """

    def __init__(self, client: TokenClient) -> None:
        self._client = client
        self._turns: list[_Turn] = []
        self._text_turns: list[_TextTurn] = []
        self._seeds = RequestSeeds()
        self.num_sampled = 0
        """Sampled tokens of all responses with token ids."""

    # Properties, since attributes with bound methods would form reference cycles, left to the garbage collector.
    @property
    def chat(self) -> SimpleNamespace:
        """`chat.completions.create`."""
        return SimpleNamespace(completions=SimpleNamespace(create=self.create_chat))

    @property
    def completions(self) -> SimpleNamespace:
        """`completions.create`."""
        return SimpleNamespace(create=self.create_completion)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def create_chat(self, *, extra_body: Body | None = None, **request: Any) -> Any:
        """As `client.chat.completions.create`."""
        body = self._build_body(request, extra_body)
        if not (body.get("logprobs") and body.get("return_token_ids")) or body.get("n", 1) != 1:
            return self._count(await self._client.generate("/chat/completions", body))
        keys = [_encode(message) for message in body["messages"]]
        constrained_by = find_constraint(body)
        extended = None if constrained_by is not None else await self._extend(body, keys)
        answer = None
        if extended is not None:
            limited = self._with_room(body | {"tokens": extended.tokens}, len(extended.tokens))
            answer = await self._client.generate_from_tokens(limited)
        if answer is None:
            extended = None
            answer = await self._client.generate("/chat/completions", body)
        self._count(answer)
        choice = answer.choices[0] if answer.choices else None
        if choice is not None and choice.token_ids is not None and answer.prompt_token_ids is not None:
            choice.constrained_by = constrained_by
            if extended is None:
                choice.chat_request = _plain_copy({key: body[key] for key in RENDERED if body.get(key) is not None})
            message = _as_message(choice.message)
            self._turns.append(
                _Turn(
                    body["model"],
                    _encode(body.get("tools")),
                    [*keys, _encode(_plain(message))],
                    [*(body["messages"] if extended is None else extended.messages), message],
                    answer.prompt_token_ids,
                    choice.token_ids,
                    answer.prompt_token_ids if extended is None else extended.rendered,
                    bool(choice.token_ids) and choice.finish_reason != "length" and choice.stop_reason is None,
                )
            )
        return answer

    async def create_completion(self, *, extra_body: Body | None = None, **request: Any) -> Any:
        """As `client.completions.create`."""
        body = {"max_tokens": None, **self._build_body(request, extra_body)}  # without the field, servers take 16
        text = body.get("prompt")
        if not body.get("return_token_ids") or not isinstance(text, str):
            return self._count(await self._client.generate("/completions", body))
        tokens = await self._extend_text(body["model"], text)
        if tokens is not None:
            body = self._with_room(body | {"prompt": tokens}, len(tokens))
        answer = self._count(await self._client.generate("/completions", body))
        choice = answer.choices[0] if answer.choices else None
        if choice is not None and choice.token_ids is not None and choice.prompt_token_ids is not None:
            choice.constrained_by = find_constraint(body)
            if tokens is None:
                choice.chat_request = {"prompt": text}
            self._text_turns.append(
                _TextTurn(
                    body["model"],
                    text + choice.text,
                    [*choice.prompt_token_ids, *choice.token_ids],
                    choice.text,
                    choice.token_ids,
                    choice.finish_reason == "stop" and isinstance(choice.stop_reason, str),
                )
            )
        return answer

    def _build_body(self, request: Body, extra_body: Body | None) -> Body:
        body = {**request, **(extra_body or {})}
        if (seed := body.get("seed")) is not None:
            body["seed"] = self._seeds.take(seed)
        return body

    async def _extend_text(self, model: str, text: str) -> list[int] | None:
        """The prompt as tokens; None if it does not extend an earlier turn."""
        turn = next((t for t in reversed(self._text_turns) if t.model == model and _is_longer(text, t)), None)
        if turn is None or not self._client.supports_token_prompts:
            return None
        known = turn.text
        if turn.stopped:  # the stop string, which the environment may leave out, and what its last token adds
            whole = await self._client.detokenize({"tokens": turn.completion_ids})
            if not whole.startswith(turn.answer):  # some decoders drop the first space of a text
                whole = f" {whole}"
            known += whole.removeprefix(turn.answer)
            if not whole.startswith(turn.answer) or not text.startswith(known):
                return None
        ids = await self._client.tokenize_continuation(model, text[len(known) :])
        return None if ids is None else [*turn.tokens, *ids]

    def _count(self, answer: Any) -> Any:
        """Count the sampled tokens of a response, and return it."""
        self.num_sampled += sum(len(getattr(choice, "token_ids", None) or ()) for choice in answer.choices)
        return answer

    async def _extend(self, body: Body, keys: list[bytes]) -> _Extended | None:
        """The prompt as tokens; None if it does not extend an earlier turn."""
        turn = self._find_turn(body, keys)
        if turn is None or not self._client.supports_token_prompts:
            return None
        options = {key: body[key] for key in ("model", "tools", "chat_template_kwargs") if body.get(key) is not None}
        messages = [*turn.messages, *body["messages"][len(turn.messages) :]]
        end = await self._client.read_turn_end({key: value for key, value in options.items() if key != "tools"})
        before = await self._client.tokenize(options | {"messages": turn.messages, "add_generation_prompt": False})
        after = await self._client.tokenize(options | {"messages": messages})
        if end is None or before is None or after is None:
            return None
        text_end = len(before) - len(end)  # of the last completion, without its end tokens
        # The last token of the previous prompt may have merged with the first text of the answer.
        prompt_end = len(turn.rendered) - 1
        is_extension = before[:prompt_end] == turn.rendered[:prompt_end] and after[:text_end] == before[:text_end]
        if before[text_end:] != end or not is_extension:
            return None
        bridge = after[text_end:]
        overlap = _count_overlap(turn, bridge, len(end))
        return _Extended([*turn.prompt_ids, *turn.completion_ids, *bridge[overlap:]], after, messages)

    def _find_turn(self, body: Body, keys: list[bytes]) -> _Turn | None:
        """The latest turn that these messages extend."""
        model, tools = body["model"], _encode(body.get("tools"))
        for turn in reversed(self._turns):
            last = len(turn.keys) - 1
            if len(keys) <= last + 1 or (turn.model, turn.tools, turn.keys[:last]) != (model, tools, keys[:last]):
                continue
            if _encode(_plain(body["messages"][last])) == turn.keys[last]:
                return turn
        return None

    def _with_room(self, body: Body, num_tokens: int) -> Body:
        """Limit the completion length to `seq_len`; raises the server's context-length error if no tokens are left."""
        seq_len = self._client.seq_len
        if seq_len is None:
            return body
        if num_tokens >= seq_len:
            raise self._client.overlong(num_tokens)
        room = seq_len - num_tokens
        given = {key: min(body[key], room) for key in LIMITS if body.get(key) is not None} or {"max_tokens": room}
        if body.get("min_tokens") is not None:
            given["min_tokens"] = min(body["min_tokens"], *given.values())
        return body | given


def _encode(value: Any) -> bytes:
    return msgspec.json.encode(value, enc_hook=str, order="deterministic")


def _plain_copy(value: Any) -> Any:
    """A deep copy as plain data; preserves the key order, which templates may print."""
    return msgspec.json.decode(msgspec.json.encode(value, enc_hook=str))


def _plain(message: Any) -> Body:
    """Role, text and tool calls of an assistant message, without other fields of the environment."""
    message = dict(message)
    calls = [
        {"id": call.get("id"), "function": dict(call.get("function") or {})} for call in message.get("tool_calls") or []
    ]
    return {"role": message.get("role"), "content": message.get("content") or "", "tool_calls": calls}


def _as_message(message: Any) -> Body:
    """All fields of a completion that a template may render."""
    fields: Body = {"role": "assistant", "content": message.content or ""}
    if message.tool_calls:
        fields["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    if message.reasoning_content:
        fields["reasoning_content"] = message.reasoning_content
    return fields


def _count_overlap(turn: _Turn, bridge: list[int], most: int) -> int:
    """Number of leading bridge tokens, up to `most`, that the model sampled itself: usually the end token.

    Tokens that the template writes before the end token count too, as the space of Llama 2: the turn is already over.
    """
    sampled = turn.completion_ids
    for count in range(min(most, len(sampled)), 0, -1):
        if sampled[-count:] == bridge[:count]:
            return count
    return bridge.index(sampled[-1]) + 1 if turn.has_end and sampled[-1] in bridge[:most] else 0


def _is_longer(text: str, turn: _TextTurn) -> bool:
    return len(text) > len(turn.text) and text.startswith(turn.text)
