"""One rollout's view of a server: what was sampled stays tokens, and is never turned into text and back.

    turn 1   messages            ->  P1 + C1                       the server renders the prompt
    turn 2   P1 + C1 + bridge    ->  C2                            tokens; the bridge closes C1, renders what is new

The bridge is read off the server's own template: with R1 = render(messages up to C1's) and R = render(all, and the
head of an answer), R1 must begin as the previous prompt was rendered and R as R1 does. Then the template only appends,
and the bridge is what R has after C1's text. Where it rewrites what came before (it drops past thoughts, say), the
messages are sent instead: the prompt is another one, and training opens a new sample for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from prime_rl.utils.client import InferenceClient

Body = dict[str, Any]
RENDERED = ("messages", "tools", "chat_template_kwargs")
"""What of a request the chat template sees."""


@dataclass(frozen=True)
class _Turn:
    """What was said and sampled; the tokens of a turn are those the server was given and those it sampled."""

    model: str
    tools: bytes
    keys: list[bytes]
    """Prompt and answer, encoded: an environment may change the messages that it passed."""
    messages: list[Body]
    """The same with all that the model said, its thoughts included: what the template is asked about."""
    prompt_ids: list[int]
    completion_ids: list[int]
    rendered: list[int]
    """The prompt as the template renders it; `prompt_ids` unless earlier turns were kept as tokens."""


@dataclass(frozen=True)
class _Extended:
    """A prompt that goes on from a turn: as tokens, as the template renders it, and as messages."""

    tokens: list[int]
    rendered: list[int]
    messages: list[Body]


@dataclass(frozen=True)
class _TextTurn:
    """The same of a plain completion."""

    model: str
    text: str
    tokens: list[int]


class Conversation:
    """A client for one rollout, shaped like `InferenceClient`; several conversations share its connections."""

    def __init__(self, client: InferenceClient) -> None:
        self._client = client
        self._turns: list[_Turn] = []
        self._text_turns: list[_TextTurn] = []

    # Made when they are asked for: an object that holds its own methods is left to the garbage collector.
    @property
    def chat(self) -> _Chat:
        """`chat.completions.create`."""
        return _Chat(self)

    @property
    def completions(self) -> _Create:
        """`completions.create`."""
        return _Create(self.create_completion)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def create_chat(self, *, extra_body: Body | None = None, **request: Any) -> Any:
        """As `client.chat.completions.create`."""
        body = {**request, **(extra_body or {})}
        if not (body.get("logprobs") and body.get("return_token_ids")) or body.get("n", 1) != 1:
            return await self._client.ask("/chat/completions", body)
        keys = [_encode(message) for message in body["messages"]]
        extended = await self._extend(body, keys)
        answer = None
        if extended is not None:
            limited = self._with_room(body | {"tokens": extended.tokens}, len(extended.tokens))
            answer = await self._client.ask_tokens(limited)
        if answer is None:
            extended = None
            answer = await self._client.ask("/chat/completions", body)
        choice = answer.choices[0] if answer.choices else None
        if choice is not None and choice.token_ids is not None and answer.prompt_token_ids is not None:
            if extended is None:
                choice.asked = _plain_copy({key: body[key] for key in RENDERED if body.get(key) is not None})
            said = _as_message(choice.message)
            self._turns.append(
                _Turn(
                    body["model"],
                    _encode(body.get("tools")),
                    [*keys, _encode(_plain(said))],
                    [*(body["messages"] if extended is None else extended.messages), said],
                    answer.prompt_token_ids,
                    choice.token_ids,
                    answer.prompt_token_ids if extended is None else extended.rendered,
                )
            )
        return answer

    async def create_completion(self, *, extra_body: Body | None = None, **request: Any) -> Any:
        """As `client.completions.create`."""
        body = {**request, **(extra_body or {})}
        text = body.get("prompt")
        if not body.get("return_token_ids") or not isinstance(text, str):
            return await self._client.ask("/completions", body)
        turn = next((t for t in reversed(self._text_turns) if t.model == body["model"] and _is_longer(text, t)), None)
        if turn is not None and self._client.takes_tokens:
            fresh = {"model": body["model"], "prompt": text[len(turn.text) :], "add_special_tokens": False}
            if (ids := await self._client.tokenize(fresh)) is not None:
                tokens = [*turn.tokens, *ids]
                body = self._with_room(body | {"prompt": tokens}, len(tokens), "max_tokens")
        answer = await self._client.ask("/completions", body)
        choice = answer.choices[0] if answer.choices else None
        if choice is not None and choice.token_ids is not None and choice.prompt_token_ids is not None:
            if turn is None:
                choice.asked = {"prompt": text}
            tokens = [*choice.prompt_token_ids, *choice.token_ids]
            self._text_turns.append(_TextTurn(body["model"], text + choice.text, tokens))
        return answer

    async def _extend(self, body: Body, keys: list[bytes]) -> _Extended | None:
        """The prompt as tokens; None for a first turn and where it does not extend one."""
        turn = self._find_turn(body, keys)
        if turn is None or not self._client.takes_tokens:
            return None
        ask = {key: body[key] for key in ("model", "tools", "chat_template_kwargs") if body.get(key) is not None}
        messages = [*turn.messages, *body["messages"][len(turn.messages) :]]
        end = await self._client.read_turn_end({key: value for key, value in ask.items() if key != "tools"})
        before = await self._client.tokenize(ask | {"messages": turn.messages, "add_generation_prompt": False})
        after = await self._client.tokenize(ask | {"messages": messages})
        if end is None or before is None or after is None:
            return None
        told = len(before) - len(end)
        # The last token of the previous prompt may have merged with the first text of the answer.
        shown = len(turn.rendered) - 1
        if before[told:] != end or before[:shown] != turn.rendered[:shown] or after[:told] != before[:told]:
            return None
        bridge = after[told:]
        overlap = _count_overlap(turn.completion_ids, bridge, len(end))
        return _Extended([*turn.prompt_ids, *turn.completion_ids, *bridge[overlap:]], after, messages)

    def _find_turn(self, body: Body, keys: list[bytes]) -> _Turn | None:
        """The latest turn that these messages go on from."""
        model, tools = body["model"], _encode(body.get("tools"))
        for turn in reversed(self._turns):
            last = len(turn.keys) - 1
            if len(keys) <= last + 1 or (turn.model, turn.tools, turn.keys[:last]) != (model, tools, keys[:last]):
                continue
            if _encode(_plain(body["messages"][last])) == turn.keys[last]:
                return turn
        return None

    def _with_room(self, body: Body, num_tokens: int, key: str = "max_completion_tokens") -> Body:
        """The request for as many tokens as `seq_len` leaves at most; refused as a server would when it leaves none."""
        seq_len = self._client.seq_len
        if seq_len is None:
            return body
        if num_tokens >= seq_len:
            raise self._client.overlong(num_tokens)
        room = seq_len - num_tokens
        return body | {key: min(body.get(key) or room, room)}


class _Create:
    """The `create` in `completions.create`."""

    def __init__(self, create: Any) -> None:
        self.create = create


class _Chat:
    """The `chat` in `chat.completions.create`."""

    def __init__(self, conversation: Conversation) -> None:
        self.completions = _Create(conversation.create_chat)


def _encode(value: Any) -> bytes:
    return msgspec.json.encode(value, enc_hook=str, order="deterministic")


def _plain_copy(value: Any) -> Any:
    """The value as plain data, which nobody else can change; keys keep their order, which templates write out."""
    return msgspec.json.decode(msgspec.json.encode(value, enc_hook=str))


def _plain(message: Any) -> Body:
    """Role, text and tool calls of an assistant's message, whatever else an environment keeps in it."""
    message = dict(message)
    calls = [
        {"id": call.get("id"), "function": dict(call.get("function") or {})} for call in message.get("tool_calls") or []
    ]
    return {"role": message.get("role"), "content": message.get("content") or "", "tool_calls": calls}


def _as_message(message: Any) -> Body:
    """All of an answer that a template may show."""
    said: Body = {"role": "assistant", "content": message.content or ""}
    if message.tool_calls:
        said["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    if message.reasoning_content:
        said["reasoning_content"] = message.reasoning_content
    return said


def _count_overlap(sampled: list[int], bridge: list[int], most: int) -> int:
    """How much of the bridge's beginning, up to `most`, the model has sampled itself: usually its end token."""
    for count in range(min(most, len(sampled)), 0, -1):
        if sampled[-count:] == bridge[:count]:
            return count
    return 0


def _is_longer(text: str, turn: _TextTurn) -> bool:
    return len(text) > len(turn.text) and text.startswith(turn.text)
