"""Conversations to samples: read rows, render them, and let only what the assistant says carry loss."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, Protocol

from rollouts.training.datasets.chat import TemplateRenderer
from rollouts.training.datasets.rows import Row, iter_rows, load_rows
from rollouts.training.datasets.sample_files import (
    export_samples_to_huggingface_format,
    export_samples_to_jsonl,
    load_samples_from_jsonl,
)
from rollouts.training.types import Message, Sample, Status

__all__ = [
    "ChatRenderer",
    "Conversation",
    "Row",
    "as_messages",
    "compute_loss_mask",
    "export_samples_to_huggingface_format",
    "export_samples_to_jsonl",
    "find_turn_end",
    "is_empty_turn",
    "load_rows",
    "load_samples_from_jsonl",
    "load_sft_dataset",
    "prepare_sft_sample",
    "read_conversation",
    "render_conversation",
    "render_turns",
    "tokenize_conversation",
]

ASSISTANT = "assistant"


class ChatRenderer(Protocol):
    """A chat template with its tokenizer."""

    @property
    def end_ids(self) -> Collection[int]:
        """Special tokens, one of which ends a turn."""

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, add_generation_prompt: bool
    ) -> list[int]:
        """The token ids of a conversation."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids."""


@dataclass(frozen=True)
class Conversation:
    """Messages in order; assistant messages from index `first_trained` on are learnt."""

    messages: list[Message]
    first_trained: int = 0
    tools: list[Any] | None = None


def load_sft_dataset(
    dataset_name: str,
    split: str = "train",
    subset: str | None = None,
    tokenizer: Any = None,
    max_samples: int | None = None,
    max_length: int = 2048,
) -> list[Sample]:
    """Samples of a data set on the hub or in files, with loss on what the assistant says.

    Rows hold `messages`, `prompt` and `completion`, `instruction` (and `input`) and `output`, `question` and
    `answer`, or `conversations` of `from` and `value`. At most `max_samples` rows are read; those of more than
    `max_length` tokens are left out. `metadata` says `dataset` and `index`, the row's number.
    """
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise ValueError("load_sft_dataset needs a tokenizer with a chat template: pass tokenizer=")
    if max_length < 1 or (max_samples is not None and max_samples < 1):
        raise ValueError(f"max_length {max_length} and max_samples {max_samples} must be at least 1")
    chat = TemplateRenderer(tokenizer)
    samples = [
        render_conversation(read_conversation(as_messages(row), index), chat, index)
        for index, row in enumerate(islice(iter_rows(dataset_name, split, subset), max_samples))
    ]
    for sample in samples:
        sample.metadata = {"dataset": dataset_name, "index": sample.index}
    return [sample for sample in samples if len(sample.tokens) <= max_length]


_SPEAKERS = {"human": "user", "user": "user", "gpt": ASSISTANT, "assistant": ASSISTANT, "system": "system"}


def as_messages(row: Row) -> Row:
    """Rows of the other known formats as `prompt` and `completion` or `messages`; any other row as it is."""
    if row.get("messages") is not None or (row.get("prompt") is not None and row.get("completion") is not None):
        return row
    if row.get("conversations") is not None:
        turns = row["conversations"]
        if all(isinstance(turn, Mapping) and turn.get("from") in _SPEAKERS for turn in turns):
            turns = [{"role": _SPEAKERS[turn["from"]], "content": turn.get("value", "")} for turn in turns]
        return {"messages": turns, "tools": row.get("tools")}
    if row.get("instruction") is not None and row.get("output") is not None:
        prompt = "\n\n".join(str(part) for part in (row["instruction"], row.get("input")) if part)
        return {"prompt": prompt, "completion": row["output"]}
    if row.get("question") is not None and row.get("answer") is not None:
        return {"prompt": row["question"], "completion": row["answer"]}
    return row


def read_conversation(row: Row, index: int) -> Conversation:
    """A row with `messages`, or with `prompt` and `completion` as strings or lists of messages.

    Strings stand for one user and one assistant message. A prompt only sets the scene: loss falls on the completion.
    """
    tools = row.get("tools") or None
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise ValueError(f"row {index} of the data set: `tools` is not JSON: {error}") from error
    if row.get("messages") is not None:
        return Conversation(_messages(row["messages"], ASSISTANT, "messages", index), 0, tools)
    if row.get("prompt") is None or row.get("completion") is None:
        raise ValueError(
            f"row {index} of the data set has the columns {', '.join(sorted(row))}: "
            "it needs `messages`, or `prompt` and `completion`"
        )
    prompt = _messages(row["prompt"], "user", "prompt", index)
    return Conversation(prompt + _messages(row["completion"], ASSISTANT, "completion", index), len(prompt), tools)


def render_conversation(
    conversation: Conversation, chat: ChatRenderer, index: int = 0, roles: Collection[str] = (ASSISTANT,)
) -> Sample:
    """Tokens of a conversation up to the last turn that is learnt, with loss on the turns of `roles` and their ends.

    What an assistant says begins after the generation prompt; a turn of another role includes its header, and
    neighbours of one role are one turn. Empty assistant turns carry no loss. Each learnt turn must extend the tokens
    before it, as at generation time. Where a template rewrites earlier turns (drops their reasoning, say) the model
    would be trained on a context it never sees: `ValueError`.
    """
    messages, tools = conversation.messages, conversation.tools
    tokens: list[int] = []
    mask: list[float] = []
    for start, stop in _learnt_turns(conversation, roles):
        speaks = messages[start]["role"] == ASSISTANT
        before = chat.render(messages[:start], tools, speaks) if start or speaks else []
        after = chat.render(messages[:stop], tools, False)
        if before[: len(tokens)] != tokens or after[: len(before)] != before:
            raise ValueError(_unstable(index, start, chat, tokens, before, after))
        end = len(before) + find_turn_end(after[len(before) :], chat)
        mask += [0.0] * (len(before) - len(mask)) + [1.0] * (end - len(before))
        tokens = after[:end]
    if not any(mask):
        raise ValueError(f"row {index} of the data set has no {' or '.join(roles)} message to learn")
    return Sample(prompt=messages, tokens=tokens, loss_mask=mask, index=index, status=Status.COMPLETED)


def render_turns(conversation: Conversation, chat: ChatRenderer, index: int = 0) -> list[Sample]:
    """One sample per assistant turn, each after what precedes it, as a template shows it when that turn is generated.

    The way to learn from conversations of several turns under a template that rewrites earlier ones.
    """
    turns = [start for start, _ in _learnt_turns(conversation, (ASSISTANT,))]
    if not turns:
        raise ValueError(f"row {index} of the data set has no assistant message to learn")
    messages, tools = conversation.messages, conversation.tools
    return [render_conversation(Conversation(messages[: i + 1], i, tools), chat, index) for i in turns]


def is_empty_turn(message: Message) -> bool:
    """Whether an assistant message says nothing: no text, no reasoning, no tool call."""
    return message.get("role") == ASSISTANT and not any(
        value for key, value in message.items() if key not in ("role", "name")
    )


def _learnt_turns(conversation: Conversation, roles: Collection[str]) -> Iterator[tuple[int, int]]:
    """First and one past the last message of each turn with loss."""
    messages, stop = conversation.messages, conversation.first_trained
    while stop < len(messages):
        start, role = stop, messages[stop].get("role")
        stop += 1
        while role != ASSISTANT and stop < len(messages) and messages[stop].get("role") == role:
            stop += 1
        if role in roles and not is_empty_turn(messages[start]):
            yield start, stop


def _unstable(
    index: int, message: int, chat: ChatRenderer, tokens: list[int], before: list[int], after: list[int]
) -> str:
    """Why a turn does not extend what is before it."""
    if before[: len(tokens)] == tokens and chat.decode(after).startswith(chat.decode(before)):
        return (
            f"row {index} of the data set: message {message} begins with white space that merges with the token "
            "before it, so the model could never generate it there; strip the text"
        )
    return (
        f"row {index} of the data set: the chat template is not prefix-stable at message {message}, because what "
        "precedes this turn is rendered differently once more follows; set tokenizer.chat_template to one that is, "
        "or data.split_turns = true"
    )


def find_turn_end(span: list[int], chat: ChatRenderer) -> int:
    """How much of an assistant turn a model generates: up to its last special token if only white space follows.

    The line break after `<|im_end|>` is not generated, so it must not be learnt.
    """
    last = max((k for k, token in enumerate(span) if token in chat.end_ids), default=-1)
    return last + 1 if last >= 0 and not chat.decode(span[last + 1 :]).strip() else len(span)


def tokenize_conversation(
    messages: Sequence[Message], tokenizer: Any, max_length: int = 2048
) -> tuple[list[int], list[tuple[int, int]]]:
    """Tokens of a conversation up to its last assistant turn, and the spans `[start, end)` the assistant did not say.

    `ValueError` without an assistant turn, and for more than `max_length` tokens: nothing is cut.
    """
    sample = render_conversation(Conversation(list(messages)), TemplateRenderer(tokenizer))
    if len(sample.tokens) > max_length:
        raise ValueError(f"the conversation has {len(sample.tokens)} tokens, max_length is {max_length}: raise it")
    edges = [i for i, (a, b) in enumerate(pairwise([1.0, *sample.loss_mask, 1.0])) if a != b]
    return sample.tokens, list(zip(edges[::2], edges[1::2], strict=True))


def compute_loss_mask(tokens: Sequence[int], user_message_spans: Sequence[tuple[int, int]]) -> list[float]:
    """1 per token, 0 inside the spans `[start, end)`; `ValueError` for a span that is empty or not within them."""
    if not tokens:
        raise ValueError("there are no tokens to make a loss mask for")
    mask = [1.0] * len(tokens)
    for start, end in user_message_spans:
        if not 0 <= start < end <= len(tokens):
            raise ValueError(f"span ({start}, {end}) is not within the {len(tokens)} tokens")
        mask[start:end] = [0.0] * (end - start)
    return mask


def prepare_sft_sample(
    prompt: str | Sequence[Message], response: str, tokenizer: Any, max_length: int = 2048
) -> Sample:
    """A sample that teaches `response` to a prompt, text or the messages so far; only the response is learnt."""
    if not prompt or not response:
        raise ValueError(f"{'prompt' if not prompt else 'response'} is empty: there is nothing to learn")
    history = _messages(prompt if isinstance(prompt, str) else list(prompt), "user", "prompt", 0)
    messages = [*history, {"role": ASSISTANT, "content": response}]
    tokens, _ = tokenize_conversation(messages, tokenizer, max_length)
    sample = render_conversation(Conversation(messages, len(history)), TemplateRenderer(tokenizer))
    assert sample.tokens == tokens
    sample.prompt, sample.response, sample.index = prompt if isinstance(prompt, str) else history, response, None
    return sample


def _messages(value: Any, role: str, column: str, index: int) -> list[Message]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in value):
        raise ValueError(f"row {index} of the data set: `{column}` is neither text nor a list of messages with a role")
    return [dict(message) for message in value]
