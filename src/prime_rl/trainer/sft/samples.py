"""Conversations tokenised once, side by side in flat arrays, with an account of what was left out."""

from __future__ import annotations

import os
import random
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import xxhash
from loguru import logger

from prime_rl.trainer.config import SFTDataConfig
from prime_rl.utils.progress import show_progress
from rollouts.training.datasets.chat import TemplateRenderer
from rollouts.training.datasets.rows import Row, iter_rows
from rollouts.training.datasets.sft import (
    as_messages,
    is_empty_turn,
    read_conversation,
    render_conversation,
    render_turns,
)
from rollouts.training.types import Sample, Status

ROWS_BETWEEN_NEWS = 100


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    chat_template: str | None
    eos_token_id: int | None
    all_special_ids: list[int]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: list[int]) -> str: ...


@dataclass
class TokenisedSamples:
    """Samples by index, those of a source next to each other; `sizes` counts each source's."""

    tokens: array[int] = field(default_factory=lambda: array("i"))
    mask: bytearray = field(default_factory=bytearray)
    ends: array[int] = field(default_factory=lambda: array("q", [0]))
    sizes: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def append(self, sample: Sample) -> None:
        """Add a sample to the last source."""
        self.tokens.extend(sample.tokens)
        self.mask.extend(map(bool, sample.loss_mask))
        self.ends.append(len(self.tokens))
        self.sizes[-1] += 1

    def sample(self, index: int) -> Sample:
        """The sample of this index; `IndexError` when there is none."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        start, end = self.ends[index], self.ends[index + 1]
        mask = [float(m) for m in self.mask[start:end]]
        tokens = self.tokens[start:end].tolist()
        return Sample(prompt="", tokens=tokens, loss_mask=mask, index=index, status=Status.COMPLETED)

    def digest(self) -> str:
        """Tells other data from these when a run is resumed."""
        digest = xxhash.xxh3_64()
        for part in (self.tokens, self.mask, self.ends, array("q", self.sizes)):
            digest.update(memoryview(part).cast("B"))
        return digest.hexdigest()

    def hold_out(self, num_samples: int, seed: int) -> tuple[TokenisedSamples, list[Sample]]:
        """The samples without `num_samples` of them, and those, drawn by `seed` from all sources alike."""
        if num_samples >= len(self):
            raise ValueError(
                f"val.num_samples {num_samples} would hold out all {len(self)} samples: lower it, or set val.name"
            )
        held_out = frozenset(random.Random(f"{seed}:val").sample(range(len(self)), num_samples))
        kept, index = TokenisedSamples(), 0
        for size in self.sizes:
            kept.sizes.append(0)
            for _ in range(size):
                if index not in held_out:
                    start, end = self.ends[index], self.ends[index + 1]
                    kept.tokens += self.tokens[start:end]
                    kept.mask += self.mask[start:end]
                    kept.ends.append(len(kept.tokens))
                    kept.sizes[-1] += 1
                index += 1
            if not kept.sizes[-1]:
                raise ValueError(f"val.num_samples {num_samples} leaves a subset without samples: lower it")
        return kept, [self.sample(i) for i in sorted(held_out)]


@dataclass
class Account:
    """What became of the rows of a data set."""

    rows: int = 0
    samples: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    overlong: list[int] = field(default_factory=list)
    truncated: int = 0
    longest: int = 0
    without_loss: list[int] = field(default_factory=list)
    empty_turns: int = 0

    def report(self, name: str, seq_len: int) -> None:
        """Say it in the log: one line, and one warning for each kind of row that is not learnt as it stands."""
        logger.info(
            f"Data set {name}: {self.rows:,} rows, {self.samples:,} samples of {self.tokens:,} tokens, "
            f"{self.loss_tokens:,} with loss"
        )
        if self.overlong:
            logger.warning(
                f"{len(self.overlong):,} samples are longer than data.seq_len = {seq_len} and left out (the longest "
                f"has {self.longest:,} tokens, the first is row {self.overlong[0]}): raise it, or set data.truncate"
            )
        if self.truncated:
            logger.warning(f"{self.truncated:,} samples were cut at data.seq_len = {seq_len}")
        if self.without_loss:
            logger.warning(
                f"{len(self.without_loss):,} rows hold nothing to learn and are left out (the first is row "
                f"{self.without_loss[0]})"
            )
        if self.empty_turns:
            logger.warning(f"{self.empty_turns:,} empty assistant turns carry no loss")


def tokenise_data(config: SFTDataConfig, tokenizer: Tokenizer, vocab_size: int) -> TokenisedSamples:
    """All samples of a data set and its subsets, in the order of their rows; `ValueError` names the row it fails at."""
    out = TokenisedSamples()
    for subset, split in config.parts:
        name = config.name if subset is None else f"{config.name} ({subset})"
        out.sizes.append(0)
        account = Account()
        rows = iter_rows(config.name, split, subset)
        with show_progress(f"tokenising {name}", hidden=os.environ.get("RANK", "0") != "0") as progress:
            for sample in tokenise_rows(rows, config, tokenizer, vocab_size, account):
                out.append(sample)
                if account.rows >= progress.done + ROWS_BETWEEN_NEWS:
                    progress.reach(account.rows, f"{account.tokens:,} tokens")
        account.report(name, config.seq_len)
        if not account.samples:
            fault = f"is longer than data.seq_len = {config.seq_len}: raise it" if account.overlong else "is empty"
            raise ValueError(f"data set {name} holds nothing to learn, every sample {fault}")
    return out


def tokenise_rows(
    rows: Iterable[Row], config: SFTDataConfig, tokenizer: Tokenizer, vocab_size: int, account: Account
) -> Iterator[Sample]:
    """The samples of rows that can be learnt; what cannot goes to the account."""
    chat = TemplateRenderer(tokenizer)
    for index, row in enumerate(rows):
        account.rows += 1
        samples = list(render_row(row, index, config, tokenizer, chat, account))
        if not samples:
            account.without_loss.append(index)
        for sample in samples:
            if max(sample.tokens) >= vocab_size:
                raise ValueError(
                    f"the tokenizer makes token {max(sample.tokens)} but the model knows {vocab_size}: "
                    "tokenizer.name and model.name do not belong together"
                )
            account.longest = max(account.longest, len(sample.tokens))
            if len(sample.tokens) > config.seq_len:
                if not config.truncate or not any(sample.loss_mask[: config.seq_len]):
                    account.overlong.append(index)
                    continue
                account.truncated += 1
                sample.tokens, sample.loss_mask = sample.tokens[: config.seq_len], sample.loss_mask[: config.seq_len]
            account.samples += 1
            account.tokens += len(sample.tokens)
            account.loss_tokens += int(sum(sample.loss_mask))
            yield sample


def render_row(
    row: Row, index: int, config: SFTDataConfig, tokenizer: Tokenizer, chat: TemplateRenderer, account: Account
) -> Iterator[Sample]:
    """The samples of a row, none when nothing in it carries loss; `ValueError` for a row of another shape."""
    row = as_messages(row)
    prompt, completion = row.get("prompt"), row.get("completion")
    if not tokenizer.chat_template and isinstance(prompt, str) and isinstance(completion, str):
        if completion:
            yield render_text(prompt, completion, index, tokenizer)
        return
    conversation = read_conversation(row, index)
    learnt = conversation.messages[conversation.first_trained :]
    account.empty_turns += sum(is_empty_turn(message) for message in learnt)
    roles = config.loss_mask.roles
    if not any(message["role"] in roles and not is_empty_turn(message) for message in learnt):
        return
    try:
        if config.split_turns:
            yield from render_turns(conversation, chat, index)
        else:
            yield render_conversation(conversation, chat, index, roles)
    except ValueError as error:
        where = "" if f"row {index} " in str(error) else f"row {index} of the data set: "
        raise ValueError(f"{where}{error}") from error


def render_text(prompt: str, completion: str, index: int, tokenizer: Tokenizer) -> Sample:
    """For a base model without a template: plain text that ends where the model should."""
    before = tokenizer.encode(prompt)
    after = tokenizer.encode(completion, add_special_tokens=False)
    after += [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    mask = [0.0] * len(before) + [1.0] * len(after)
    return Sample(prompt=prompt, tokens=before + after, loss_mask=mask, index=index, status=Status.COMPLETED)
