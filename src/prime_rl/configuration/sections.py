"""Config sections shared by several processes: logging, trackers, inference client, environments, sampling."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from prime_rl.configuration.schema import FreeText
from prime_rl.utils.pydantic_config import BaseConfig

BASE_MODEL = "base"
"""Name under which the embedded engine serves its base weights without the policy's adapter."""


class LogConfig(BaseConfig):
    """Logging to the terminal and to log files."""

    level: str | None = None
    """Minimum level, such as debug, info or warning; unset: LOGGING_LEVEL, else info."""

    file: bool = True
    """Also write to <output_dir>/logs/<process>.log."""


class LogExtrasConfig(BaseConfig):
    """Tables of rollouts in addition to metrics."""

    samples: bool = True
    """Log a table of sample rollouts."""

    distributions: bool = True
    """Log rewards, advantages and lengths of all rollouts of the step."""

    interval: int = Field(default=10, ge=1)
    """Steps between two tables; the first step is logged too."""

    max_samples: int = Field(default=16, ge=1)
    """Number of rollouts in a sample table, from the lowest to the highest reward."""


class TrackerConfig(BaseConfig):
    """A metric tracker; the section enables it."""

    enabled: bool = True
    """False disables it without removing the section."""


class ProjectConfig(TrackerConfig):
    """A metric tracker with projects."""

    project: str = "prime-rl"
    """Project of the run."""

    name: str | None = None
    """Name of the run."""


class WandbConfig(ProjectConfig):
    """Log metrics to Weights & Biases; the section enables it."""

    entity: str | None = None
    """Team or user of the project."""

    offline: bool = False
    """Write the run to disk only."""

    group: str | None = None
    """Group of related runs; unset: rl groups its processes by name, or by output_dir."""

    tags: list[str] = []
    """Tags of the run."""

    log_extras: LogExtrasConfig = LogExtrasConfig()


class TensorboardConfig(TrackerConfig):
    """Write metrics for TensorBoard to <output_dir>/tensorboard/<process>; the section enables it."""


class TrackioConfig(ProjectConfig):
    """Log metrics to trackio, a local dashboard; the section enables it."""

    space_id: str | None = None
    """Hugging Face space that hosts the dashboard; unset: this machine."""


class PrometheusConfig(TrackerConfig):
    """Serve the latest metrics at http://127.0.0.1:<port>/metrics; the section enables it."""

    port: int | None = Field(default=None, ge=1, le=65535)
    """Port; unset: 9401 trainer, 9402 orchestrator, 9403 sft, 9404 eval, 9405 synthesize,
    9406 evolve."""


class SharedCkptConfig(BaseConfig):
    """Checkpoints of trainer and orchestrator, taken at the same steps."""

    interval: int | None = Field(default=None, ge=1)
    """Steps between checkpoints; unset: only after the last step."""

    resume_step: int | None = Field(default=None, ge=-1)
    """Resume from this step; -1: from the latest complete one."""

    keep: int | None = Field(default=None, ge=1)
    """Number of latest checkpoints to keep on disk; unset: all."""


class TrackersConfig(BaseConfig):
    """Metric trackers in addition to metrics.jsonl."""

    wandb: WandbConfig | None = None

    tensorboard: TensorboardConfig | None = None

    trackio: TrackioConfig | None = None

    prometheus: PrometheusConfig | None = None


class ClientConfig(BaseConfig):
    """Client of OpenAI-compatible inference servers."""

    timeout: float = Field(default=1200.0, gt=0)
    """Request timeout in seconds; loading weights may take at least 300."""

    base_url: list[str] = Field(default=["http://localhost:8000/v1"], min_length=1)
    """Server URLs including /v1; requests are load-balanced over several."""

    api_key_var: str = "OPENAI_API_KEY"
    """Environment variable with the API key."""

    headers: dict[str, str] = {}
    """Extra HTTP headers of every request."""

    max_connections: int = Field(default=8192, ge=1)
    """Maximum concurrent requests to one server from each process; further ones are queued."""

    reconnect_timeout: float = Field(default=300.0, ge=0)
    """Seconds to retry a server that is unreachable or not ready (it may be restarting)."""

    def read_headers(self) -> dict[str, str]:
        """The headers of every request, with the API key of `api_key_var` if set."""
        key = os.environ.get(self.api_key_var)
        return ({"authorization": f"Bearer {key}"} if key else {}) | self.headers

    @property
    def servers(self) -> frozenset[str]:
        """The addresses, to compare: those of this machine have one name."""
        from prime_rl.runtime.http_access import LOOPBACK

        parts = [urlsplit(url.rstrip("/")) for url in self.base_url]
        hosts = ("localhost" if part.hostname in LOOPBACK else part.hostname for part in parts)
        return frozenset(f"{host}:{part.port}{part.path}" for host, part in zip(hosts, parts, strict=True))


class TransportConfig(BaseConfig):
    """Transport of batches from the orchestrator to the trainer."""

    type: Literal["filesystem", "zmq"] = "filesystem"
    """filesystem: through a shared output_dir; zmq: over a socket, for a trainer without access to it."""

    host: str = "localhost"
    """zmq: address on which the orchestrator listens and to which the trainer connects."""

    port: int = Field(default=5555, ge=1, le=65535)
    """zmq: port of the orchestrator."""


class WeightBroadcastConfig(BaseConfig):
    """Transport of weights from the trainer to the inference servers; all processes need the same type."""

    type: Literal["filesystem", "gloo", "nccl"] = "filesystem"
    """filesystem: servers read output_dir; gloo, nccl: servers receive weights over a process group,
    gloo on any machine, nccl between GPUs."""

    delta: bool = False
    """filesystem: servers read only what changed since the version before, about 1 % of the bytes at small learning
    rates. Embedded engine and bfloat16 weights only; weights/ holds fewer versions."""

    @model_validator(mode="after")
    def _check_delta(self) -> WeightBroadcastConfig:
        if self.delta and self.type != "filesystem":
            raise ValueError(f'delta = true with type = "{self.type}": deltas are files, set type = "filesystem"')
        return self


class TrainerWeightBroadcastConfig(WeightBroadcastConfig):
    """Weight transport of the trainer, with its address."""

    host: str = "localhost"
    """gloo, nccl: address of the trainer's machine as seen by the servers."""

    port: int = Field(default=0, ge=0, le=65535)
    """gloo, nccl: port of the trainer; 0: any free port, announced to the servers."""

    timeout: float = Field(default=60, gt=0)
    """gloo, nccl: seconds without progress before a transfer is aborted."""

    anchor_interval: int = Field(default=10, ge=1)
    """delta: full weights every this many versions, from which servers start that were restarted."""


TASKSET_FACTORY = "prime_rl.envs.tasksets:load_environment"


class EnvConfig(BaseConfig):
    """One environment and its worker processes."""

    dependents: ClassVar[Mapping[str, tuple[str, ...]]] = {"id": ("args", "name")}

    id: str = "reverse-text"
    """Package (reverse-text, org/reverse-text), ./path.py, or module:factory in plain Python or verifiers."""

    args: dict[str, Any] = {}
    """Keyword arguments of its load_environment; {} removes those of a file, and so does another id."""

    name: str | None = None
    """Name in metrics; unset: the id, also where another id replaces that of a file."""

    command: list[FreeText] | None = Field(default=None, min_length=1)
    """Program that runs each rollout: it reads the task on standard input and uses the model through the OpenAI or
    Anthropic API; unset: the environment's own turns."""

    taskset: dict[str, Any] | None = None
    """A taskset of verifiers 0.4 instead of an id: {id = ...} and its settings; needs python."""

    harness: dict[str, Any] | None = None
    """Program that plays the taskset: {id = ...}, its settings and those of its agent, such as runtime; unset: the
    taskset's own, else null (a chat loop with the taskset's tools)."""

    python: str | None = None
    """Interpreter of a virtual environment in which verifiers 0.4 and the taskset are installed."""

    num_workers: int = Field(default=1, ge=0)
    """Worker processes; a crash, hang or leak affects only the rollouts of one worker. 0: run in the caller."""

    timeout: float = Field(default=3600, gt=0)
    """Timeout in seconds of a rollout (all turns together), and separately of its scoring."""

    stall_timeout: float = Field(default=120, gt=0)
    """Seconds that environment code may block a worker's event loop before the worker is restarted."""

    max_memory_gb: float | None = Field(default=None, gt=0)
    """Memory limit of one worker, which is restarted after its groups finish. Unset: a quarter of the machine's
    or container's."""

    install: bool = False
    """Install a missing environment and its dependencies from index_url."""

    index_url: str = "https://hub.primeintellect.ai/{org}/simple/"
    """Package index of environments; {org} is the part of the id before the slash."""

    @property
    def display_name(self) -> str:
        """Name in metrics, messages and paths."""
        return self.name or self.id

    @property
    def factory(self) -> tuple[str, dict[str, Any]]:
        """Id and arguments of the `load_environment` that makes this environment."""
        if self.taskset is None:
            return self.id, self.args
        return TASKSET_FACTORY, {**self.args, "taskset": self.taskset, "harness": self.harness, "python": self.python}

    @model_validator(mode="after")
    def _check_taskset(self) -> EnvConfig:
        if self.taskset is None:
            if self.harness is not None or self.python is not None:
                raise ValueError("harness and python belong to a taskset: add taskset = {id = ...}, or remove them")
            return self
        name = self.taskset.get("id")
        if not isinstance(name, str) or not name:
            raise ValueError("taskset needs an id: write taskset = {id = ...}")
        if "id" in self.model_fields_set and self.id != name:
            raise ValueError(f"id = {self.id!r} and taskset.id = {name!r}: keep one of them")
        if self.install:
            raise ValueError("install does not install tasksets: install it for env.python, and remove install")
        if self.command is not None:
            raise ValueError("command and taskset exclude each other: the program of a taskset is its harness")
        if "retries" in (self.harness or {}):
            raise ValueError(
                "harness.retries would repeat a rollout in one conversation, so that turns of its failed attempts are "
                "trained: remove it; max_retries repeats failed rollouts"
            )
        if others := [key for key in ("client", "model") if key in (self.harness or {})]:
            raise ValueError(
                f"harness.{others[0]} would replace the model of the run, so that no turns are recorded: remove it"
            )
        if self.python is None:
            raise ValueError(
                "taskset needs python, an interpreter with verifiers 0.4: python -m venv .venv-v1; "
                ".venv-v1/bin/pip install verifiers==0.4.0 uv; then python = '.venv-v1/bin/python'"
            )
        self.__dict__["id"] = name  # not in model_fields_set: it follows the taskset
        return self

    @model_validator(mode="after")
    def _is_called_by_its_id(self) -> EnvConfig:
        if self.name is None:
            self.__dict__["name"] = self.find_name(vars(self))  # not in model_fields_set: it follows the id
        return self

    @classmethod
    def find_name(cls, values: Mapping[str, Any]) -> str:
        """The name of an environment with these values: its own, its id, that of its taskset, or the default id."""
        taskset = values.get("taskset")
        found = values.get("name") or values.get("id") or (isinstance(taskset, Mapping) and taskset.get("id"))
        return str(found or cls.model_fields["id"].default)

    def plain(self) -> dict[str, Any]:
        """The fields of `EnvConfig` alone, without those of subclasses."""
        return self.model_dump(include=set(EnvConfig.model_fields))


class DebugModelConfig(BaseConfig):
    """A small or untrained model for debugging."""

    random_init: bool = False
    """Initialize random weights, the same in every process, instead of loading the weight files."""

    num_layers: int | None = Field(default=None, ge=1)
    """Keep only this many first layers of the model."""

    seed: int = Field(default=0, ge=0)
    """Seed of the random weights."""


REWEIGHTING: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
}
"""Request fields that change the odds of tokens, with the values that do not."""


class SamplingConfig(BaseConfig):
    """Sampling parameters."""

    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; 0: greedy decoding."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens of one completion; unset: limited by the context length."""

    min_tokens: int = Field(default=0, ge=0)
    """Minimum tokens before an end token is allowed; log-probs before are those without end tokens."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the smallest set of tokens with at least this probability (nucleus sampling)."""

    top_k: int = Field(default=-1, ge=-1)
    """Sample from this many most likely tokens; -1: all."""

    min_p: float = Field(default=0.0, ge=0, le=1)
    """Exclude tokens less likely than this fraction of the most likely one."""

    repetition_penalty: float = Field(default=1.0, gt=0)
    """Penalty of repeated tokens; above 1 makes them less likely."""

    seed: int | None = None
    """Sampling seed; unset: derived from the run's seed."""

    stop: list[FreeText] = []
    """Stop strings."""

    extra_body: dict[str, Any] = {}
    """Further request fields, passed through unchanged."""

    @property
    def truncation(self) -> str | None:
        """The first parameter that excludes tokens from sampling; None if there is none."""
        is_set = {"top_p": self.top_p < 1, "top_k": self.top_k > 0, "min_p": self.min_p > 0}
        return next((name for name, given in is_set.items() if given), None)

    @property
    def reweighting(self) -> str | None:
        """The first parameter that changes the odds of the remaining tokens; None if there is none."""
        if self.repetition_penalty != 1:
            return "repetition_penalty"
        found = (name for name, neutral in REWEIGHTING.items() if self.extra_body.get(name) not in neutral)
        return next((f"extra_body.{name}" for name in found), None)


class GenerationModelConfig(BaseConfig):
    """The model that generates."""

    name: str = "gpt-4.1-mini"
    """A model directory, shipped model or hub id, served by this command; or a model served at client.base_url.

    Without a server, gpt-* and o1, o3, ... use the OpenAI API (OPENAI_BASE_URL, if set)."""

    max_model_len: int | None = Field(default=None, ge=2)
    """Maximum sequence length (prompt + completion) of a model served by this command; unset: the model's own."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of a model served by this command; auto: bfloat16 on a GPU, else float32."""

    exact: bool | None = None
    """Exact mode of a model served by this command (inference.exact); unset: on for a CPU."""

    tool_call_parser: Literal["hermes", "llama"] = "hermes"
    """Tool call format of a model served by this command (inference.model.tool_call_parser)."""

    reasoning_parser: Literal["think"] | None = None
    """think: a model served by this command returns text between <think> tags as reasoning_content."""

    debug: DebugModelConfig = DebugModelConfig()


class GenerationClientConfig(ClientConfig):
    """Client of the inference servers."""

    base_url: list[str] = []
    """Server URLs including /v1; unset: start a server for a local model, else use the OpenAI API."""

    reconnect_timeout: float = Field(default=0.0, ge=0)
    """Seconds to retry an unreachable server; 0: fail at once. Finished results are kept."""


class GenerationEnvConfig(EnvConfig):
    """One environment and its number of examples."""

    num_examples: int | None = Field(default=None, ge=-1)
    """Number of examples of this environment; unset: the global num_examples."""

    rollouts_per_example: int | None = Field(default=None, ge=1)
    """Rollouts per example of this environment; unset: the global rollouts_per_example."""


def check_generation_envs(envs: Sequence[GenerationEnvConfig], rollouts_per_example: int, max_concurrent: int) -> None:
    """`ValueError` for two environments of one name, and for more rollouts of an example than may run at once."""
    names = [env.display_name for env in envs]
    if duplicates := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"env has two environments named {sorted(duplicates)[0]!r}: rename one of them")
    num_rollouts = max((env.rollouts_per_example or rollouts_per_example for env in envs), default=rollouts_per_example)
    if num_rollouts > max_concurrent:
        raise ValueError(
            f"max_concurrent = {max_concurrent} is less than the {num_rollouts} rollouts of one example: raise it or "
            "lower rollouts_per_example"
        )


class GenerationConfig(TrackersConfig):
    """Model, environments and amount of generation, shared by `eval` and `synthesize`."""

    main_keys: ClassVar[Sequence[str]] = """
        model.name model.max_model_len client.base_url env.0.id env.0.args num_examples rollouts_per_example
        sampling.max_tokens sampling.temperature sampling.top_p max_concurrent max_retries seed resume output_dir
        wandb.project log.level
    """.split()

    model: GenerationModelConfig = GenerationModelConfig()

    client: GenerationClientConfig = GenerationClientConfig()

    env: list[GenerationEnvConfig] = Field(default=[GenerationEnvConfig()], min_length=1)
    """Environments, run one after the other."""

    sampling: SamplingConfig = SamplingConfig()

    num_examples: int = Field(default=-1, ge=-1)
    """Number of first examples of each environment; -1: all."""

    rollouts_per_example: int = Field(default=1, ge=1)
    """Rollouts of each example."""

    max_concurrent: int = Field(default=256, ge=1)
    """Maximum concurrent rollouts."""

    max_retries: int = Field(default=2, ge=0)
    """Retries of a failed rollout."""

    seed: int = Field(default=0, ge=0)
    """Sampling seed: the same model, examples and seed give the same completions."""

    resume: bool = True
    """Continue an interrupted run with the same settings; off: start over."""

    server_timeout: float = Field(default=600, gt=0)
    """Seconds to wait for the server to be ready."""

    output_dir: Path = Path("outputs")
    """Directory of results and metrics.jsonl."""

    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _check_server(self) -> GenerationConfig:
        for key, unset in (("dtype", "auto"), ("exact", None)):
            if self.client.base_url and (value := getattr(self.model, key)) != unset:
                raise ValueError(f"model.{key} = {value!r} is for a model served by this command: leave it out")
        return self

    @model_validator(mode="after")
    def _check_env(self) -> GenerationConfig:
        check_generation_envs(self.env, self.rollouts_per_example, self.max_concurrent)
        return self

    def num_rollouts(self, env: GenerationEnvConfig) -> int:
        """Rollouts per example of an environment."""
        return env.rollouts_per_example or self.rollouts_per_example
