"""Generation of one prompt group: rollouts, retries, teacher log-probs and samples."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec

from prime_rl.orchestrator.buffer import Prompt, PromptBuffer
from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.orchestrator.distillation.teacher import SkipReason, Teacher
from prime_rl.orchestrator.filters import build_group_filter
from prime_rl.orchestrator.server_pool import ServerPool
from prime_rl.runtime.redaction import redact_fields
from prime_rl.utils.vf import build_sampling_args
from rollouts.training.agent_integration import Rollout, describe_completion, rollout_to_samples
from rollouts.training.environments import Environment
from rollouts.training.environments.protocol import INFRASTRUCTURE_ERRORS
from rollouts.training.rollout_gen.async_rollout_manager import (
    AsyncRolloutManager,
    GroupDropped,
    StalenessLimits,
    sample_seed,
)
from rollouts.training.rollout_gen.groups import DropReason
from rollouts.training.rollout_gen.token_ledger import TokenLedger, count_sampled
from rollouts.training.types import RolloutConfig, Sample, Status

MAX_EXPECTED_BYTES = 16 * 1024
"""Longer answers and infos of rows, encoded, are not recorded with each of their rollouts."""


@dataclass(eq=False)
class GroupGenerator:
    """Generates one group: runs the rollouts of a prompt, drops failed ones and converts the others to samples.

    A failed rollout is retried `max_retries` times. A group without any success is dropped as `ALL_FAILED`, which
    quarantines its prompt. Errors are counted by type until `take_errors`.
    """

    config: OrchestratorConfig
    environments: Mapping[str, Environment]
    servers: ServerPool
    teacher: Teacher | None = None
    tokens: TokenLedger = field(default_factory=TokenLedger, init=False)
    last_error: str | None = field(default=None, init=False)
    _errors: Counter[str] = field(default_factory=Counter, init=False)
    _num_failed: int = field(default=0, init=False)

    async def __call__(self, group_index: int, prompt: Prompt) -> list[Sample]:
        """Samples of the group; raises `GroupDropped` if too few rollouts succeed to be compared."""

        async def generate(server: int) -> list[Sample]:
            return await self._generate(group_index, prompt, self.servers.clients[server])

        return await self.servers.run(group_index, generate)

    @cached_property
    def _replays_support(self) -> bool:
        """As the config says, once instead of for every rollout."""
        return self.config.replays_support

    async def _generate(self, group_index: int, prompt: Prompt, client: Any) -> list[Sample]:
        version = self.servers.version.live
        config, sampling = self.config, self.config.sampling
        seed = config.seed if sampling.seed is None else sampling.seed
        args = [
            build_sampling_args(sampling, sample_seed(seed, group_index, index), return_support=self._replays_support)
            for index in range(config.rollouts_per_example)
        ]
        self.tokens.drop(group_index, DropReason.INTERRUPTED)  # of an earlier try, whose server was lost
        environment = self.environments[prompt["env"]]
        rollouts = await environment.run_group(prompt["row"], client, config.model.name, args, config.max_retries)
        num_sampled = sum(count_generated(rollout) for rollout in rollouts)
        self.tokens.receive(group_index, num_sampled)
        groups = [self._to_samples(r, prompt["env"], group_index, i, version) for i, r in enumerate(rollouts)]
        good = [samples for samples in groups if samples]
        samples = [sample for samples in good for sample in samples]
        self.tokens.leave_unscored(group_index, num_sampled - count_sampled(samples))
        if len(good) < min(2, config.rollouts_per_example):
            raise GroupDropped(find_drop_reason(rollouts))
        return await self._add_teacher_logprobs(group_index, samples, prompt, client)

    def take_errors(self) -> tuple[dict[str, int], int]:
        """Rollouts with an error, by its type, and how many of them failed, since the last call."""
        taken = dict(self._errors), self._num_failed
        self._errors, self._num_failed = Counter(), 0
        return taken

    async def _add_teacher_logprobs(
        self, group_index: int, samples: list[Sample], prompt: Prompt, client: Any
    ) -> list[Sample]:
        """Add teacher log-probs; drop samples that the teacher cannot score."""
        if self.teacher is not None:
            num_sampled = count_sampled(samples)
            samples = await self.teacher.score_group(samples, prompt["env"], prompt["row"], client)
            self.tokens.leave_unscored(group_index, num_sampled - count_sampled(samples))
            if len({sample.index for sample in samples}) < min(2, self.config.rollouts_per_example):
                error = self.teacher.last_error
                assert error is not None, "it left out a sample"
                self.last_error = str(error)
                is_outage = error.reason == SkipReason.SERVER
                raise GroupDropped(DropReason.ENGINE_ERROR if is_outage else DropReason.TOO_FEW)
        for sample in samples:
            sample.metadata.pop("chat_request", None)
            sample.metadata.pop("transcript", None)
            # The text is used only in records, batches and checkpoints from here on: redact secrets.
            sample.prompt, sample.response, sample.error = redact_fields([sample.prompt, sample.response, sample.error])
            sample.metadata = redact_fields(sample.metadata)
        return samples

    def _to_samples(self, rollout: Rollout, env: str, group_index: int, index: int, version: int) -> list[Sample]:
        """Samples of one rollout. A rollout that cannot be trained on is marked as failed and gives none."""
        if rollout.seat_rewards and not rollout.num_turns:
            return []  # a game that ended before the policy's first move
        is_zeroed = self.config.zero_truncated_completions and rollout.status == Status.TRUNCATED
        if is_zeroed or self.config.buffer.skip_verification:
            rollout.reward, rollout.seat_rewards = 0.0, {}
        try:
            samples = [] if rollout.failed else rollout_to_samples(rollout, group_index=group_index, index=index)
            if not rollout.failed and not samples:
                raise ValueError("the server returned no token ids and log-probs: it must support return_token_ids")
            if self._replays_support and not all(sample.sampling_support for sample in samples):
                raise ValueError(
                    f"the server did not return the tokens that sampling.{self.config.sampling.truncation} left: only "
                    "the embedded engine does; unset it, or accept biased ratios with sampling_support_replay = false"
                )
            for sample in samples:
                sample.validate()
                if not sample.versions:  # the server does not report versions: it had at least this one
                    sample.versions = [(sample.loss_mask.index(1.0), version)]
                sample.metadata = {**sample.metadata, "env": env, **_rollout_metadata(rollout)}
                if is_zeroed:
                    sample.metadata["zeroed"] = True
                if self.teacher is not None:
                    sample.metadata["transcript"] = describe_completion(rollout.completion)
        except ValueError as error:
            rollout.status, rollout.error_type, rollout.error = Status.FAILED, "InvalidRollout", str(error)
            samples = []
        if rollout.error is not None:
            self._errors[rollout.error_type or "Error"] += 1
            self._num_failed += rollout.failed
            self.last_error = f"{rollout.error_type}: {rollout.error}"
        return samples


def build_rollouts(config: OrchestratorConfig, buffer: PromptBuffer, generator: GroupGenerator) -> AsyncRolloutManager:
    """Build the batch stream with the slots of `count_slots`."""
    if config.max_concurrent is not None and config.max_concurrent < config.rollouts_per_example:
        raise ValueError(
            f"max_concurrent = {config.max_concurrent} is smaller than one group of "
            f"rollouts_per_example = {config.rollouts_per_example}: raise it"
        )
    in_order = config.oversampling_factor == 1
    return AsyncRolloutManager(
        buffer,
        RolloutConfig(config.num_groups, config.rollouts_per_example),
        generate_group=generator,
        group_filter=build_group_filter(config.buffer),
        on_outcomes=buffer.record_outcomes,
        slots=count_slots(config),
        max_running=config.max_concurrent and config.max_concurrent // config.rollouts_per_example,
        in_order=in_order,
        staleness_limits=StalenessLimits(None if in_order else config.max_async_level, config.max_off_policy_steps),
        max_batches=config.max_steps,
        tokens=generator.tokens,
    )


def count_slots(config: OrchestratorConfig) -> int:
    """Groups that may be open at once: (max_async_level + oversampling_factor) batches' worth."""
    return math.ceil((config.max_async_level + config.oversampling_factor) * config.num_groups - 1e-9)


def find_drop_reason(rollouts: list[Rollout]) -> DropReason:
    """Why a group without enough successful rollouts is dropped; engine errors do not quarantine a prompt at once."""
    kinds = {rollout.error_type for rollout in rollouts if rollout.failed}
    if kinds and kinds <= INFRASTRUCTURE_ERRORS:
        return DropReason.ENGINE_ERROR
    return DropReason.ALL_FAILED if all(rollout.failed for rollout in rollouts) else DropReason.TOO_FEW


def count_generated(rollout: Rollout) -> int:
    """Sampled tokens of a rollout, failed attempts included; those of its turns if its client does not count."""
    return max(rollout.num_sampled, sum(len(turn.completion_ids) for turn in rollout.turns))


def _rollout_metadata(rollout: Rollout) -> dict[str, Any]:
    """Rollout fields that metrics and `samples.jsonl` need."""
    expected = {"answer": rollout.answer, "info": rollout.info}
    plain = {key: msgspec.to_builtins(value, enc_hook=str) for key, value in expected.items() if value is not None}
    return {
        **{key: value for key, value in plain.items() if len(msgspec.json.encode(value)) <= MAX_EXPECTED_BYTES},
        **({} if rollout.feedback is None else {"feedback": rollout.feedback}),
        "example_id": rollout.example_id,
        "metrics": rollout.metrics,
        "num_turns": rollout.num_turns,
        "generation_ms": rollout.generation_ms,
        "scoring_ms": rollout.scoring_ms,
    }
