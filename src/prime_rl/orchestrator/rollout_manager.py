"""What a group is made of: which prompts there are, and how one of them becomes scored samples."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prime_rl.orchestrator.buffer import POISON, Prompt, PromptBuffer
from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.orchestrator.engines import Attendance
from prime_rl.orchestrator.filters import build_judge
from prime_rl.orchestrator.teacher import Teacher
from prime_rl.utils.vf import build_sampling_args
from rollouts.training.agent_integration import Rollout, rollout_to_samples
from rollouts.training.environments import Environment
from rollouts.training.rollout_gen.async_rollout_manager import (
    AsyncRolloutManager,
    Freshness,
    GroupDropped,
    sample_seed,
)
from rollouts.training.types import RolloutConfig, Sample, Status

# The engine's trouble, not the prompt's: such a prompt is not held against.
ENGINE_ERRORS = ("APIConnectionError", "APITimeoutError", "InternalServerError", "RateLimitError", "ModelError")


class GroupGenerator:
    """Makes one group: runs the rollouts of a prompt, leaves out those that failed, turns the others into samples.

    A failed rollout is tried `max_retries` times more. A prompt none of whose rollouts succeed is dropped as `POISON`,
    and the buffer draws it no more. Failures are counted by type until `take_errors`.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        environments: Mapping[str, Environment],
        clients: Sequence[Any],
        live_version: Callable[[], int],
        teacher: Teacher | None = None,
        attendance: Attendance | None = None,
    ) -> None:
        self.config = config
        self.teacher = teacher
        self.attendance = attendance or Attendance(len(clients))
        self.environments = environments
        self.clients = clients
        self.last_error: str | None = None
        self._errors: Counter[str] = Counter()
        self._live_version = live_version

    async def __call__(self, group_index: int, prompt: Prompt) -> list[Sample]:
        """Samples of the group; raises `GroupDropped` when fewer rollouts succeed than can be compared."""

        async def generate(server: int) -> list[Sample]:
            return await self._generate(group_index, prompt, self.clients[server])

        return await self.attendance.run(group_index, generate)

    async def _generate(self, group_index: int, prompt: Prompt, client: Any) -> list[Sample]:
        config, version = self.config, self._live_version()
        seed = config.seed if config.sampling.seed is None else config.sampling.seed
        args = [
            build_sampling_args(config.sampling, sample_seed(seed, group_index, index))
            for index in range(config.rollouts_per_example)
        ]
        environment = self.environments[prompt["env"]]
        rollouts = await environment.run_group(prompt["row"], client, config.model.name, args, config.max_retries)
        groups = [self._to_samples(r, prompt["env"], group_index, i, version) for i, r in enumerate(rollouts)]
        good = [samples for samples in groups if samples]
        if len(good) < min(2, config.rollouts_per_example):
            self._give_up(prompt, rollouts)
        return await self._teach([sample for samples in good for sample in samples], prompt, client)

    def take_errors(self) -> dict[str, int]:
        """Failed rollouts by type of error since the last call."""
        errors, self._errors = dict(self._errors), Counter()
        return errors

    async def _teach(self, samples: list[Sample], prompt: Prompt, client: Any) -> list[Sample]:
        """The samples with what the teacher says of them; those it cannot speak of are left out."""
        if self.teacher is not None:
            samples = await self.teacher.teach(samples, prompt["env"], prompt["row"], client)
            if len({sample.index for sample in samples}) < min(2, self.config.rollouts_per_example):
                self.last_error = self.teacher.last_error
                raise GroupDropped("too few rollouts")
        for sample in samples:
            sample.metadata.pop("asked", None)
        return samples

    def _to_samples(self, rollout: Rollout, env: str, group_index: int, index: int, version: int) -> list[Sample]:
        """Samples of one rollout; a rollout that cannot be trained on becomes a failed one, and no samples."""
        if self.config.buffer.skip_verification:
            rollout.reward = 0.0
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
                sample.metadata = {**sample.metadata, "env": env, **_facts(rollout)}
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
            raise GroupDropped(POISON)
        raise GroupDropped("too few rollouts")


def build_rollouts(config: OrchestratorConfig, buffer: PromptBuffer, generator: GroupGenerator) -> AsyncRolloutManager:
    """The stream of batches, with (max_async_level + 1) batches' worth of slots, or more where it over-samples."""
    if config.max_concurrent is not None and config.max_concurrent < config.rollouts_per_example:
        raise ValueError(
            f"max_concurrent = {config.max_concurrent} has no room for one group of "
            f"rollouts_per_example = {config.rollouts_per_example}: raise it"
        )
    in_order = config.oversampling_factor == 1
    return AsyncRolloutManager(
        buffer,
        RolloutConfig(config.num_groups, config.rollouts_per_example),
        generate_group=generator,
        judge=build_judge(config.buffer),
        on_outcomes=buffer.learn,
        slots=math.ceil((config.max_async_level + config.oversampling_factor) * config.num_groups - 1e-9),
        max_running=config.max_concurrent and config.max_concurrent // config.rollouts_per_example,
        in_order=in_order,
        freshness=Freshness(None if in_order else config.max_async_level, config.max_off_policy_steps),
        max_batches=config.max_steps,
    )


def _facts(rollout: Rollout) -> dict[str, Any]:
    """What the metrics want to know of a rollout."""
    return {
        "example_id": rollout.example_id,
        "metrics": rollout.metrics,
        "num_turns": rollout.num_turns,
        "generation_ms": rollout.generation_ms,
        "scoring_ms": rollout.scoring_ms,
    }
