"""Builds environments and request arguments from config sections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rollouts.training.datasets.chat import NO_TEMPLATE
from rollouts.training.environments import Environment, check_environment, load_environment

if TYPE_CHECKING:
    from prime_rl.configuration.sections import EnvConfig, SamplingConfig


def check_environments(configs: Sequence[EnvConfig]) -> None:
    """Raise `ValueError` for unknown ids or invalid arguments, before anything starts.

    Does not import environments. Installs missing ones with `install` set.
    """
    for config in configs:
        if config.install:
            from prime_rl.envs.install import ensure_installed

            ensure_installed(config.id, config.index_url)
        if config.command is not None:
            from prime_rl.gateway.program import check_command

            check_command(config.command)
        if config.python is not None:
            from prime_rl.envs.tasksets import find_interpreter

            find_interpreter(config.python)
        check_environment(*config.factory)


def check_text_prompts(configs: Sequence[EnvConfig]) -> None:
    """Raise `ValueError` for environments whose prompts are messages, with a model that has no chat template.

    Loads the environments in this process and closes them.
    """
    for config in configs:
        with open_environments([config.model_copy(update={"num_workers": 0})], score=False) as loaded:
            if any(getattr(environment, "prompts_are_messages", False) for environment in loaded.values()):
                raise ValueError(f"environment {config.id!r} writes messages and {NO_TEMPLATE}")


def load_environments(configs: Sequence[EnvConfig], *, score: bool = True) -> dict[str, Environment]:
    """Load environments by their names in metrics; call in the main thread, before installing signal handlers.

    Without `score` no reward function runs. Environments with `num_workers` > 0 run in worker processes, which
    `close_environments` or the end of this process terminates.
    """
    from prime_rl.envs.in_process import InProcessEnvironment
    from prime_rl.envs.worker import build_agent, quiet_libraries
    from prime_rl.envs.worker_pool import EnvironmentWorkers

    check_environments(configs)
    quiet_libraries()
    environments: dict[str, Environment] = {}
    try:
        for config in configs:  # the processes load concurrently
            if config.num_workers:
                environments[config.display_name] = EnvironmentWorkers(config, score=score)
        for config in configs:
            if not config.num_workers:
                agent = build_agent(config.command)
                environment = load_environment(*config.factory, timeout_s=config.timeout, score=score, agent=agent)
                environments[config.display_name] = InProcessEnvironment(environment)
        quiet_libraries()
        for environment in environments.values():
            if isinstance(environment, EnvironmentWorkers):
                environment.wait_ready()
    except BaseException:
        close_environments(environments)
        raise
    return {config.display_name: environments[config.display_name] for config in configs}


def close_environments(environments: Mapping[str, Environment]) -> None:
    """Terminate the worker processes."""
    for environment in environments.values():
        close = getattr(environment, "close", None)
        if callable(close):
            close()


@contextmanager
def open_environments(configs: Sequence[EnvConfig], *, score: bool = True) -> Iterator[dict[str, Environment]]:
    """Context manager of `load_environments`."""
    environments = load_environments(configs, score=score)
    try:
        yield environments
    finally:
        close_environments(environments)


def build_sampling_args(
    sampling: SamplingConfig, seed: int | None = None, *, return_support: bool = False
) -> dict[str, Any]:
    """Arguments of one request, always with token ids and log-probs; `seed` is the seed of this sample."""
    args: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
        "seed": seed,
        "stop": list(sampling.stop) or None,
        "logprobs": True,
        "extra_body": {
            "return_token_ids": True,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "min_tokens": sampling.min_tokens,
            "repetition_penalty": sampling.repetition_penalty,
            **({"return_sampling_support": True} if return_support else {}),
            **sampling.extra_body,
        },
    }
    return {name: value for name, value in args.items() if value is not None}
