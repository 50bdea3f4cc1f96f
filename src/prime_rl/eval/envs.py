"""Run environments against a model, and turn their rollouts into numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import anyio

from prime_rl.utils.vf import build_sampling_args
from rollouts.training.metrics import compute_pass_at_k, compute_stats
from rollouts.training.rollout_gen.async_rollout_manager import sample_seed
from rollouts.training.types import Status

if TYPE_CHECKING:
    from prime_rl.eval.config import EvalConfig, EvalEnvConfig
    from prime_rl.utils.config import SamplingConfig
    from rollouts.training.agent_integration import Rollout
    from rollouts.training.environments import Environment

STRICT_HOSTS = ("api.openai.com",)  # refuse fields that they do not know


@dataclass(frozen=True)
class Target:
    """Whom to ask: one client per server, the model's name there, and the policy version for the metrics."""

    clients: Sequence[Any]
    model: str
    version: int = 0


async def run_environment(
    environment: Environment,
    env: EvalEnvConfig,
    config: EvalConfig,
    target: Target,
    on_group: Callable[[list[Rollout]], None] = lambda _: None,
) -> list[list[Rollout]]:
    """The rollouts of each example, in order of the examples; `on_group` sees each group as it is finished.

    The seed of a request is a hash of (seed, example, rollout): neither concurrency nor the other examples change it.
    """
    rows = environment.rows("eval")
    wanted = config.num_examples if env.num_examples is None else env.num_examples
    rows = rows if wanted < 0 else rows[:wanted]
    if not rows:
        raise ValueError(f"environment {env.id!r} has no evaluation examples for num_examples = {wanted}")
    num_rollouts = config.num_rollouts(env)
    places = anyio.CapacityLimiter(max(1, config.max_concurrent // num_rollouts))
    seed = config.seed if config.sampling.seed is None else config.sampling.seed
    groups: list[list[Rollout]] = [[] for _ in rows]

    async def run_group(index: int) -> None:
        async with places:
            client = target.clients[index % len(target.clients)]
            args = [
                build_request(config.sampling, sample_seed(seed, index, rollout), client.base_url)
                for rollout in range(num_rollouts)
            ]
            groups[index] = await environment.run_group(rows[index], client, target.model, args, config.max_retries)
        on_group(groups[index])

    async with anyio.create_task_group() as tasks:
        for index in range(len(rows)):
            tasks.start_soon(run_group, index)
    return groups


def build_request(sampling: SamplingConfig, seed: int, base_url: str) -> dict[str, Any]:
    """Arguments of one request; to a server that refuses unknown fields only those of the OpenAI API."""
    args = build_sampling_args(sampling, seed)
    if urlsplit(base_url).hostname in STRICT_HOSTS:
        del args["logprobs"]
        args["extra_body"] = dict(sampling.extra_body)
        args["seed"] = seed % 2**31
    return args


def summarize(groups: Sequence[Sequence[Rollout]], num_rollouts: int, pass_threshold: float) -> dict[str, float]:
    """Metrics of one environment. Failed rollouts count as errors and in no other number.

    `avg@k` is the mean reward over the k rollouts of an example, averaged over examples; `avg@k/stderr` the standard
    error of that average, examples being what was drawn at random; `pass@k` the unbiased estimate of 2107.03374 for
    1, 2, 4, ... rollouts; then the mean of each reward function.
    """
    everything = [rollout for group in groups for rollout in group]
    good = [[rollout for rollout in group if not rollout.failed] for group in groups]
    scored = [group for group in good if group]
    rollouts = [rollout for group in scored for rollout in group]
    means = [statistics.fmean(rollout.reward for rollout in group) for group in scored]
    summary = {
        f"avg@{num_rollouts}": statistics.fmean(means) if means else math.nan,
        f"avg@{num_rollouts}/stderr": compute_standard_error(means),
    }
    for k in powers_of_two(num_rollouts):
        chances = [
            compute_pass_at_k(len(group), sum(rollout.reward >= pass_threshold for rollout in group), k)
            for group in scored
            if len(group) >= k
        ]
        summary[f"pass@{k}"] = statistics.fmean(chances) if chances else math.nan
    for name in sorted({name for rollout in rollouts for name in rollout.metrics}):
        summary[f"metrics/{name}"] = statistics.fmean(r.metrics[name] for r in rollouts if name in r.metrics)
    lengths = [completion_length(rollout) for rollout in rollouts if rollout.turns]
    if lengths:
        summary |= {f"completion_len/{name}": value for name, value in compute_stats(lengths).items()}
    truncated = [rollout.status == Status.TRUNCATED for rollout in rollouts]
    summary["is_truncated/mean"] = statistics.fmean(truncated) if truncated else math.nan
    summary["num_turns/mean"] = statistics.fmean(r.num_turns for r in rollouts) if rollouts else math.nan
    summary["error/mean"] = 1 - len(rollouts) / len(everything) if everything else math.nan
    summary["examples"] = len(groups)
    summary["rollouts"] = len(rollouts)
    return summary


def result_rows(groups: Sequence[Sequence[Rollout]]) -> list[dict[str, Any]]:
    """One JSON-ready row per rollout, for results.jsonl."""
    return [
        {
            "example_id": rollout.example_id,
            "rollout_idx": index,
            "task": rollout.task,
            "prompt": rollout.prompt,
            "completion": rollout.completion,
            "answer": rollout.answer,
            "reward": None if rollout.failed else rollout.reward,
            "metrics": rollout.metrics,
            "completion_len": completion_length(rollout) if rollout.turns else None,
            "is_truncated": rollout.status == Status.TRUNCATED,
            "stop_reason": rollout.stop_reason,
            "num_turns": rollout.num_turns,
            "error": f"{rollout.error_type}: {rollout.error}" if rollout.error else None,
            "generation_ms": rollout.generation_ms,
            "scoring_ms": rollout.scoring_ms,
        }
        for group in groups
        for index, rollout in enumerate(group)
    ]


def compute_standard_error(values: Sequence[float]) -> float:
    """s / sqrt(n) with the sample standard deviation s; NaN for fewer than two values."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def completion_length(rollout: Rollout) -> int:
    """Sampled tokens of all turns."""
    return sum(len(turn.completion_ids) for turn in rollout.turns)


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4, ... up to and with `limit` itself."""
    return sorted({2**i for i in range(limit.bit_length())} | {limit})
