"""Sections of the SFT trainer: model, tokenizer, data, validation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from prime_rl.trainer.model_config import AttentionChoice, ModelConfig
from prime_rl.utils.pydantic_config import BaseConfig


class SFTModelConfig(ModelConfig):
    """The fine-tuned model."""

    attn: AttentionChoice = "auto"
    """exact: batch-invariant, bit for bit; auto: sdpa or flash."""


class TokenizerConfig(BaseConfig):
    """Tokenizer and chat template."""

    name: str | None = None
    """Model or directory of the tokenizer; unset: model.name."""

    chat_template: str | None = None
    """Chat template that replaces the tokenizer's: template text, which contains {, or a file path."""


class LossMaskConfig(BaseConfig):
    """Roles that are trained on."""

    system: bool = False
    """System messages."""

    user: bool = False
    """User messages."""

    assistant: bool = True
    """Assistant messages, including their end-of-turn token."""

    tool: bool = False
    """Tool results."""

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that are trained on."""
        return tuple(role for role in ("system", "user", "assistant", "tool") if getattr(self, role))


class SFTDataConfig(BaseConfig):
    """Training conversations."""

    type: Literal["sft"] = "sft"
    """A dataset of conversations."""

    name: str = "PrimeIntellect/Reverse-Text-SFT"
    """Data file (.jsonl, .json, .csv, .parquet, .txt), directory of such files, save_to_disk folder, or hub dataset."""

    split: str = "train"
    """Dataset split; in a directory, the files T.* and T-* of split T."""

    subsets: list[str] | None = None
    """Subsets to mix: hub configurations, or files or directories in a directory."""

    splits: list[str] | None = None
    """Split of each subset, or the splits to mix; unset: split."""

    probabilities: list[float] | None = None
    """Sampling probability of each subset (sum 1); unset: round robin."""

    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = "all_exhausted"
    """Whether an epoch over several subsets ends when the first or the last one is exhausted."""

    seq_len: int = Field(default=128, ge=2)
    """Tokens per row; longer conversations are dropped and reported."""

    truncate: bool = False
    """Truncate longer conversations to seq_len instead of dropping them."""

    batch_size: int = Field(default=128, ge=1)
    """Rows per step, over all ranks."""

    pack_function: Literal["cat", "stack"] = "cat"
    """cat: pack whole conversations into each row; stack: one conversation per row."""

    shuffle: bool = True
    """Shuffle each epoch with a seed derived from `seed`."""

    loss_mask: LossMaskConfig = LossMaskConfig()

    split_turns: bool = False
    """Make one sample per assistant turn; for chat templates that rewrite earlier turns."""

    @model_validator(mode="after")
    def _check_mixture(self) -> SFTDataConfig:
        parts = self.parts
        if self.subsets and self.splits and len(self.subsets) != len(self.splits):
            raise ValueError(f"data.splits has {len(self.splits)} entries for {len(self.subsets)} data.subsets")
        if self.probabilities is not None:
            if len(self.probabilities) != len(parts):
                raise ValueError(f"data.probabilities has {len(self.probabilities)} entries for {len(parts)} subsets")
            if min(self.probabilities) <= 0 or abs(sum(self.probabilities) - 1) > 1e-3:
                raise ValueError(f"data.probabilities {self.probabilities} must be above 0 and add up to 1")
        if not self.loss_mask.roles:
            raise ValueError("data.loss_mask disables all roles: enable at least one")
        if self.split_turns and self.loss_mask.roles != ("assistant",):
            raise ValueError("data.split_turns needs a data.loss_mask with assistant only")
        return self

    @property
    def parts(self) -> list[tuple[str | None, str]]:
        """Subset and split of every source."""
        if self.subsets:
            return list(zip(self.subsets, self.splits or [self.split] * len(self.subsets), strict=False))
        return [(None, split) for split in self.splits or [self.split]]


class SFTValConfig(BaseConfig):
    """Validation loss on held-out conversations; enabled by the presence of the section."""

    name: str | None = None
    """Validation dataset; unset: hold out samples of the training data."""

    subset: str | None = None
    """Subset of the validation dataset; unset: that of the training data, if it has one subset of the same dataset."""

    split: str = "train"
    """Split of the validation dataset."""

    num_samples: int = Field(default=64, ge=1)
    """Number of held-out samples, or maximum number from the validation dataset."""

    interval: int = Field(default=50, ge=1)
    """Steps between evaluations; the last step is always evaluated."""

    eval_on_start: bool = True
    """Also evaluate before the first step."""

    @model_validator(mode="after")
    def _parts_need_name(self) -> SFTValConfig:
        for key in ("subset", "split"):
            if self.name is None and key in self.changed_keys():
                raise ValueError(f"val.{key} is one of a validation dataset: set val.name, too (it may be data.name)")
        return self


class FakeSFTDataConfig(BaseConfig):
    """Random tokens."""

    type: Literal["fake"] = "fake"
    """Random tokens."""

    length: Literal["fixed", "variable"] = "fixed"
    """Whether sequences fill the row or have random lengths."""

    seq_len: int = Field(default=128, ge=2)
    """Tokens per row."""

    batch_size: int = Field(default=128, ge=1)
    """Rows per step, over all ranks."""
