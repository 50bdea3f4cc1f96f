"""Sections that several processes share: where to log, whom to ask, which environment, how to sample."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from prime_rl.utils.pydantic_config import BaseConfig

BASE_MODEL = "base"
"""Name under which the embedded engine answers with its own weights, whatever adapter the policy has become."""


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

    max_connections: int = Field(default=8192, ge=1)
    """Requests to one server at the same time, from each process; further ones wait."""


class TransportConfig(BaseConfig):
    """The wire that carries batches from the orchestrator to the trainer."""

    type: Literal["filesystem", "zmq"] = "filesystem"
    """filesystem: both see output_dir; zmq: a socket, for a trainer that does not."""

    host: str = "localhost"
    """zmq: where the orchestrator listens, and where the trainer finds it."""

    port: int = Field(default=5555, ge=1, le=65535)
    """zmq: port of the orchestrator."""


class EnvConfig(BaseConfig):
    """One environment, and the processes that run it."""

    id: str = "reverse-text"
    """A package (reverse-text, org/reverse-text), module:factory in plain Python or verifiers, or ./path.py."""

    args: dict[str, Any] = {}
    """Keyword arguments of its load_environment."""

    name: str | None = None
    """Name in metrics; unset: the id."""

    num_workers: int = Field(default=1, ge=0)
    """Processes that run it: a crash, hang or leak costs the rollouts in one of them; 0: inside the caller."""

    timeout: float = Field(default=3600, gt=0)
    """Seconds that a rollout may take, all turns together, and then its scoring; more is a failure."""

    stall_timeout: float = Field(default=120, gt=0)
    """Seconds that the environment's code may keep a worker from everything else before it is replaced."""

    max_memory_gb: float | None = Field(default=None, gt=0)
    """Memory of one worker; a larger one is replaced when its groups are done. Unset: a quarter of the machine's."""

    install: bool = False
    """Install an environment that is not found from index_url, with what it needs."""

    index_url: str = "https://hub.primeintellect.ai/{org}/simple/"
    """Package index that environments are installed from; {org} is the part of the id before the slash."""

    def plain(self) -> dict[str, Any]:
        """The environment alone, without what a richer section says about it."""
        return self.model_dump(include=set(EnvConfig.model_fields))


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
