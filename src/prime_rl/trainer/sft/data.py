"""SFT batches: packs whole conversations in a seeded order; resumable at any position."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import xxhash
from loguru import logger

from prime_rl.runtime.tokenizer import load_tokenizer
from prime_rl.trainer.config import SFTConfig
from prime_rl.trainer.sft.config import FakeSFTDataConfig, SFTDataConfig, SFTValConfig
from prime_rl.trainer.sft.samples import TokenizedSamples, Tokenizer, check_data, tokenize_data
from rollouts.training.datasets.chat import TemplateRenderer
from rollouts.training.datasets.mixing import EpochOrder, StoppingStrategy, build_epoch_order
from rollouts.training.types import Sample, Status

if TYPE_CHECKING:
    from rollouts.training.backends.ranks import Ranks

FAKE_ROWS = 1024


class SampleSource(Protocol):
    """Samples by index, grouped by source."""

    @property
    def sizes(self) -> Sequence[int]:
        """Number of samples per source."""

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sample."""

    def __len__(self) -> int: ...

    def length(self, index: int) -> int:
        """Number of tokens of the sample at this index."""

    def sample(self, index: int) -> Sample:
        """The sample at this index; deterministic."""


@dataclass(frozen=True)
class Position:
    """Data position: completed epochs, offset in the current one, and the number of overlong samples.

    `samples` and `tokens` count the consumed data of each source. `digest` identifies the dataset and its order.
    `start` is the epoch and the offset at which the training stage began.
    """

    epoch: int = 0
    offset: int = 0
    num_overlong: int = 0
    samples: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    digest: str = ""
    start: tuple[int, int] = (0, 0)

    def state(self) -> dict[str, Any]:
        """JSON state for a checkpoint."""
        state: dict[str, Any] = msgspec.to_builtins(self)
        return state


@dataclass
class SFTBatches:
    """Batches of `batch_size` rows: packed samples of up to `seq_len` tokens, or with `stack` one sample per row."""

    source: SampleSource
    seq_len: int
    batch_size: int
    shuffle: bool
    seed: int
    stack: bool = False
    probabilities: Sequence[float] | None = None
    stopping: StoppingStrategy = "all_exhausted"
    names: Sequence[str] = ()
    held_out: list[Sample] = field(default_factory=list)
    _order: tuple[int, EpochOrder] | None = None

    def take(self, position: Position) -> tuple[list[Sample], Position]:
        """The batch at `position`, and the position of the next batch.

        A sample that does not fit into the current row starts the next; samples longer than a row are dropped and
        counted. `ValueError` when every sample is too long.
        """
        sizes = self.source.sizes
        ends = [sum(sizes[: s + 1]) for s in range(len(sizes))]
        num_samples = list(position.samples or [0] * len(sizes))
        num_tokens = list(position.tokens or [0] * len(sizes))
        samples: list[Sample] = []
        epoch, offset, num_overlong = position.epoch, position.offset, position.num_overlong
        row, free_tokens, overlong_in_a_row = 1, self.seq_len, 0
        while True:
            index = self.order(epoch).at(offset)
            if index is None:
                epoch, offset = epoch + 1, 0
                continue
            sample = self.source.sample(index)
            n = len(sample.tokens)
            if n > self.seq_len:
                num_overlong, overlong_in_a_row = num_overlong + 1, overlong_in_a_row + 1
                if overlong_in_a_row >= len(self.source):
                    raise ValueError(f"every sample is longer than data.seq_len = {self.seq_len}: raise it")
                offset += 1
                continue
            overlong_in_a_row = 0
            if n > free_tokens or (self.stack and samples):
                row, free_tokens = row + 1, self.seq_len
                if row > self.batch_size:
                    counts = tuple(num_samples), tuple(num_tokens)
                    return samples, Position(epoch, offset, num_overlong, *counts, position.digest, position.start)
            source = next(s for s, end in enumerate(ends) if index < end)
            num_samples[source] += 1
            num_tokens[source] += n
            samples.append(sample)
            free_tokens -= n
            offset += 1

    def count_steps(self, num_epochs: int, position: Position | None = None) -> int:
        """Number of batches from `position` until `num_epochs` after its `start`; the last one may reach further.

        No sample may be longer than `seq_len`.
        """
        position = position or Position()
        epoch, offset = position.epoch, position.offset
        end = position.start[0] + num_epochs, position.start[1]
        num_rows, free_tokens = 0, 0
        while (epoch, offset) < end:
            index = self.order(epoch).at(offset)
            if index is None:
                epoch, offset = epoch + 1, 0
                continue
            offset += 1
            n = self.source.length(index)
            if n > free_tokens or self.stack:
                num_rows, free_tokens = num_rows + 1, self.seq_len
            free_tokens -= n
        return math.ceil(num_rows / self.batch_size)

    def order(self, epoch: int) -> EpochOrder:
        """Sample order of an epoch, a pure function of (seed, epoch)."""
        if self._order is None or self._order[0] != epoch:
            order = build_epoch_order(
                self.source.sizes,
                epoch=epoch,
                seed=self.seed,
                shuffle=self.shuffle,
                probabilities=self.probabilities,
                stopping=self.stopping,
            )
            self._order = (epoch, order)
        return self._order[1]

    def metrics(self, position: Position) -> dict[str, float]:
        """Progress metrics, and the share of each source if there are several."""
        out: dict[str, float] = {
            "progress/epoch": position.epoch,
            "progress/num_samples": sum(position.samples),
            "progress/num_tokens": sum(position.tokens),
            "progress/overlong_samples": position.num_overlong,
        }
        if len(self.names) > 1:
            for kind, counts in (("samples", position.samples), ("tokens", position.tokens)):
                for name, count in zip(self.names, counts, strict=True):
                    out[f"progress/{name}/ratio_{kind}"] = count / max(1, sum(counts))
        return out

    def restore(self, progress: Mapping[str, Any]) -> Position:
        """Restore the data position from `progress`; `ValueError` when the data or their order differ."""
        data = self.source.digest() if isinstance(self.source, TokenizedSamples) else ""
        digest = f"{data}-{self._digest_order()}" if data else ""
        if "position" not in progress:
            return Position(digest=digest)
        position = msgspec.convert(progress["position"], Position)
        if position.digest not in (digest, data):  # earlier versions had no digest of the order
            if position.digest.partition("-")[0] == data:
                raise ValueError(
                    "the checkpoint was trained on these data in another order: resume with the original seed, "
                    "data.shuffle, data.probabilities and data.stopping_strategy, or begin the data again with "
                    "ckpt.skip_dataloader"
                )
            raise ValueError(
                "the checkpoint was trained on other data, with another template or data.seq_len, or with other "
                "samples held out by [val]: resume with the original settings (validation on data of its own, "
                "val.name, may be added), begin these data with ckpt.skip_dataloader, or start a new run from its "
                "weights with --model.name"
            )
        return replace(position, digest=digest)

    def _digest_order(self) -> str:
        """Hash of what `order` depends on beside the data; the seed counts only where it has an effect."""
        is_mixed = len(self.source.sizes) > 1
        probabilities = list(self.probabilities) if is_mixed and self.probabilities is not None else None
        seed = self.seed if self.shuffle or probabilities else None
        order = seed, self.shuffle, probabilities, self.stopping if is_mixed else None
        return xxhash.xxh3_64(repr(order).encode()).hexdigest()


@dataclass(frozen=True)
class FakeSource:
    """Random tokens, each sample a pure function of (seed, index)."""

    config: FakeSFTDataConfig
    vocab_size: int
    seed: int

    @property
    def sizes(self) -> list[int]:
        """A single source."""
        return [FAKE_ROWS]

    def __len__(self) -> int:
        return FAKE_ROWS

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sample."""
        return self.config.seq_len

    def length(self, index: int) -> int:
        """Number of tokens of the sample at this index."""
        return len(self.sample(index).tokens)

    def sample(self, index: int) -> Sample:
        """Random tokens, all but the first with loss."""
        rng = random.Random(f"{self.seed}:{index}")
        n = self.config.seq_len if self.config.length == "fixed" else rng.randint(2, self.config.seq_len)
        tokens = rng.choices(range(self.vocab_size), k=n)
        return Sample(prompt="", tokens=tokens, loss_mask=[0.0] + [1.0] * (n - 1), index=index, status=Status.COMPLETED)


def choose_date(progress: Mapping[str, Any], ranks: Ranks) -> datetime:
    """The date that chat templates write, the same on all ranks: that of the first start, also in a resumed run."""
    now = ranks.broadcast(datetime.now().isoformat().encode()).decode()
    return datetime.fromisoformat(progress.get("date", now))


def build_sft_batches(
    config: SFTConfig, vocab_size: int, tokenizer: Tokenizer | None, date: datetime | None = None
) -> SFTBatches:
    """Build the batches of a config with their held-out samples; `tokenizer` is needed for real data only.

    `date`: as for `tokenize_data`.
    """
    data = config.data
    if isinstance(data, FakeSFTDataConfig):
        return SFTBatches(FakeSource(data, vocab_size, config.seed), data.seq_len, data.batch_size, False, config.seed)
    assert tokenizer is not None
    samples = tokenize_data(data, tokenizer, vocab_size, date)
    held_out: list[Sample] = []
    if config.val is not None and config.val.name is None:
        samples, held_out = samples.hold_out(config.val.num_samples, config.seed)
    elif config.val is not None:
        val_data = _select_val_data(data, config.val)
        val_samples = tokenize_data(val_data, tokenizer, vocab_size, date)
        held_out = [val_samples.sample(i) for i in range(min(len(val_samples), config.val.num_samples))]
    stack = data.pack_function == "stack"
    per_row = 1.0 if stack else max(1.0, data.seq_len * len(samples) / samples.ends[-1])
    per_step = data.batch_size * per_row
    logger.info(
        f"A step takes {data.batch_size} rows, {'' if stack else 'about '}{per_step:,.0f} samples, of {len(samples):,} "
        f"(data.pack_function {data.pack_function})"
    )
    if per_step > len(samples):
        cure = "lower data.batch_size" + ("" if stack else ', or data.pack_function = "stack" for one sample per row')
        logger.warning(f"A step trains on every sample {per_step / len(samples):.1f} times: {cure}")
    return SFTBatches(
        samples,
        data.seq_len,
        data.batch_size,
        data.shuffle,
        config.seed,
        stack=stack,
        probabilities=data.probabilities,
        stopping=data.stopping_strategy,
        names=name_parts(data.parts),
        held_out=held_out,
    )


def name_parts(parts: Sequence[tuple[str | None, str]]) -> list[str]:
    """Metric name of each source: subset or split, or both if ambiguous."""
    names = [subset or split for subset, split in parts]
    if len(set(names)) == len(names):
        return names
    return [split if subset is None else f"{subset}-{split}" for subset, split in parts]


def _select_val_data(data: SFTDataConfig, val: SFTValConfig) -> SFTDataConfig:
    """The validation data set, read as the training data; `ValueError` if it is a part of these."""
    subsets = None if val.subset is None else [val.subset]
    if subsets is None and val.name == data.name and data.subsets is not None and len(data.subsets) == 1:
        subsets = data.subsets
    one_part = {"subsets": subsets, "splits": None, "probabilities": None}
    selected = data.model_copy(update={"name": val.name, "split": val.split} | one_part)
    if val.name == data.name and selected.parts[0] in data.parts:
        raise ValueError("[val] selects training data: set val.split or val.subset, or hold out rows without val.name")
    return selected


def check_first_rows(config: SFTConfig) -> None:
    """Check the format of training and validation rows before the model is loaded; `ValueError` names the row."""
    tokenizer = build_tokenizer(config)
    if tokenizer is None or not isinstance(config.data, SFTDataConfig):
        return
    check_data(config.data, tokenizer)
    if config.val is not None and config.val.name is not None:
        check_data(_select_val_data(config.data, config.val), tokenizer)


def check_positions(batches: SFTBatches, max_positions: int | None) -> None:
    """`ValueError` for samples longer than the positions of the model; see `CausalLM.max_positions`."""
    if max_positions is None:
        return
    longest = max([batches.source.longest, *(len(sample.tokens) for sample in batches.held_out)])
    if longest > max_positions:
        raise ValueError(
            f"the longest sample has {longest:,} tokens, but this model has {max_positions:,} positions: lower "
            f"data.seq_len to {max_positions}"
        )


def build_tokenizer(config: SFTConfig) -> Tokenizer | None:
    """Load the tokenizer of a run on real data."""
    if not isinstance(config.data, SFTDataConfig):
        return None
    name = config.tokenizer.name or config.model.name
    tokenizer: Tokenizer = load_tokenizer(name, config.tokenizer.chat_template)
    if tokenizer.eos_token_id is None:
        logger.warning(f"Texts are trained without an end token: set eos_token in the tokenizer_config.json of {name}")
    if tokenizer.chat_template and not find_answer_ends(tokenizer):
        logger.warning(
            f"Answers are trained without an end token: the chat template of {name} has none, "
            "set tokenizer.chat_template to one that has"
        )
    return tokenizer


def find_eos_ids(tokenizer: Tokenizer, model_dir: Path, tokenizer_name: str | None = None) -> list[int]:
    """End tokens of the model and those that end trained turns or texts; empty if they are the model's alone.

    A base model names the end of a document only, so that its chats would never end. Ids of the model that are other
    tokens in `tokenizer`, loaded by another name (`tokenizer_name`), are left out.
    """
    from prime_rl.trainer.models.registry import load_eos_ids

    own_ids = eos_ids = load_eos_ids(model_dir)
    if tokenizer_name is not None and (model_dir / "tokenizer.json").is_file():
        names = load_tokenizer(str(model_dir)).convert_ids_to_tokens(own_ids)
        eos_ids = [
            token
            for token, name, other in zip(own_ids, names, tokenizer.convert_ids_to_tokens(own_ids), strict=True)
            if name == other
        ]
    ends = find_answer_ends(tokenizer) if tokenizer.chat_template else []
    if not ends and tokenizer.eos_token_id is not None:
        ends = [tokenizer.eos_token_id]
    for end in ends:
        if end not in eos_ids:
            logger.info(
                f"The published weights have {tokenizer.decode([end])!r} as an end token, because it is trained"
            )
            eos_ids = [*eos_ids, end]
    return [] if eos_ids == own_ids else eos_ids


def find_answer_ends(tokenizer: Tokenizer) -> list[int]:
    """The tokens that end answers under the tokenizer's chat template; empty if it has none."""
    chat = TemplateRenderer(tokenizer)
    appended = next((token for token in chat.turn_end if token in chat.end_ids), None)
    return list(dict.fromkeys(chat.next_turn.values())) if appended is None else [appended]
