"""Tokenizes a dataset once into flat arrays and reports dropped rows."""

from __future__ import annotations

import os
import random
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from typing import Protocol

import xxhash
from loguru import logger

from prime_rl.telemetry.progress import show_progress
from prime_rl.trainer.sft.config import SFTDataConfig
from rollouts.training.datasets.chat import TemplateRenderer, encode_text
from rollouts.training.datasets.rows import Row, iter_rows
from rollouts.training.datasets.sft import (
    ASSISTANT,
    Conversation,
    as_messages,
    find_trained_turns,
    is_empty_turn,
    name_row,
    read_conversation,
    render_conversation,
    render_turns,
)
from rollouts.training.types import Sample, Status

PROGRESS_INTERVAL_ROWS = 100
CHECKED_ROWS = 5000
"""Rows whose format is checked before the model is loaded; all are checked when they are tokenized."""


class Tokenizer(Protocol):
    """The used part of the Hugging Face tokenizer interface."""

    chat_template: str | None
    bos_token_id: int | None
    eos_token_id: int | None
    all_special_ids: list[int]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: list[int]) -> str: ...

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]: ...


@dataclass
class TokenizedSamples:
    """Samples by index, grouped by source; `sizes` has the number of samples per source."""

    tokens: array[int] = field(default_factory=lambda: array("i"))
    mask: bytearray = field(default_factory=bytearray)
    ends: array[int] = field(default_factory=lambda: array("q", [0]))
    sizes: list[int] = field(default_factory=list)
    rows: array[int] = field(default_factory=lambda: array("q"))
    """Ascending numbers of the rows that the samples are from; several turns may be from one (`data.split_turns`)."""

    def __len__(self) -> int:
        return len(self.ends) - 1

    def append(self, sample: Sample, row: int) -> None:
        """Add a sample to the last source."""
        self.tokens.extend(sample.tokens)
        self.mask.extend(map(bool, sample.loss_mask))
        self.ends.append(len(self.tokens))
        self.rows.append(row)
        self.sizes[-1] += 1

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sample."""
        return max(map(self.length, range(len(self))))

    def length(self, index: int) -> int:
        """Number of tokens of the sample at this index."""
        return self.ends[index + 1] - self.ends[index]

    def sample(self, index: int) -> Sample:
        """The sample at this index; `IndexError` when out of range."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        start, end = self.ends[index], self.ends[index + 1]
        mask = [float(m) for m in self.mask[start:end]]
        tokens = self.tokens[start:end].tolist()
        return Sample(prompt="", tokens=tokens, loss_mask=mask, index=index, status=Status.COMPLETED)

    def digest(self) -> str:
        """Hash of the data, to detect changes on resume."""
        digest = xxhash.xxh3_64()
        for part in (self.tokens, self.mask, self.ends, array("q", self.sizes)):
            digest.update(memoryview(part).cast("B"))
        return digest.hexdigest()

    def hold_out(self, num_samples: int, seed: int) -> tuple[TokenizedSamples, list[Sample]]:
        """Hold out `num_samples` samples, drawn uniformly with `seed`; returns the remaining and the held-out ones.

        They are whole rows, and so may be a few more: the other turns of a conversation repeat those before them.
        """
        if num_samples >= len(self):
            raise ValueError(
                f"val.num_samples {num_samples} would hold out all {len(self)} samples: lower it, or set val.name"
            )
        held_out: set[int] = set()
        for drawn in random.Random(f"{seed}:val").sample(range(len(self)), num_samples):
            if len(held_out) < num_samples:
                row = self.rows[drawn]
                held_out.update(range(bisect_left(self.rows, row), bisect_right(self.rows, row)))
        remaining, index = TokenizedSamples(), 0
        for size in self.sizes:
            remaining.sizes.append(0)
            for _ in range(size):
                if index not in held_out:
                    start, end = self.ends[index], self.ends[index + 1]
                    remaining.tokens += self.tokens[start:end]
                    remaining.mask += self.mask[start:end]
                    remaining.ends.append(len(remaining.tokens))
                    remaining.rows.append(self.rows[index])
                    remaining.sizes[-1] += 1
                index += 1
            if not remaining.sizes[-1]:
                raise ValueError(f"val.num_samples {num_samples} leaves a subset without samples: lower it")
        return remaining, [self.sample(i) for i in sorted(held_out)]


@dataclass
class TokenizationStats:
    """Statistics of tokenizing a dataset."""

    rows: int = 0
    samples: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    overlong: list[int] = field(default_factory=list)
    prompt_only: list[int] = field(default_factory=list)
    truncated: int = 0
    longest: int = 0
    without_loss: list[int] = field(default_factory=list)
    empty_turns: int = 0
    opening_turns: int = 0

    def report(self, name: str, seq_len: int) -> None:
        """Log a summary, and a warning for each kind of dropped or changed row."""
        logger.info(
            f"Tokenized dataset {name}: {self.rows:,} rows, {self.samples:,} samples of {self.tokens:,} tokens, "
            f"{self.loss_tokens:,} with loss"
        )
        if self.overlong:
            logger.warning(
                f"{len(self.overlong):,} samples exceed data.seq_len = {seq_len} and were dropped (the longest "
                f"has {self.longest:,} tokens, the first is row {self.overlong[0]}): raise it, or set data.truncate"
            )
        if self.prompt_only:
            logger.warning(
                f"{len(self.prompt_only):,} samples have no loss tokens within data.seq_len = {seq_len} and were "
                f"dropped (the first is row {self.prompt_only[0]}): raise it"
            )
        if self.truncated:
            logger.warning(f"{self.truncated:,} samples were truncated to data.seq_len = {seq_len}")
        if self.without_loss:
            logger.warning(
                f"{len(self.without_loss):,} rows have no loss tokens and were dropped (the first is row "
                f"{self.without_loss[0]})"
            )
        if self.empty_turns:
            logger.warning(f"{self.empty_turns:,} empty assistant turns have no loss")
        if self.opening_turns:
            logger.warning(f"{self.opening_turns:,} assistant turns without a message before them have no loss")


def tokenize_data(
    config: SFTDataConfig, tokenizer: Tokenizer, vocab_size: int, date: datetime | None = None
) -> TokenizedSamples:
    """Tokenize a dataset and its subsets in row order; `ValueError` names the invalid row.

    `date` is the one that chat templates write, by default today's.
    """
    out = TokenizedSamples()
    chat = TemplateRenderer(tokenizer, date or datetime.now())
    num_rows = 0
    for subset, split in config.parts:
        name = config.name if subset is None else f"{config.name} ({subset})"
        out.sizes.append(0)
        stats = TokenizationStats()
        rows = iter_rows(config.name, split, subset)
        with show_progress(f"tokenizing {name}", hidden=os.environ.get("RANK", "0") != "0") as progress:
            for sample in tokenize_rows(rows, config, tokenizer, vocab_size, stats, chat):
                out.append(sample, num_rows + stats.rows)
                if stats.rows >= progress.done + PROGRESS_INTERVAL_ROWS:
                    progress.set_done(stats.rows, f"{stats.tokens:,} tokens")
        stats.report(name, config.seq_len)
        num_rows += stats.rows
        if not stats.samples:
            is_long = stats.overlong or stats.prompt_only
            fault = f"is longer than data.seq_len = {config.seq_len}: raise it" if is_long else "is empty"
            raise ValueError(f"dataset {name} has no loss tokens, every sample {fault}")
    return out


def tokenize_rows(
    rows: Iterable[Row],
    config: SFTDataConfig,
    tokenizer: Tokenizer,
    vocab_size: int,
    stats: TokenizationStats,
    chat: TemplateRenderer | None = None,
) -> Iterator[Sample]:
    """Yield the trainable samples of rows; update `stats`."""
    chat = chat or TemplateRenderer(tokenizer)
    for index, row in enumerate(rows):
        stats.rows += 1
        samples = list(render_row(row, index, config, tokenizer, chat, stats))
        if not samples:
            stats.without_loss.append(index)
        for sample in samples:
            if not sample.tokens:
                raise ValueError(
                    f"row {index} of the dataset renders to no tokens: check its text and the chat template"
                )
            if max(sample.tokens) >= vocab_size:
                raise ValueError(
                    f"the tokenizer produced token {max(sample.tokens)} but the vocabulary size is {vocab_size}: "
                    "tokenizer.name and model.name do not match"
                )
            stats.longest = max(stats.longest, len(sample.tokens))
            if len(sample.tokens) > config.seq_len:
                if not config.truncate or not any(sample.loss_mask[: config.seq_len]):
                    (stats.prompt_only if config.truncate else stats.overlong).append(index)
                    continue
                stats.truncated += 1
                sample.tokens, sample.loss_mask = sample.tokens[: config.seq_len], sample.loss_mask[: config.seq_len]
            stats.samples += 1
            stats.tokens += len(sample.tokens)
            stats.loss_tokens += int(sum(sample.loss_mask))
            yield sample


def render_row(
    row: Row,
    index: int,
    config: SFTDataConfig,
    tokenizer: Tokenizer,
    chat: TemplateRenderer,
    stats: TokenizationStats,
) -> Iterator[Sample]:
    """The samples of a row, none if it has no loss tokens; `ValueError` for an unsupported format."""
    conversation = read_row(row, index, tokenizer)
    if isinstance(conversation, PlainText):
        if conversation.completion:
            with name_row(index):
                yield render_text(conversation, index, tokenizer)
        return
    trained = conversation.messages[conversation.first_trained :]
    stats.empty_turns += sum(is_empty_turn(message) for message in trained)
    roles = config.loss_mask.roles
    stats.opening_turns += bool(trained) and not conversation.first_trained and trained[0]["role"] == ASSISTANT
    if not any(find_trained_turns(conversation, roles)):
        return
    with name_row(index):
        if config.split_turns:
            yield from render_turns(conversation, chat, index)
        else:
            yield render_conversation(conversation, chat, index, roles)


@dataclass(frozen=True)
class PlainText:
    """Text without roles; only the completion has loss."""

    prompt: str
    completion: str


def read_row(row: Row, index: int, tokenizer: Tokenizer) -> Conversation | PlainText:
    """The conversation of a row, or its plain text: `text`, or without a chat template `prompt` and `completion`.

    `ValueError` names the row and the column.
    """
    with name_row(index):
        row = as_messages(row, bool(tokenizer.chat_template))
    text, prompt, completion = row.get("text"), row.get("prompt"), row.get("completion")
    if isinstance(text, str) and prompt is None and row.get("messages") is None:
        return PlainText("", text)
    if not tokenizer.chat_template and isinstance(prompt, str) and isinstance(completion, str):
        return PlainText(prompt, completion)
    return read_conversation(row, index, str(tokenizer.chat_template))


def check_data(config: SFTDataConfig, tokenizer: Tokenizer) -> None:
    """Check the format of the first `CHECKED_ROWS` rows, in less than a second; `ValueError` names the row.

    The first row of each part is also rendered, so that a missing chat template is found.
    """
    chat = TemplateRenderer(tokenizer)
    for subset, split in config.parts:
        for index, row in enumerate(islice(iter_rows(config.name, split, subset), CHECKED_ROWS)):
            read_row(row, index, tokenizer)
            if index == 0:
                list(render_row(row, index, config, tokenizer, chat, TokenizationStats()))


def render_text(text: PlainText, index: int, tokenizer: Tokenizer) -> Sample:
    """Plain text sample with EOS, also if the text ends with it."""
    before = encode_beginning(text.prompt, tokenizer)
    after = encode_completion(text, before, tokenizer)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    after += end if after[-1:] != end else []
    mask = [0.0] * len(before) + [1.0] * len(after)
    return Sample(prompt=text.prompt, tokens=before + after, loss_mask=mask, index=index, status=Status.COMPLETED)


def encode_beginning(text: str, tokenizer: Tokenizer) -> list[int]:
    """The token ids of text that goes on: with one begin token, but without an end token that the tokenizer adds."""
    ids, end = encode_text(tokenizer, text, add_special_tokens=True), [tokenizer.eos_token_id]
    if ids[-1:] == end and encode_text(tokenizer, "a", add_special_tokens=True)[-1:] == end:  # not that of the text
        ids = ids[:-1]
    return ids[1:] if ids[:2] == [tokenizer.bos_token_id] * 2 else ids  # that of the text and the tokenizer's


def encode_completion(text: PlainText, before: list[int], tokenizer: Tokenizer) -> list[int]:
    """The token ids of the completion behind those of the prompt, `before`.

    Tokenizers such as Llama 2's put a space before every text, which must not appear inside of this one.
    """
    whole = encode_beginning(text.prompt + text.completion, tokenizer)
    if whole[: len(before)] == before:
        return whole[len(before) :]
    alone, line_break = encode_text(tokenizer, text.completion), encode_text(tokenizer, "\n")
    adds_space = encode_text(tokenizer, "a") != encode_text(tokenizer, "\na")[len(line_break) :]
    joined = encode_text(tokenizer, f"\n{text.completion}")
    is_joined = adds_space and text.prompt and joined[: len(line_break)] == line_break
    return joined[len(line_break) :] if is_joined else alone
