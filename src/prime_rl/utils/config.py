"""Sections that several processes share: where to log, whom to ask, which environment, how to sample."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from prime_rl.utils.pydantic_config import BaseConfig


class LogConfig(BaseConfig):
    """What is said on the terminal and in the log files."""

    level: str | None = None
    """Least severe level shown, such as debug, info or warning; unset: LOGGING_LEVEL, else info."""

    file: bool = True
    """Also write the lines to <output_dir>/logs/<process>.log."""


class WandbConfig(BaseConfig):
    """Send metrics to Weights & Biases; the section switches it on."""

    enabled: bool = True
    """Off keeps the section without sending anything."""

    project: str = "prime-rl"
    """Project the run is filed under."""

    name: str | None = None
    """Name of the run."""

    entity: str | None = None
    """Team or user that owns the project."""

    offline: bool = False
    """Write the run to disk only."""

    group: str | None = None
    """Runs of one group are shown together."""

    tags: list[str] = []
    """Free words to find the run by."""


class ClientConfig(BaseConfig):
    """How to reach OpenAI-compatible inference servers."""

    timeout: float = Field(default=1200.0, gt=0)
    """Seconds one request may take."""

    base_url: list[str] = Field(default=["http://localhost:8000/v1"], min_length=1)
    """Addresses of the servers, /v1 included; several share the load."""

    api_key_var: str = "OPENAI_API_KEY"
    """Environment variable that holds the key."""

    headers: dict[str, str] = {}
    """Extra HTTP headers of every request."""


class EnvConfig(BaseConfig):
    """One verifiers environment."""

    id: str = "reverse-text"
    """Name of the environment package."""

    args: dict[str, Any] = {}
    """Keyword arguments of its load_environment."""

    name: str | None = None
    """Name in metrics; unset: the id."""


class DebugModelConfig(BaseConfig):
    """A small or untrained model for trying things out."""

    random_init: bool = False
    """Start from random weights, the same in every process, instead of reading the weight files."""

    num_layers: int | None = Field(default=None, ge=1)
    """Keep only the first layers of the model."""

    seed: int = Field(default=0, ge=0)
    """Seed of the random weights."""


class SamplingConfig(BaseConfig):
    """How completions are drawn."""

    temperature: float = Field(default=1.0, ge=0)
    """Divides the logits; 0 takes the most likely token."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of one completion; unset: as many as the model's length allows."""

    min_tokens: int = Field(default=0, ge=0)
    """Tokens that are drawn before an end token is allowed."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    """Draw from the smallest set of tokens that holds this much probability."""

    top_k: int = Field(default=-1, ge=-1)
    """Draw from this many most likely tokens; -1: all."""

    min_p: float = Field(default=0.0, ge=0, le=1)
    """Drop tokens less likely than this share of the most likely one."""

    repetition_penalty: float = Field(default=1.0, gt=0)
    """Above 1 makes tokens that were already used less likely."""

    seed: int | None = None
    """Seed of the draws; unset: derived from the run's seed."""

    stop: list[str] = []
    """Strings that end a completion."""

    extra_body: dict[str, Any] = {}
    """Further fields of the request, passed on unchanged."""
