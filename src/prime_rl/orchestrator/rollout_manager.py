"""What a group is made of: which prompts there are, and how one of them becomes scored samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio

from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.utils.vf import build_sampling_args
from rollouts.training.agent_integration import Rollout, rollout_to_samples
from rollouts.training.datasets.data_buffer import DataBuffer
from rollouts.training.environments import Environment
from rollouts.training.rollout_gen.async_rollout_manager import AsyncRolloutManager, GroupDropped, sample_seed
from rollouts.training.types import RolloutConfig, Sample, Status

Prompt = dict[str, Any]
# The engine's trouble, not the prompt's: such a prompt is not held against.
ENGINE_ERRORS = ("APIConnectionError", "APITimeoutError", "InternalServerError", "RateLimitError", "ModelError")


class GroupGenerator:
    """Makes one group: runs the rollouts of a prompt, leaves out those that failed, turns the others into samples.

    A prompt none of whose rollouts succeed (each is tried `max_retries` times more) is quarantined: when it is drawn
    again, its group is dropped at once. `errors` counts failures by type since the last `take_errors`.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        environments: Mapping[str, Environment],
        clients: Sequence[Any],
        live_version: Callable[[], int],
    ) -> None:
        self.config = config
        self.environments = environments
        self.clients = clients
        self.quarantine: set[int] = set()
        self.last_error: str | None = None
        self._errors: Counter[str] = Counter()
        self._live_version = live_version
        limit = config.max_concurrent // config.rollouts_per_example if config.max_concurrent else None
        self._places = anyio.CapacityLimiter(limit) if limit else None

    async def __call__(self, group_index: int, prompt: Prompt) -> list[Sample]:
        """Samples of the group; raises `GroupDropped` when fewer rollouts succeed than can be compared."""
        if prompt["id"] in self.quarantine:
            raise GroupDropped("quarantined")
        if self._places is None:
            return await self._generate(group_index, prompt)
        async with self._places:
            return await self._generate(group_index, prompt)

    def take_errors(self) -> dict[str, int]:
        """Failed rollouts by type of error since the last call."""
        errors, self._errors = dict(self._errors), Counter()
        return errors

    async def _generate(self, group_index: int, prompt: Prompt) -> list[Sample]:
        config, version = self.config, self._live_version()
        seed = config.seed if config.sampling.seed is None else config.sampling.seed
        args = [
            build_sampling_args(config.sampling, sample_seed(seed, group_index, index))
            for index in range(config.rollouts_per_example)
        ]
        client = self.clients[group_index % len(self.clients)]
        environment = self.environments[prompt["env"]]
        rollouts = await environment.run_group(prompt["row"], client, config.model.name, args, config.max_retries)
        groups = [self._to_samples(r, prompt["env"], group_index, i, version) for i, r in enumerate(rollouts)]
        good = [samples for samples in groups if samples]
        if len(good) < min(2, config.rollouts_per_example):
            self._give_up(prompt, rollouts)
        return [sample for samples in good for sample in samples]

    def _to_samples(self, rollout: Rollout, env: str, group_index: int, index: int, version: int) -> list[Sample]:
        """Samples of one rollout; a rollout that cannot be trained on becomes a failed one, and no samples."""
        if self.config.zero_truncated_completions and rollout.status == Status.TRUNCATED:
            rollout.reward = 0.0
        try:
            samples = [] if rollout.failed else rollout_to_samples(rollout, group_index=group_index, index=index)
            if not rollout.failed and not samples:
                raise ValueError("the server's answer has no token ids and log-probs: it must know return_token_ids")
            for sample in samples:
                sample.validate()
                if not sample.versions:  # a server that does not tell held at least this version
                    sample.versions = [(sample.loss_mask.index(1.0), version)]
                sample.metadata = {"env": env, **_facts(rollout)}
        except ValueError as error:
            rollout.status, rollout.error_type, rollout.error = Status.FAILED, "InvalidRollout", str(error)
            samples = []
        if rollout.error is not None:
            self._errors[rollout.error_type or "Error"] += 1
            self.last_error = f"{rollout.error_type}: {rollout.error}"
        return samples

    def _give_up(self, prompt: Prompt, rollouts: list[Rollout]) -> None:
        kinds = {rollout.error_type for rollout in rollouts if rollout.failed}
        if kinds and kinds <= set(ENGINE_ERRORS):
            raise GroupDropped("engine failed")
        if all(rollout.failed for rollout in rollouts):
            self.quarantine.add(prompt["id"])
            raise GroupDropped("prompt failed")
        raise GroupDropped("too few rollouts")


def build_rollouts(
    config: OrchestratorConfig, environments: Mapping[str, Environment], generator: GroupGenerator
) -> AsyncRolloutManager:
    """The stream of batches: prompts of all environments, (max_async_level + 1) batches' worth of slots."""
    if config.max_concurrent is not None and config.max_concurrent < config.rollouts_per_example:
        raise ValueError(
            f"max_concurrent = {config.max_concurrent} has no room for one group of "
            f"rollouts_per_example = {config.rollouts_per_example}: raise it"
        )
    seed = config.seed if config.buffer.seed is None else config.buffer.seed
    accept = check_not_solved_or_hopeless if config.buffer.online_difficulty_filtering else None
    return AsyncRolloutManager(
        DataBuffer(mix_prompts(environments), seed=seed),
        RolloutConfig(config.num_groups, config.rollouts_per_example, filter_fn=accept),
        generate_group=generator,
        slots=(config.max_async_level + 1) * config.num_groups,
        max_batches=config.max_steps,
    )


def mix_prompts(environments: Mapping[str, Environment]) -> list[Prompt]:
    """Rows of all environments, each spread evenly over the whole list; raises `ValueError` for an empty one."""
    placed: list[tuple[float, int, str, dict[str, Any]]] = []
    for order, (name, environment) in enumerate(environments.items()):
        rows = environment.rows("train")
        if not rows:
            raise ValueError(f"environment {name!r} has no training prompts: check its arguments")
        placed += [((i + 0.5) / len(rows), order, name, row) for i, row in enumerate(rows)]
    placed.sort(key=lambda place: place[:2])
    return [{"id": i, "env": name, "row": row} for i, (_, _, name, row) in enumerate(placed)]


def check_not_solved_or_hopeless(samples: list[Sample]) -> bool:
    """The mean reward of the group's rollouts is neither exactly 0 nor exactly 1."""
    rewards = {sample.index: sample.reward for sample in samples}
    return sum(rewards.values()) / len(rewards) not in (0.0, 1.0)


def _facts(rollout: Rollout) -> dict[str, Any]:
    """What the metrics want to know of a rollout."""
    return {
        "example_id": rollout.example_id,
        "metrics": rollout.metrics,
        "num_turns": rollout.num_turns,
        "generation_ms": rollout.generation_ms,
        "scoring_ms": rollout.scoring_ms,
    }
