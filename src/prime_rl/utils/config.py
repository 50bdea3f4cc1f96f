"""Sections that several processes share: where to log, whom to ask, which environment, how to sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from prime_rl.utils.pydantic_config import BaseConfig

BASE_MODEL = "base"
"""Name under which the embedded engine answers with its own weights, whatever adapter the policy has become."""


class LogConfig(BaseConfig):
    """What is said on the terminal and in the log files."""

    level: str | None = None
    """Least severe level shown, such as debug, info or warning; unset: LOGGING_LEVEL, else info."""

    file: bool = True
    """Also write the lines to <output_dir>/logs/<process>.log."""


class LogExtrasConfig(BaseConfig):
    """Tables of rollouts beside the numbers."""

    samples: bool = True
    """A table of rollouts to read."""

    distributions: bool = True
    """Rewards, advantages and lengths of all rollouts of the step."""

    interval: int = Field(default=10, ge=1)
    """Steps between two tables; the first step has one too."""

    max_samples: int = Field(default=16, ge=1)
    """Rollouts in a table of samples, from the lowest to the highest reward."""


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

    log_extras: LogExtrasConfig = LogExtrasConfig()


class TensorboardConfig(BaseConfig):
    """Write metrics for TensorBoard to <output_dir>/tensorboard/<process>; the section switches it on."""

    enabled: bool = True
    """Off keeps the section without writing anything."""


class TrackioConfig(BaseConfig):
    """Keep metrics with trackio, a local dashboard; the section switches it on."""

    enabled: bool = True
    """Off keeps the section without sending anything."""

    project: str = "prime-rl"
    """Project the run is filed under."""

    name: str | None = None
    """Name of the run."""

    space_id: str | None = None
    """A Hugging Face space that shows it; unset: this machine."""


class PrometheusConfig(BaseConfig):
    """Serve the newest metrics at http://127.0.0.1:<port>/metrics; the section switches it on."""

    enabled: bool = True
    """Off keeps the section without listening."""

    port: int | None = Field(default=None, ge=1, le=65535)
    """Unset: 9401 trainer, 9402 orchestrator, 9403 sft, 9404 eval, 9405 synthesize."""


class TrackersConfig(BaseConfig):
    """Where a process sends its metrics beside metrics.jsonl."""

    wandb: WandbConfig | None = None

    tensorboard: TensorboardConfig | None = None

    trackio: TrackioConfig | None = None

    prometheus: PrometheusConfig | None = None


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

    reconnect_timeout: float = Field(default=300.0, ge=0)
    """Seconds to go on asking a server that cannot be reached or is not ready: it may be starting again."""


class TransportConfig(BaseConfig):
    """The wire that carries batches from the orchestrator to the trainer."""

    type: Literal["filesystem", "zmq"] = "filesystem"
    """filesystem: both see output_dir; zmq: a socket, for a trainer that does not."""

    host: str = "localhost"
    """zmq: where the orchestrator listens, and where the trainer finds it."""

    port: int = Field(default=5555, ge=1, le=65535)
    """zmq: port of the orchestrator."""


class WeightBroadcastConfig(BaseConfig):
    """How weights get from the trainer to the inference servers; all three must say the same."""

    type: Literal["filesystem", "gloo", "nccl"] = "filesystem"
    """filesystem: servers read output_dir; gloo, nccl: they receive weights from the trainer over a process group,
    gloo on any machine, nccl between GPUs."""


class SendingConfig(WeightBroadcastConfig):
    """The same, and where the trainer is found."""

    host: str = "localhost"
    """gloo, nccl: address of the trainer's machine as the servers reach it."""

    port: int = Field(default=0, ge=0, le=65535)
    """gloo, nccl: port of the trainer; 0: any that is free, the servers are told."""

    timeout: float = Field(default=60, gt=0)
    """gloo, nccl: seconds that a transfer may stand still before it is given up."""


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

    @model_validator(mode="after")
    def _is_called_by_its_id(self) -> EnvConfig:
        if self.name is None:
            self.__dict__["name"] = self.id  # shown, but not set: with another id it has another name
        return self

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


class AskedModelConfig(BaseConfig):
    """The model that is asked."""

    name: str = "gpt-4.1-mini"
    """A model directory, shipped model or hub id, served by this command itself; or a model at client.base_url.

    Without such a server, gpt-* and o1, o3, ... are asked of the OpenAI API (OPENAI_BASE_URL, if set)."""

    max_model_len: int | None = Field(default=None, ge=2)
    """Most tokens of prompt and completion where this command serves the model; unset: what it was made for."""

    debug: DebugModelConfig = DebugModelConfig()


class AskedClientConfig(ClientConfig):
    """How to reach the server."""

    base_url: list[str] = []
    """Addresses of the servers, /v1 included; unset: one is started for a local model, else the OpenAI API is asked."""

    reconnect_timeout: float = Field(default=0.0, ge=0)
    """Seconds to go on asking a server that cannot be reached; 0: say so at once, what is finished is kept."""


class AskedEnvConfig(EnvConfig):
    """One environment and how much of it."""

    num_examples: int | None = Field(default=None, ge=-1)
    """Examples of this environment; unset: the num_examples of all."""

    rollouts_per_example: int | None = Field(default=None, ge=1)
    """Rollouts per example here; unset: the rollouts_per_example of all."""


class AskConfig(TrackersConfig):
    """Which model is asked, in which environments, how often: what `eval` and `synthesize` share."""

    model: AskedModelConfig = AskedModelConfig()

    client: AskedClientConfig = AskedClientConfig()

    env: list[AskedEnvConfig] = Field(default=[AskedEnvConfig()], min_length=1)
    """Environments, one after the other."""

    sampling: SamplingConfig = SamplingConfig()

    num_examples: int = Field(default=-1, ge=-1)
    """First examples of each environment; -1: all."""

    rollouts_per_example: int = Field(default=1, ge=1)
    """Rollouts of each example."""

    max_concurrent: int = Field(default=256, ge=1)
    """Rollouts that run at the same time."""

    max_retries: int = Field(default=2, ge=0)
    """Further tries of a rollout that failed."""

    seed: int = Field(default=0, ge=0)
    """Seed of every sampled token: the same model, examples and seed give the same completions."""

    resume: bool = True
    """Go on with what an interrupted run of the same settings has finished; off: begin anew."""

    server_timeout: float = Field(default=600, gt=0)
    """Seconds to wait for the server to be ready."""

    output_dir: Path = Path("outputs")
    """Where results and metrics.jsonl go."""

    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _check_env(self) -> AskConfig:
        names = [env.name or env.id for env in self.env]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"env has two environments called {sorted(twice)[0]!r}: give one of them another name")
        for env in self.env:
            if (wanted := self.num_rollouts(env)) > self.max_concurrent:
                raise ValueError(
                    f"max_concurrent = {self.max_concurrent} has no room for the {wanted} rollouts of one example: "
                    "raise it or lower rollouts_per_example"
                )
        return self

    def num_rollouts(self, env: AskedEnvConfig) -> int:
        """Rollouts per example of an environment."""
        return env.rollouts_per_example or self.rollouts_per_example
