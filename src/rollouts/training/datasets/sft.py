"""SFT samples from conversations, with loss on assistant messages."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from typing import Any

from rollouts.training.datasets.chat import (
    RENDER_OPTIONS,
    TemplateRenderer,
    check_message,
    has_more_than_content,
    read_text,
)
from rollouts.training.datasets.rows import Row, iter_rows, parse_text, read_list
from rollouts.training.datasets.sample_files import (
    export_samples_to_huggingface_format as export_samples_to_huggingface_format,
)
from rollouts.training.datasets.sample_files import export_samples_to_jsonl as export_samples_to_jsonl
from rollouts.training.datasets.sample_files import load_samples_from_jsonl as load_samples_from_jsonl
from rollouts.training.types import Message, Sample, Status

ASSISTANT = "assistant"
END_OF_REASONING = "</think>"
"""Ends reasoning that is part of the content."""
OTHER_REASONING = ("reasoning", "thinking")
"""Names of reasoning beside `reasoning_content`: those of vLLM and OpenRouter, and of gpt-oss and Ollama."""


class UnlearnableTextError(ValueError):
    """A trained turn has no text, or text that its template drops or merges with the prompt."""


@dataclass(frozen=True)
class Conversation:
    """Messages in order; assistant messages from index `first_trained` on have loss."""

    messages: list[Message]
    first_trained: int = 0
    tools: list[Any] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, such as `enable_thinking`."""


def load_sft_dataset(
    dataset_name: str,
    split: str = "train",
    subset: str | None = None,
    tokenizer: Any = None,
    max_samples: int | None = None,
    max_length: int = 2048,
) -> list[Sample]:
    """Samples of a data set on the hub or in files, with loss on assistant messages.

    Rows have `messages`, `prompt` and `completion`, `instruction` (and `input`) and `output`, `question` and
    `answer`, or `conversations` of `from` and `value`. At most `max_samples` rows are read; those of more than
    `max_length` tokens, and those without a turn to learn, such as an empty answer, are skipped with a warning.
    `metadata` has `dataset` and `index`, the row number. `ValueError` if no row is left.
    """
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise ValueError("load_sft_dataset needs a tokenizer with a chat template: pass tokenizer=")
    if max_length < 1 or (max_samples is not None and max_samples < 1):
        raise ValueError(f"max_length {max_length} and max_samples {max_samples} must be at least 1")
    chat = TemplateRenderer(tokenizer)
    samples, empty, longer = [], list[int](), list[int]()
    for index, row in enumerate(islice(iter_rows(dataset_name, split, subset), max_samples)):
        with name_row(index):
            conversation = read_conversation(as_messages(row), index, str(tokenizer.chat_template))
        if not any(find_trained_turns(conversation)):
            empty.append(index)
            continue
        with name_row(index):
            sample = render_conversation(conversation, chat, index)
        if len(sample.tokens) > max_length:
            longer.append(index)
            continue
        sample.metadata = {"dataset": dataset_name, "index": index}
        samples.append(sample)
    problems = {
        f"rows of {dataset_name} have more than max_length = {max_length} tokens": (longer, "raise it"),
        f"rows of {dataset_name} have no assistant message to learn": (
            empty,
            "it needs one with a text and a message before it",
        ),
    }
    _report_skipped(problems, is_error=not samples)
    return samples


def _report_skipped(problems: Mapping[str, tuple[list[int], str]], is_error: bool) -> None:
    """Warn of rows that are left out, with a cure for each problem; `ValueError` with all of them if none is left."""
    texts = [
        (f"{len(rows)} {problem}, the first is row {rows[0]}", cure)
        for problem, (rows, cure) in problems.items()
        if rows
    ]
    if texts and is_error:
        raise ValueError("; ".join(f"{text}: {cure}" for text, cure in texts))
    for text, _ in texts:
        logging.getLogger(__name__).warning("%s: they are skipped", text)


_SPEAKERS = {"human": "user", "user": "user", "gpt": ASSISTANT, "assistant": ASSISTANT, "system": "system"}


def as_messages(row: Row, has_template: bool = True) -> Row:
    """Rows of the other known formats as `prompt` and `completion` or `messages`; any other row as it is.

    A `system` column is the system message of a conversation without one, and the pairs of `history` are turns before
    the instruction. Without a chat template, `system` is text before a prompt that is text. `messages`,
    `conversations` and `history` may be JSON text, as often in parquet and CSV. `ValueError` names the column.
    """
    options = {name: row[name] for name in ("tools", "chat_template_kwargs") if row.get(name) is not None}
    has_messages = row.get("messages") is not None or row.get("conversations") is not None
    if has_messages and row.get("functions") and not row.get("tools"):
        raise ValueError("`functions` is the former name of `tools`: rename it, with the form of tools")
    lists = {name: read_list(row[name], name) for name in ("messages", "conversations") if row.get(name) is not None}
    row = {**row, **lists}
    if row.get("messages") is not None:
        return {**row, "messages": _add_system(row, row["messages"])}
    if row.get("prompt") is not None and row.get("completion") is not None:
        return {**row, "prompt": _add_system(row, row["prompt"], has_template)}
    if row.get("conversations") is not None:
        return {"messages": _add_system(row, _read_turns(row["conversations"])), **options}
    if row.get("instruction") is not None and row.get("output") is not None:
        prompt = "\n\n".join(str(part) for part in (row["instruction"], row.get("input")) if part)
        history = _read_history(row)
        _check_text(row, "output")
        turns = [*history, {"role": "user", "content": prompt}] if history else prompt
        return {"prompt": _add_system(row, turns, has_template), "completion": row["output"], **options}
    if row.get("question") is not None and row.get("answer") is not None:
        _check_text(row, "question", "answer")
        return {"prompt": _add_system(row, row["question"], has_template), "completion": row["answer"], **options}
    return row


def _check_text(row: Row, *columns: str) -> None:
    for column in columns:
        if not isinstance(row[column], str | list):
            raise ValueError(f"`{column}` is neither text nor a list of messages with a role")


def _read_turns(turns: list[Any]) -> list[Message]:
    """The messages of a `conversations` column: turns with `from` and `value`, or messages."""
    if not all(isinstance(turn, Mapping) for turn in turns):
        raise ValueError("`conversations` is no list of turns with `from` and `value`")
    if all("from" not in turn for turn in turns):
        return turns
    if unknown := sorted({repr(turn.get("from")) for turn in turns} - {repr(name) for name in _SPEAKERS}):
        raise ValueError(
            f"`conversations` has turns from {', '.join(unknown)}: `from` may be {', '.join(_SPEAKERS)}; use "
            "`messages` for other roles"
        )
    return [
        {"role": _SPEAKERS[turn["from"]], "content": turn.get("value", "")}
        | ({"weight": turn["weight"]} if "weight" in turn else {})
        for turn in turns
    ]


def _add_system(row: Row, prompt: Any, has_template: bool = True) -> Any:
    """A prompt (text or messages) after the `system` column as a message, if that has text and the prompt no own.

    Without a chat template, the column is text before a prompt that is text.
    """
    text = row.get("system")
    if text is not None and not isinstance(text, str):
        raise ValueError("`system` is no text")
    if text and isinstance(prompt, str) and not has_template:
        return f"{text}\n\n{prompt}"
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not text or not isinstance(messages, list):
        return prompt
    first = messages[0] if messages else None
    has_own = isinstance(first, Mapping) and first.get("role") in ("system", "developer")
    return prompt if has_own else [{"role": "system", "content": text}, *messages]


def _read_history(row: Row) -> list[Message]:
    """The pairs of a `history` column, of an instruction and its output, as messages."""
    pairs = row.get("history") or []
    if isinstance(pairs, str):
        pairs = read_list(pairs, "history", "pairs of an instruction and its output")
    if not isinstance(pairs, list) or not all(map(_is_pair, pairs)):
        raise ValueError("`history` is no list of pairs of an instruction and its output")
    return [
        {"role": role, "content": text} for pair in pairs for role, text in zip(("user", ASSISTANT), pair, strict=True)
    ]


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)


@contextmanager
def name_row(index: int) -> Iterator[None]:
    """Add the row number to every `ValueError` without one."""
    try:
        yield
    except ValueError as error:
        if f"row {index} " in str(error):
            raise
        raise ValueError(f"row {index} of the data set: {error}") from error


def read_conversation(row: Row, index: int, template: str = "") -> Conversation:
    """A row with `messages`, or with `prompt` and `completion` as strings or lists of messages.

    Strings are converted to one user and one assistant message. Only the completion has loss. Valid roles are the
    common ones and those in the chat template. `ValueError` names the row and the key.
    """
    with name_row(index):
        tools, options = parse_text(row.get("tools") or None, "tools"), _read_template_kwargs(row)
    if row.get("messages") is not None:
        return Conversation(_messages(row["messages"], ASSISTANT, "messages", index, template), 0, tools, options)
    if row.get("prompt") is None or row.get("completion") is None:
        raise ValueError(
            f"row {index} of the data set has the columns {', '.join(sorted(row))}: "
            "it needs `messages`, `prompt` and `completion`, `question` and `answer`, or `instruction` and `output`"
        )
    prompt = _messages(row["prompt"], "user", "prompt", index, template)
    completion = _messages(row["completion"], ASSISTANT, "completion", index, template)
    return Conversation(prompt + completion, len(prompt), tools, options)


def _read_template_kwargs(row: Row) -> dict[str, Any]:
    """The column `chat_template_kwargs`, as an object or its JSON text."""
    options = parse_text(row.get("chat_template_kwargs") or {}, "chat_template_kwargs")
    if not isinstance(options, Mapping):
        raise ValueError(f"`chat_template_kwargs` is {options!r}: it must be an object")
    if taken := sorted(options.keys() & RENDER_OPTIONS):
        raise ValueError(f"`chat_template_kwargs` must not set {taken[0]}: leave it out")
    return dict(options)


def render_conversation(
    conversation: Conversation, chat: TemplateRenderer, index: int = 0, roles: Collection[str] = (ASSISTANT,)
) -> Sample:
    """Tokens of a conversation up to the last trained turn, with loss on the turns of `roles` and their end tokens.

    The end token is the one that the template appends, or else that of `TemplateRenderer.next_turn`. An assistant turn
    starts after the generation prompt; a turn of another role includes its header, and consecutive messages of one role
    are one turn. An assistant turn that is empty, or that opens the conversation and so has no prompt, has no loss.
    Each trained turn must extend the previous tokens, as in generation. `ValueError` if a template rewrites earlier
    turns (for example, drops reasoning), because the model would be trained on contexts that do not occur.
    `UnlearnableTextError`, without the row number, if it drops the reasoning of a trained turn or its text beside
    calls, or merges white space at its beginning with the prompt.
    """
    messages, tools, options = conversation.messages, conversation.tools, conversation.template_kwargs
    tokens: list[int] = []
    mask: list[float] = []
    answers: dict[int, Message] = {}  # by the place of the token after them
    for start, stop in find_trained_turns(conversation, roles):
        is_assistant = messages[start]["role"] == ASSISTANT
        after = chat.render(messages[:stop], tools, False, **options)
        if start or is_assistant:
            before = chat.render(messages[:start], tools, is_assistant, **options)
        else:
            before = after[: _find_first_turn(conversation, chat, after)]
        if before[: len(tokens)] != tokens or after[: len(before)] != before:
            raise _explain_unstable_prefix(index, start, messages[start], chat, tokens, before, after)
        if is_assistant and (dropped := _find_dropped_part(conversation, start, chat, after, len(before))):
            raise UnlearnableTextError(
                f"the chat template drops the {dropped} of message {start}, so the model would learn to answer without "
                "it: set tokenizer.chat_template to one that writes it, or leave it out"
            )
        end = len(before) + find_turn_end(after[len(before) :], chat)
        mask += [0.0] * (len(before) - len(mask)) + [1.0] * (end - len(before))
        tokens = after[:end]
        if is_assistant:
            answers[end] = messages[start]
    _learn_next_turns(tokens, mask, answers, chat.next_turn)
    if not any(mask):
        raise ValueError(f"row {index} of the data set has no {' or '.join(roles)} message to learn")
    return Sample(prompt=messages, tokens=tokens, loss_mask=mask, index=index, status=Status.COMPLETED)


def _learn_next_turns(
    tokens: list[int], mask: list[float], answers: Mapping[int, Message], next_turn: Mapping[str, int]
) -> None:
    """Give loss to the tokens after answers that begin the next turn; add the one that would follow the last answer."""
    for place, answer in answers.items():
        role = "tool" if answer.get("tool_calls") else "user"
        if place == len(tokens) and role in next_turn:
            tokens.append(next_turn[role])
            mask.append(1.0)
        elif place < len(tokens) and tokens[place] in next_turn.values():
            mask[place] = 1.0


def _find_first_turn(conversation: Conversation, chat: TemplateRenderer, rendered: list[int]) -> int:
    """Where the first turn begins, such as after a default system message: at the header of its role after an answer.

    0 if that header has no control token, as it may be part of a text.
    """
    first, options, chats = conversation.messages[0], conversation.template_kwargs, list[list[int]]()
    with suppress(ValueError):  # the template refuses such a message after an answer
        for text in ("a", "b"):
            turn = first | {"content": text}
            chats.append(chat.render([turn, {"role": ASSISTANT, "content": text}, turn], None, False, **options))
    differing = [k for k, tokens in enumerate(zip(*chats, strict=False)) if len(set(tokens)) > 1]
    if len(differing) != 3:
        return 0
    header = chats[0][differing[1] + 1 + len(chat.turn_end) : differing[2]]
    if not any(token in chat.end_ids for token in header):
        return 0
    places = (k for k in range(len(rendered)) if rendered[k : k + len(header)] == header)
    return next(places, 0)


def render_turns(conversation: Conversation, chat: TemplateRenderer, index: int = 0) -> list[Sample]:
    """One sample per assistant turn, with the context as rendered when that turn is generated.

    For multi-turn conversations with a template that rewrites earlier turns.
    """
    turns = [start for start, _ in find_trained_turns(conversation)]
    if not turns:
        raise ValueError(f"row {index} of the data set has no assistant message to learn")
    parts = [replace(conversation, messages=conversation.messages[: i + 1], first_trained=i) for i in turns]
    return [render_conversation(part, chat, index) for part in parts]


def is_empty_turn(message: Message) -> bool:
    """Whether an assistant message has no text other than white space, which templates may strip, and no tool call."""
    content = message.get("content")
    parts = [*(content if isinstance(content, list) else [content]), message.get("reasoning_content")]
    texts = (part.get("text", part) if isinstance(part, Mapping) else part for part in parts)
    has_text = any(text.strip() if isinstance(text, str) else text for text in texts)
    return message.get("role") == ASSISTANT and not (has_text or message.get("tool_calls"))


def find_trained_turns(conversation: Conversation, roles: Collection[str] = (ASSISTANT,)) -> Iterator[tuple[int, int]]:
    """Message range `[start, stop)` of each turn with loss; assistant messages with `weight` 0 have none."""
    messages, stop = conversation.messages, conversation.first_trained
    while stop < len(messages):
        start, role = stop, messages[stop].get("role")
        stop += 1
        while role != ASSISTANT and stop < len(messages) and messages[stop].get("role") == role:
            stop += 1
        is_learned = role != ASSISTANT or (start > 0 and messages[start].get("weight") != 0)
        is_learned = is_learned and not is_empty_turn(messages[start])
        if role in roles and is_learned:
            yield start, stop


def _find_dropped_part(
    conversation: Conversation, number: int, chat: TemplateRenderer, rendered: list[int], start: int
) -> str | None:
    """The reasoning, or the text beside calls, of a trained message that is not in its rendered text,
    `rendered[start:]`; None if all is."""
    history, message = conversation.messages[:number], conversation.messages[number]
    tools, options = conversation.tools, conversation.template_kwargs
    thoughts, calls = message.get("reasoning_content"), message.get("tool_calls")
    content = read_text(message.get("content"))
    before, end, answer = content.partition(END_OF_REASONING)
    if not end:
        before, answer = "", content
    variants: list[tuple[str, str, Message, str]] = []  # name, text, the message with another text, its other parts
    if isinstance(thoughts, str):
        change = {"reasoning_content": f"{thoughts}a"}
        variants.append(("reasoning in `reasoning_content`", thoughts, message | change, answer))
    if end:
        change = {"content": f"{before}a{end}{answer}"}
        variants.append(("reasoning in `content`", before.replace("<think>", ""), message | change, answer))
    if calls:
        change = {"content": f"{content}a"}
        variants.append(
            ("text beside tool calls in `content`", answer, message | change, f"{thoughts} {before} {calls}")
        )
    for name, text, changed, others in variants:
        written = text.strip()
        if not written or (written not in others and written in chat.decode(rendered[start:])):
            continue
        if chat.render([*history, changed], tools, False, **options) == rendered:
            return name
    return None


def _explain_unstable_prefix(
    index: int,
    number: int,
    message: Message,
    chat: TemplateRenderer,
    tokens: list[int],
    before: list[int],
    after: list[int],
) -> ValueError:
    """The error of a turn that does not extend the previous tokens; `message` is its first, at `number`."""
    extends_earlier_turns = before[: len(tokens)] == tokens
    prompt, written = chat.decode(before), chat.decode(after)
    if extends_earlier_turns and written.startswith(prompt):
        if written.removeprefix(prompt).lstrip().startswith(END_OF_REASONING):
            return ValueError(
                f"row {index} of the data set: the chat template writes an empty thought into message {number}, which "
                "merges with the end of its prompt, so the model could never generate it there: give the row "
                '`reasoning_content`, or `chat_template_kwargs` {"enable_thinking": false} if the template has it, or '
                "set tokenizer.chat_template to one without empty thoughts"
            )
        texts = read_text(message.get("content")), str(message.get("reasoning_content") or "")
        if any(text[:1].isspace() for text in texts):
            return UnlearnableTextError(
                f"message {number} begins with white space that merges with the token before it, so the model could "
                "never generate it there; strip the text"
            )
    what, cure = (
        ("the prompt of this turn is rendered differently once its answer follows", "")
        if extends_earlier_turns
        else ("what precedes this turn is rendered differently once more follows", ", or data.split_turns = true")
    )
    return ValueError(
        f"row {index} of the data set: the chat template is not prefix-stable at message {number}, because {what}; "
        f"set tokenizer.chat_template to one that is{cure}"
    )


def find_turn_end(span: list[int], chat: TemplateRenderer) -> int:
    """Length of the generated part of a turn: up to the first special token that the template appends to it.

    What follows is not generated, so it must not have loss: the line break after `<|im_end|>`, a second end token
    (Phi 3), the header of the next turn (Llama 3). In a turn with another end the generated part reaches to the last
    special token if only white space follows.
    """
    start = len(span) - len(chat.turn_end)
    if start >= 0 and span[start:] == list(chat.turn_end):
        ends = (start + k for k, token in enumerate(chat.turn_end, start=1) if token in chat.end_ids)
        if (end := next(ends, None)) is not None:
            return end
    last = max((k for k, token in enumerate(span) if token in chat.end_ids), default=-1)
    return last + 1 if last >= 0 and not chat.decode(span[last + 1 :]).strip() else len(span)


def tokenize_conversation(
    messages: Sequence[Message], tokenizer: Any, max_length: int = 2048
) -> tuple[list[int], list[tuple[int, int]]]:
    """Tokens of a conversation up to its last assistant turn, and the spans `[start, end)` without loss.

    `ValueError` without an assistant turn, and for more than `max_length` tokens (no truncation).
    """
    sample = _render_within(Conversation(list(messages)), tokenizer, max_length)
    edges = [i for i, (a, b) in enumerate(pairwise([1.0, *sample.loss_mask, 1.0])) if a != b]
    return sample.tokens, list(zip(edges[::2], edges[1::2], strict=True))


def _render_within(conversation: Conversation, tokenizer: Any, max_length: int) -> Sample:
    """The sample of a conversation; `ValueError` for more than `max_length` tokens."""
    sample = render_conversation(conversation, TemplateRenderer(tokenizer))
    if len(sample.tokens) > max_length:
        raise ValueError(f"the conversation has {len(sample.tokens)} tokens, max_length is {max_length}: raise it")
    return sample


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
    """A sample with loss on `response`; the prompt is text or a list of messages."""
    if not prompt or not response:
        raise ValueError(f"{'prompt' if not prompt else 'response'} is empty: there is nothing to learn")
    template = str(tokenizer.chat_template)
    history = _messages(prompt if isinstance(prompt, str) else list(prompt), "user", "prompt", 0, template)
    messages = [*history, {"role": ASSISTANT, "content": response}]
    sample = _render_within(Conversation(messages, len(history)), tokenizer, max_length)
    sample.prompt, sample.response, sample.index = prompt if isinstance(prompt, str) else history, response, None
    return sample


def _messages(value: Any, role: str, column: str, index: int, template: str = "") -> list[Message]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in value):
        raise ValueError(f"row {index} of the data set: `{column}` is neither text nor a list of messages with a role")
    messages = [name_reasoning(message, template) for message in value]
    with name_row(index):
        for i, message in enumerate(messages):
            if message.get("function_call") and "function_call" not in template:
                raise ValueError(f"{column}[{i}].function_call is the former form of a call: write it as tool_calls")
            check_message(message, f"{column}[{i}]", template)
            # In a row a null is a missing value, also in an assistant's message.
            if message.get("content") is None and not has_more_than_content(message):
                raise ValueError(f"{column}[{i}].content is missing: give the message a text")
            if message.get("weight") not in (None, 0, 1):
                raise ValueError(f"{column}[{i}].weight is {message['weight']!r}: it must be 0 (no loss) or 1")
    return messages


def name_reasoning(message: Message, template: str) -> Message:
    """A copy of a message whose reasoning is `reasoning_content`, unless the template reads its other name.

    Content with reasoning of its own stays as it is: templates would write both.
    """
    message = dict(message)
    for name in OTHER_REASONING:
        reasoning = message.get(name)
        has_own = bool(message.get("reasoning_content")) or END_OF_REASONING in str(message.get("content"))
        if reasoning and isinstance(reasoning, str) and not has_own and not re.search(rf"[.'\"]{name}\b", template):
            message["reasoning_content"] = message.pop(name)
    return message
