"""Configuration of `synthesize`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from prime_rl.utils.config import AskConfig
from prime_rl.utils.pydantic_config import BaseConfig


class KeepConfig(BaseConfig):
    """Which rollouts become rows of the data set."""

    min_reward: float | None = None
    """Keep rollouts that earned at least this; unset: all."""

    max_reward: float | None = None
    """Keep rollouts that earned at most this, for examples that are not too easy; unset: all."""

    truncated: bool = False
    """Keep rollouts that were cut off before they ended."""

    dedupe: Literal["off", "exact", "loose"] = "exact"
    """Keep one of equal conversations of an environment; loose: also equal but for case, spacing and punctuation."""

    max_per_example: int | None = Field(default=None, ge=1)
    """Most rows of one example, those with the highest rewards; unset: all."""


class SynthesizeConfig(AskConfig):
    """Which model makes data, in which environments, and which of it is kept."""

    split: Literal["train", "eval"] = "train"
    """Examples of the environments; held-out ones should stay so."""

    keep: KeepConfig = KeepConfig()
