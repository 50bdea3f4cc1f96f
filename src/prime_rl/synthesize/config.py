"""Configuration of `synthesize`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from prime_rl.configuration.sections import GenerationConfig
from prime_rl.utils.pydantic_config import BaseConfig


class SynthesisFilterConfig(BaseConfig):
    """Filter of the rollouts that become rows of the data set."""

    min_reward: float | None = None
    """Keep rollouts with at least this reward; unset: all."""

    max_reward: float | None = None
    """Keep rollouts with at most this reward, to exclude easy examples; unset: all."""

    truncated: bool = False
    """Keep truncated rollouts; an answer that the token limit cut off has no loss."""

    dedupe: Literal["off", "exact", "loose"] = "exact"
    """Deduplicate the conversations of an environment; loose: ignoring case, spacing and punctuation."""

    max_per_example: int | None = Field(default=None, ge=1)
    """Maximum rows per example, those with the highest rewards; unset: all."""


class SynthesizeConfig(GenerationConfig):
    """Configuration of `synthesize`: model, environments, filter."""

    main_keys: ClassVar[Sequence[str]] = (*GenerationConfig.main_keys, "split", "keep.min_reward", "keep.dedupe")

    split: Literal["train", "eval"] = "train"
    """Split of the examples; keep held-out examples out of training data."""

    keep: SynthesisFilterConfig = SynthesisFilterConfig()
