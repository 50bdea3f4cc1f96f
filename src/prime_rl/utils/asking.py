"""Ask a model in environments: choose the rows, bound what runs at the same time, seed every request."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import anyio

from prime_rl.utils.vf import build_sampling_args
from rollouts.training.rollout_gen.async_rollout_manager import sample_seed

if TYPE_CHECKING:
    from prime_rl.utils.config import AskConfig, AskedEnvConfig, SamplingConfig
    from rollouts.training.agent_integration import Rollout
    from rollouts.training.environments import Environment

OPENAI_URL = "https://api.openai.com/v1"
OnRollouts = Callable[[int, Sequence[int], "list[Rollout]"], None]


@dataclass(frozen=True)
class Target:
    """Whom to ask: one client per server, the model's name there, and the policy version for the metrics."""

    clients: Sequence[Any]
    model: str
    version: int = 0


def choose_rows(
    environment: Environment, env: AskedEnvConfig, config: AskConfig, split: str = "eval"
) -> list[dict[str, Any]]:
    """The first examples of an environment, as many as are wanted; `ValueError` when that is none."""
    wanted = config.num_examples if env.num_examples is None else env.num_examples
    rows = environment.rows(split)
    rows = rows if wanted < 0 else rows[:wanted]
    if not rows:
        raise ValueError(f"environment {env.id!r} has no {split} examples for num_examples = {wanted}")
    return rows


async def run_rows(
    environment: Environment,
    rows: Sequence[dict[str, Any]],
    numbers: Sequence[Sequence[int]],
    config: AskConfig,
    target: Target,
    on_rollouts: OnRollouts = lambda index, numbers, rollouts: None,
) -> list[list[Rollout]]:
    """Rollouts `numbers[i]` of row i for each i; `on_rollouts` sees those of a row as soon as all are finished.

    The seed of a request is a hash of (seed, example, rollout): neither concurrency nor the other examples change it.
    """
    places = anyio.CapacityLimiter(max(1, config.max_concurrent // max(1, *map(len, numbers))))
    seed = config.seed if config.sampling.seed is None else config.sampling.seed
    groups: list[list[Rollout]] = [[] for _ in rows]

    async def run_group(index: int) -> None:
        async with places:
            client = target.clients[index % len(target.clients)]
            args = [
                build_request(config.sampling, sample_seed(seed, index, number), client.base_url)
                for number in numbers[index]
            ]
            groups[index] = await environment.run_group(rows[index], client, target.model, args, config.max_retries)
        on_rollouts(index, numbers[index], groups[index])

    async with anyio.create_task_group() as tasks:
        for index in range(len(rows)):
            if numbers[index]:
                tasks.start_soon(run_group, index)
    return groups


async def run_environment(
    environment: Environment, env: AskedEnvConfig, config: AskConfig, target: Target
) -> list[list[Rollout]]:
    """All rollouts of each evaluation example, in order of the examples."""
    rows = choose_rows(environment, env, config)
    return await run_rows(environment, rows, [range(config.num_rollouts(env))] * len(rows), config, target)


def build_request(sampling: SamplingConfig, seed: int, base_url: str) -> dict[str, Any]:
    """Arguments of one request; to a server that refuses unknown fields only those of the OpenAI API."""
    args = build_sampling_args(sampling, seed)
    if is_strict(base_url):
        del args["logprobs"]
        args["extra_body"] = dict(sampling.extra_body)
        args["seed"] = seed % 2**31
    return args


def openai_url() -> str:
    """Where the OpenAI API is: OPENAI_BASE_URL, as its own client reads it, or the public address."""
    return os.environ.get("OPENAI_BASE_URL", "").rstrip("/") or OPENAI_URL


def is_strict(base_url: str) -> bool:
    """Whether a server is the OpenAI API, which refuses fields that it does not know."""
    return base_url.rstrip("/") == openai_url() or urlsplit(base_url).hostname == urlsplit(OPENAI_URL).hostname
