"""Batches of whole conversations in a seeded order, from any position of it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from prime_rl.trainer.config import FakeSFTDataConfig, SFTConfig, SFTDataConfig
from prime_rl.utils.tokenizer import load_tokenizer
from rollouts.training.datasets.chat import TemplateRenderer
from rollouts.training.datasets.sft import Row, load_rows, read_conversation, render_conversation
from rollouts.training.types import Sample, Status

FAKE_ROWS = 1024
MAX_CACHED = 100_000
"""Rendered samples that are kept for the next epoch."""


class SampleSource(Protocol):
    """Samples by index."""

    def __len__(self) -> int: ...

    def sample(self, index: int) -> Sample:
        """The sample of this index, always the same."""


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    chat_template: str | None
    eos_token_id: int | None
    all_special_ids: list[int]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: list[int]) -> str: ...


@dataclass(frozen=True)
class Position:
    """How far the data have been read: whole epochs, samples of the current one, and how many were too long."""

    epoch: int = 0
    offset: int = 0
    num_overlong: int = 0

    def state(self) -> dict[str, int]:
        """As JSON for a checkpoint."""
        return asdict(self)


@dataclass
class SFTBatches:
    """Fills `batch_size` rows of `seq_len` tokens with whole samples, in the order of each epoch."""

    source: SampleSource
    seq_len: int
    batch_size: int
    shuffle: bool
    seed: int
    _order: tuple[int, list[int]] = (-1, [])

    def take(self, position: Position) -> tuple[list[Sample], Position]:
        """The batch that begins at `position`, and where the next one begins.

        A sample that does not fit into the current row opens the next; one that is longer than a row is left out and
        counted. `ValueError` when every sample is too long.
        """
        samples: list[Sample] = []
        epoch, offset, num_overlong = position.epoch, position.offset, position.num_overlong
        row, room, overlong_in_a_row = 1, self.seq_len, 0
        while True:
            if offset == len(self.source):
                epoch, offset = epoch + 1, 0
            sample = self.source.sample(self.order(epoch)[offset])
            n = len(sample.tokens)
            if n > self.seq_len:
                num_overlong, overlong_in_a_row = num_overlong + 1, overlong_in_a_row + 1
                if overlong_in_a_row >= len(self.source):
                    raise ValueError(f"every sample is longer than data.seq_len = {self.seq_len}: raise it")
                offset += 1
                continue
            overlong_in_a_row = 0
            if n > room:
                row, room = row + 1, self.seq_len
                if row > self.batch_size:
                    return samples, Position(epoch, offset, num_overlong)
            samples.append(sample)
            room -= n
            offset += 1

    def order(self, epoch: int) -> list[int]:
        """The indices of an epoch, a pure function of (seed, epoch)."""
        if not self.shuffle:
            epoch = 0
        if self._order[0] != epoch:
            indices = list(range(len(self.source)))
            if self.shuffle:
                random.Random(f"{self.seed}:{epoch}").shuffle(indices)
            self._order = (epoch, indices)
        return self._order[1]


@dataclass(frozen=True)
class FakeSource:
    """Random tokens, each sample a pure function of (seed, index)."""

    config: FakeSFTDataConfig
    vocab_size: int
    seed: int

    def __len__(self) -> int:
        return FAKE_ROWS

    def sample(self, index: int) -> Sample:
        """Random tokens, all but the first with loss."""
        rng = random.Random(f"{self.seed}:{index}")
        n = self.config.seq_len if self.config.length == "fixed" else rng.randint(2, self.config.seq_len)
        tokens = [rng.randrange(self.vocab_size) for _ in range(n)]
        return Sample(prompt="", tokens=tokens, loss_mask=[0.0] + [1.0] * (n - 1), index=index, status=Status.COMPLETED)


@dataclass
class ConversationSource:
    """Rows of a data set, rendered when they are first needed."""

    rows: Sequence[Row]
    tokenizer: Tokenizer
    vocab_size: int
    _cache: dict[int, Sample] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.chat = TemplateRenderer(self.tokenizer)

    def __len__(self) -> int:
        return len(self.rows)

    def sample(self, index: int) -> Sample:
        """The row of this index as tokens and mask; `ValueError` when it cannot be rendered for this model."""
        if index in self._cache:
            return self._cache[index]
        sample = self._render(self.rows[index], index)
        if max(sample.tokens) >= self.vocab_size:
            raise ValueError(
                f"the tokenizer makes token {max(sample.tokens)} but the model knows {self.vocab_size}: "
                "tokenizer.name and model.name do not belong together"
            )
        if len(self._cache) < MAX_CACHED:
            self._cache[index] = sample
        return sample

    def _render(self, row: Row, index: int) -> Sample:
        prompt, completion = row.get("prompt"), row.get("completion")
        if self.tokenizer.chat_template or not isinstance(prompt, str) or not isinstance(completion, str):
            return render_conversation(read_conversation(row, index), self.chat, index)
        # A base model without a template: plain text that ends where the model should.
        before = self.tokenizer.encode(prompt)
        after = self.tokenizer.encode(completion, add_special_tokens=False)
        after += [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        if not after:
            raise ValueError(f"row {index} of the data set has an empty completion")
        mask = [0.0] * len(before) + [1.0] * len(after)
        return Sample(prompt=prompt, tokens=before + after, loss_mask=mask, index=index, status=Status.COMPLETED)


def build_sft_batches(config: SFTConfig, vocab_size: int, tokenizer: Tokenizer | None) -> SFTBatches:
    """The batches of a config; `tokenizer` is needed for real data only."""
    data = config.data
    if isinstance(data, FakeSFTDataConfig):
        return SFTBatches(FakeSource(data, vocab_size, config.seed), data.seq_len, data.batch_size, False, config.seed)
    assert tokenizer is not None
    source = ConversationSource(load_rows(data.name, data.split), tokenizer, vocab_size)
    return SFTBatches(source, data.seq_len, data.batch_size, data.shuffle, config.seed)


def build_tokenizer(config: SFTConfig) -> Tokenizer | None:
    """The tokenizer of a run on real data."""
    if not isinstance(config.data, SFTDataConfig):
        return None
    tokenizer: Tokenizer = load_tokenizer(config.tokenizer.name or config.model.name, config.tokenizer.chat_template)
    return tokenizer


def restore_position(progress: Mapping[str, Any]) -> Position:
    """Where a run that saved `progress` goes on reading."""
    return Position(**progress["position"]) if "position" in progress else Position()
