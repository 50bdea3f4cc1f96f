"""Rollouts of a model in environments: row selection, concurrency limit and request seeds."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import anyio

from prime_rl.utils.vf import build_sampling_args
from rollouts.training.rollout_gen.async_rollout_manager import sample_seed

if TYPE_CHECKING:
    from prime_rl.configuration.sections import GenerationConfig, GenerationEnvConfig, SamplingConfig
    from rollouts.training.agent_integration import Rollout
    from rollouts.training.environments import Environment

OPENAI_URL = "https://api.openai.com/v1"
OnRollouts = Callable[[int, Sequence[int], "list[Rollout]"], None]


@dataclass(frozen=True)
class ModelEndpoint:
    """One client per server, the model name, and the policy version for the metrics."""

    clients: Sequence[Any]
    model: str
    version: int = 0


def choose_rows(
    environment: Environment, env: GenerationEnvConfig, config: GenerationConfig, split: str = "eval"
) -> list[dict[str, Any]]:
    """The first `num_examples` examples of an environment; `ValueError` if there are none."""
    num_examples = config.num_examples if env.num_examples is None else env.num_examples
    rows = environment.rows(split)
    rows = rows if num_examples < 0 else rows[:num_examples]
    if not rows:
        raise ValueError(f"environment {env.id!r} has no {split} examples for num_examples = {num_examples}")
    return rows


async def run_rows(
    environment: Environment,
    rows: Sequence[dict[str, Any]],
    numbers: Sequence[Sequence[int]],
    config: GenerationConfig,
    endpoint: ModelEndpoint,
    on_rollouts: OnRollouts,
) -> None:
    """Run rollouts `numbers[i]` of each row i; `on_rollouts` gets those of a row when all of them are finished.

    They are not kept: their tokens and log-probs take many times the memory of their texts.
    The seed of a request is a hash of (seed, example, rollout), independent of concurrency and of other examples.
    """
    limiter = anyio.CapacityLimiter(max(1, config.max_concurrent // max(1, *map(len, numbers))))
    seed = config.seed if config.sampling.seed is None else config.sampling.seed

    async def run_group(index: int) -> None:
        async with limiter:
            client = endpoint.clients[index % len(endpoint.clients)]
            args = [
                build_request(config.sampling, sample_seed(seed, index, number), client.base_url, endpoint.model)
                for number in numbers[index]
            ]
            rollouts = await environment.run_group(rows[index], client, endpoint.model, args, config.max_retries)
        on_rollouts(index, numbers[index], rollouts)

    async with anyio.create_task_group() as tasks:
        for index in range(len(rows)):
            if numbers[index]:
                tasks.start_soon(run_group, index)


async def run_environment(
    environment: Environment, env: GenerationEnvConfig, config: GenerationConfig, endpoint: ModelEndpoint
) -> list[list[Rollout]]:
    """All rollouts of each evaluation example, in example order."""
    rows = choose_rows(environment, env, config)
    groups: list[list[Rollout]] = [[] for _ in rows]

    def keep(index: int, numbers: Sequence[int], rollouts: list[Rollout]) -> None:
        groups[index] = rollouts

    await run_rows(environment, rows, [range(config.num_rollouts(env))] * len(rows), config, endpoint, keep)
    return groups


def build_request(
    sampling: SamplingConfig, seed: int, base_url: str, model: str, *, with_tokens: bool = True
) -> dict[str, Any]:
    """Arguments of one request; only OpenAI API fields for a server that rejects unknown ones.

    Reasoning models there reject a temperature and `top_p` even at their defaults. Without `with_tokens` no token ids
    are requested, and other fields than those of the OpenAI API only if they are set.
    """
    args = build_sampling_args(sampling, seed)
    strict = is_strict(base_url, model)
    if strict or not with_tokens:
        del args["logprobs"]
        args["extra_body"] = {**({} if strict else find_extensions(sampling)), **sampling.extra_body}
    if strict:
        args = {name: value for name, value in args.items() if name not in ("temperature", "top_p") or value != 1}
        args["seed"] = seed % 2**31
    return args


def find_extensions(sampling: SamplingConfig) -> dict[str, Any]:
    """Parameters that the OpenAI API does not have and that are not at their defaults."""
    return sampling.model_dump(exclude_defaults=True, include={"min_tokens", "top_k", "min_p", "repetition_penalty"})


def openai_url() -> str:
    """Address of the OpenAI API: OPENAI_BASE_URL, as in the official client, or the public address."""
    return os.environ.get("OPENAI_BASE_URL", "").rstrip("/") or OPENAI_URL


def is_openai_model(name: str) -> bool:
    """Whether `name` is an OpenAI model such as gpt-4.1-mini or o4-mini, not a misspelled path or shipped model."""
    return re.match(r"(gpt-|chatgpt-|o\d)[\w.:-]*$", name) is not None and not Path(name).exists()


def is_strict(base_url: str, model: str) -> bool:
    """Whether a server is the OpenAI API, or a proxy of it for one of its models, and so rejects unknown fields."""
    is_proxy = base_url.rstrip("/") == openai_url() and is_openai_model(model)
    return is_proxy or urlsplit(base_url).hostname == urlsplit(OPENAI_URL).hostname
