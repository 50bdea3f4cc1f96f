"""Configuration of `eval`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from prime_rl.utils.config import ClientConfig, DebugModelConfig, EnvConfig, LogConfig, SamplingConfig, WandbConfig
from prime_rl.utils.pydantic_config import BaseConfig


class ModelConfig(BaseConfig):
    """The model that is evaluated."""

    name: str = "gpt-4.1-mini"
    """A model directory, shipped model or hub id, which eval serves itself; or a model of the client.base_url server.

    Without such a server, gpt-* and o1, o3, ... are asked of the OpenAI API."""

    max_model_len: int | None = Field(default=None, ge=2)
    """Most tokens of prompt and completion together where eval serves the model; unset: what it was made for."""

    debug: DebugModelConfig = DebugModelConfig()


class EvalClientConfig(ClientConfig):
    """How to reach the server."""

    base_url: list[str] = []
    """Addresses of the servers, /v1 included; unset: eval starts one for a local model, else asks the OpenAI API."""


class EvalEnvConfig(EnvConfig):
    """One environment and how much of it."""

    num_examples: int | None = Field(default=None, ge=-1)
    """Examples of this environment; unset: num_examples of the whole evaluation."""

    rollouts_per_example: int | None = Field(default=None, ge=1)
    """Rollouts per example here; unset: rollouts_per_example of the whole evaluation."""


class EvalConfig(BaseConfig):
    """Which model, in which environments, how often."""

    model: ModelConfig = ModelConfig()

    client: EvalClientConfig = EvalClientConfig()

    env: list[EvalEnvConfig] = Field(default=[EvalEnvConfig()], min_length=1)
    """Environments, one after the other; their held-out examples are used."""

    sampling: SamplingConfig = SamplingConfig()

    num_examples: int = Field(default=-1, ge=-1)
    """First examples of each environment; -1: all."""

    rollouts_per_example: int = Field(default=1, ge=1)
    """Rollouts of each example."""

    pass_threshold: float = 1.0
    """A rollout with at least this reward counts as passed in pass@k."""

    max_concurrent: int = Field(default=256, ge=1)
    """Rollouts that run at the same time."""

    max_retries: int = Field(default=2, ge=0)
    """Further tries of a rollout that failed."""

    weights_dir: Path | None = None
    """Directory of step_N weights that are evaluated one after the other, in place of model.name."""

    steps: list[int] = []
    """Steps of weights_dir; unset: all."""

    seed: int = Field(default=0, ge=0)
    """Seed of every sampled token: the same model, examples and seed give the same completions."""

    server_timeout: float = Field(default=600, gt=0)
    """Seconds to wait for the server to be ready."""

    output_dir: Path = Path("outputs")
    """Where evals/<environment>/ and metrics.jsonl go."""

    log: LogConfig = LogConfig()

    wandb: WandbConfig | None = None

    @model_validator(mode="after")
    def _check_env(self) -> EvalConfig:
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

    @model_validator(mode="after")
    def _check_steps(self) -> EvalConfig:
        if self.steps and self.weights_dir is None:
            raise ValueError("steps is set but weights_dir is not: say where the steps lie, e.g. outputs/weights")
        return self

    def num_rollouts(self, env: EvalEnvConfig) -> int:
        """Rollouts per example of an environment."""
        return env.rollouts_per_example or self.rollouts_per_example
