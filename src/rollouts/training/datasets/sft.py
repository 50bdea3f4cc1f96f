"""Conversations to samples: read rows, render them, and let only what the assistant says carry loss."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rollouts.training.datasets.chat import TemplateRenderer
from rollouts.training.types import Message, Sample, Status

ASSISTANT = "assistant"
Row = Mapping[str, Any]


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


def load_rows(name: str, split: str = "train") -> list[Row]:
    """Rows of a JSONL or parquet file, of all such files in a directory, or of a data set on the hub.

    `ValueError` when it is none of them, holds no rows, or a line is no JSON object.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        rows = [
            row for file in sorted(path.iterdir()) if file.suffix in _READERS for row in _READERS[file.suffix](file)
        ]
    elif path.is_file():
        if path.suffix not in _READERS:
            raise ValueError(f"{name} is no data set: use a file that ends in {', '.join(_READERS)}")
        rows = _READERS[path.suffix](path)
    elif path.suffix in _READERS or name.count("/") != 1:
        raise ValueError(f"data set {name!r} was not found: give a .jsonl or .parquet file, or a hub id (owner/name)")
    else:
        rows = _load_hub(name, split)
    if not rows:
        raise ValueError(f"data set {name!r} holds no rows")
    return rows


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
    path = Path(dataset_name).expanduser()
    is_local = path.exists() or path.suffix in _READERS
    if is_local and subset is not None:
        raise ValueError(f"data set {dataset_name!r} is a file here, which has no subset {subset!r}: leave it out")
    rows = load_rows(dataset_name, split) if is_local else _load_hub(dataset_name, split, subset)
    chat = TemplateRenderer(tokenizer)
    samples = [
        render_conversation(read_conversation(as_messages(row), index), chat, index)
        for index, row in enumerate(rows[:max_samples])
    ]
    for sample in samples:
        sample.metadata = {"dataset": dataset_name, "index": sample.index}
    return [sample for sample in samples if len(sample.tokens) <= max_length]


_SPEAKERS = {"human": "user", "user": "user", "gpt": ASSISTANT, "assistant": ASSISTANT, "system": "system"}


def as_messages(row: Row) -> Row:
    """Rows of the other known formats as `prompt` and `completion` or `messages`; any other row as it is."""
    if row.get("conversations") is not None:
        turns = row["conversations"]
        if all(isinstance(turn, Mapping) and turn.get("from") in _SPEAKERS for turn in turns):
            turns = [{"role": _SPEAKERS[turn["from"]], "content": turn.get("value", "")} for turn in turns]
        return {"messages": turns, "tools": row.get("tools")}
    if row.get("instruction") is not None and row.get("output") is not None:
        prompt = "\n\n".join(filter(None, (row["instruction"], row.get("input"))))
        return {"prompt": prompt, "completion": row["output"]}
    if row.get("question") is not None and row.get("answer") is not None:
        return {"prompt": row["question"], "completion": row["answer"]}
    return row


def read_conversation(row: Row, index: int) -> Conversation:
    """A row with `messages`, or with `prompt` and `completion` as strings or lists of messages.

    Strings stand for one user and one assistant message. A prompt only sets the scene: loss falls on the completion.
    """
    tools = row.get("tools") or None
    tools = json.loads(tools) if isinstance(tools, str) else tools
    if row.get("messages") is not None:
        return Conversation(_messages(row["messages"], ASSISTANT, "messages", index), 0, tools)
    if row.get("prompt") is None or row.get("completion") is None:
        raise ValueError(
            f"row {index} of the data set has the columns {', '.join(sorted(row))}: "
            "it needs `messages`, or `prompt` and `completion`"
        )
    prompt = _messages(row["prompt"], "user", "prompt", index)
    return Conversation(prompt + _messages(row["completion"], ASSISTANT, "completion", index), len(prompt), tools)


def render_conversation(conversation: Conversation, chat: ChatRenderer, index: int = 0) -> Sample:
    """Tokens of a conversation up to its last assistant turn, with loss on assistant turns and what ends them.

    Each turn must extend the tokens before it, as at generation time. Where a template rewrites earlier turns
    (drops their reasoning, say) the model would be trained on a context it never sees: `ValueError`.
    """
    messages = conversation.messages
    tokens: list[int] = []
    mask: list[float] = []
    for i, message in enumerate(messages):
        if message.get("role") != ASSISTANT or i < conversation.first_trained:
            continue
        before = chat.render(messages[:i], conversation.tools, True)
        after = chat.render(messages[: i + 1], conversation.tools, False)
        if before[: len(tokens)] != tokens or after[: len(before)] != before:
            raise ValueError(
                f"row {index} of the data set: the chat template is not prefix-stable at message {i}, because what "
                "precedes an assistant turn is rendered differently once more follows; set tokenizer.chat_template"
            )
        end = len(before) + find_turn_end(after[len(before) :], chat)
        mask += [0.0] * (len(before) - len(mask)) + [1.0] * (end - len(before))
        tokens = after[:end]
    if not any(mask):
        raise ValueError(f"row {index} of the data set has no assistant message to learn")
    return Sample(prompt=messages, tokens=tokens, loss_mask=mask, index=index, status=Status.COMPLETED)


def find_turn_end(span: list[int], chat: ChatRenderer) -> int:
    """How much of an assistant turn a model generates: up to its last special token if only white space follows.

    The line break after `<|im_end|>` is not generated, so it must not be learnt.
    """
    last = max((k for k, token in enumerate(span) if token in chat.end_ids), default=-1)
    return last + 1 if last >= 0 and not chat.decode(span[last + 1 :]).strip() else len(span)


def _messages(value: Any, role: str, column: str, index: int) -> list[Message]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in value):
        raise ValueError(f"row {index} of the data set: `{column}` is neither text nor a list of messages with a role")
    return [dict(message) for message in value]


def _load_jsonl(path: Path) -> list[Row]:
    rows: list[Row] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not valid JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number} is no JSON object")
        rows.append(row)
    return rows


def _load_parquet(path: Path) -> list[Row]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(
            f"{path}: reading parquet needs pyarrow (pip install pyarrow), or convert it to JSONL"
        ) from error
    rows: list[Row] = parquet.read_table(path).to_pylist()
    return rows


_READERS = {".jsonl": _load_jsonl, ".parquet": _load_parquet}


def _load_hub(name: str, split: str, subset: str | None = None) -> list[Row]:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"data set {name!r} is no file here, and reading it from the hub needs `datasets` (pip install datasets)"
        ) from error
    try:
        return list(datasets.load_dataset(name, subset, split=split))
    except Exception as error:
        # The hub raises a dozen kinds (offline, gated, missing, proxy): for the user they are one.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"data set {name!r} is no file and was not found on the hub: {reason}") from error
