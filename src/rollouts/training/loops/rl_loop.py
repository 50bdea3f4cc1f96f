"""RL training loop in one process: rollouts, advantages, optimizer step, weight update of the engines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import msgspec

from rollouts.training.advantages import (
    GroupAdvantages,
    compute_advantages,
    compute_batch_advantages,
    compute_custom_advantages,
    split_positions,
)
from rollouts.training.datasets.data_buffer import DataBuffer
from rollouts.training.loops.stepping import (
    Row,
    begin_run,
    check_batch_size,
    continues_checkpoint,
    is_due,
    rank_of,
    run_step,
    state_of,
    steps_of,
)
from rollouts.training.metrics import MetricsLogger
from rollouts.training.rollout_gen.async_rollout_manager import AsyncRolloutManager
from rollouts.training.types import RLTrainingConfig, RolloutBatch, Sample, TrainingBackend, as_plain
from rollouts.training.weight_sync import InferenceEngine, sync_weights_to_engines

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["compute_advantages", "compute_reward", "prepare_grpo_batch", "run_rl_training"]


async def run_rl_training(
    backend: TrainingBackend,
    data_buffer: DataBuffer,
    rollout_manager: AsyncRolloutManager,
    inference_engines: Sequence[InferenceEngine],
    config: RLTrainingConfig,
    metrics_logger: MetricsLogger | None = None,
) -> list[Row]:
    """Take `config.num_steps` steps; returns the metrics of each, with `mean_reward`, `max_reward`, `min_reward`.

        prompts --> rollouts --> advantages --> forward_backward --> optim_step --> engines, log, checkpoint
                       ^                                                               |
                       +------------------ weights, every sync_every steps ------------+

    Rewards come from the config's `reward_fn`, else from `compute_reward`. A backend restored from a checkpoint
    continues after the last trained rollouts; any other run begins with the manager as it is. The weights that a run
    starts from are first published to the engines.
    """
    check_run(data_buffer, rollout_manager, inference_engines, config)
    if rollout_manager.config.generate_fn is not None:  # another generator decides how many samples a group has
        check_batch_size(backend, rollout_manager.config.batch_size * rollout_manager.config.n_samples_per_prompt)
    if continues_checkpoint(backend, is_new_run=rollout_manager.step_count == 0) and "rl" in state_of(backend):
        rollout_manager.load_state_dict(state_of(backend)["rl"])
    begin_run(backend)
    rollout_manager.reward_fn = rollout_manager.reward_fn or compute_reward  # before filters judge the rewards
    rows: list[Row] = []
    steps = steps_of(backend, config)
    async with AsyncExitStack() as stack:
        await publish(backend, inference_engines, steps[0] - 1, {})  # they may hold the weights of another run
        rollout_manager.release(rollout_manager.step_count)  # of an interrupted run: trained, or lost
        if rank_of(backend)[0] == 0:
            await stack.enter_async_context(rollout_manager)
        for step in steps:
            batch = await next_batch(backend, rollout_manager)
            items = list(zip(batch.samples, batch_advantages(batch, batch.rewards, config), strict=True))
            row = await run_step(backend, items, collate_grpo, config.micro_batch_size)
            row |= summarize_rewards(batch.rewards)
            rows.append(row)
            if step % config.sync_every == 0 or not inference_engines:
                await publish(backend, inference_engines, step, row)
                rollout_manager.release(rollout_manager.step_count)
            if metrics_logger is not None and is_due(step, config.log_every, steps) and rank_of(backend)[0] == 0:
                metrics_logger.log(row, step)
            if is_due(step, config.checkpoint_every, steps):
                state_of(backend)["rl"] = rollout_manager.state_dict()
                await backend.save_checkpoint(step, row)
    return rows


def compute_reward(sample: Sample) -> float:
    """1 or 0 by `metadata["correct"]`, unless it is missing or None, else the sample's reward.

    `ValueError` for text and NaN, which are true whatever they say.
    """
    correct = sample.metadata.get("correct")
    if correct is None:
        return sample.reward
    if isinstance(correct, str) or correct != correct:
        raise ValueError(f'metadata["correct"] is {correct!r}: set it to True, False, or None if it is unknown')
    return float(bool(correct))


def prepare_grpo_batch(batch: RolloutBatch, rewards: Sequence[float], config: RLTrainingConfig) -> dict[str, Tensor]:
    """Padded `input_ids`, shifted `labels` and `loss_mask`, and `advantages` [batch] of the rewards."""
    samples = batch.samples or [
        Sample(prompt="", tokens=tokens, loss_mask=mask)
        for tokens, mask in zip(batch.tokens, batch.loss_masks, strict=True)
    ]
    return collate_grpo(list(zip(samples, batch_advantages(batch, rewards, config), strict=True)))


def batch_advantages(batch: RolloutBatch, rewards: Sequence[float], config: RLTrainingConfig) -> list[float]:
    """One advantage per sample: of `advantage_fn`, reward - baseline, or group-relative by `estimator`.

    Those of groups compare rollouts as `split_groups` nests them: all samples of a rollout have the same.
    """
    if len(rewards) != len(batch.tokens):
        raise ValueError(f"{len(rewards)} rewards for {len(batch.tokens)} samples: give one each")
    if not all(map(math.isfinite, rewards)):
        raise ValueError(f"rewards {list(rewards)} contain a value that is not finite: fix the reward function")
    groups = split_batch(batch)
    if config.advantage_fn is not None:
        table = custom_advantages(config.advantage_fn, batch, rewards, groups)
    else:
        has_groups = any(len(group) > 1 for group in groups)
        estimator = config.estimator or ("mean" if has_groups and not config.baseline else "baseline")
        if estimator == "baseline":
            return compute_advantages(rewards, baseline=config.baseline)
        table = compute_batch_advantages(
            [[rewards[rollout[0]] for rollout in group] for group in groups],
            baseline=estimator,  # type: ignore[arg-type]
            std="group" if config.advantage_std else "none",
            lengths=[[sum(batch.response_lengths[i] for i in rollout) for rollout in group] for group in groups],
        )
    advantages = [0.0] * len(rewards)
    for group, values in zip(groups, table, strict=True):
        for rollout, value in zip(group, values, strict=True):
            for i in rollout:
                advantages[i] = value
    return advantages


def split_batch(batch: RolloutBatch) -> list[list[list[int]]]:
    """`split_groups` of the positions in a batch; a sample without an index is a rollout of its own."""
    groups = batch.group_indices or range(len(batch.tokens))
    samples = batch.samples or [Sample(prompt="")] * len(batch.tokens)
    return split_positions(
        (group, sample.seat, (i,) if sample.index is None else sample.index)
        for i, (group, sample) in enumerate(zip(groups, samples, strict=True))
    )


def custom_advantages(
    function: GroupAdvantages, batch: RolloutBatch, rewards: Sequence[float], groups: list[list[list[int]]]
) -> list[list[float]]:
    """`function` of every group: of the last sample of each rollout, with its reward."""
    if not batch.samples:
        raise ValueError("advantage_fn needs the samples of a batch, which has none")
    for sample, reward in zip(batch.samples, rewards, strict=True):
        sample.reward = reward
    return [compute_custom_advantages(function, [batch.samples[rollout[-1]] for rollout in group]) for group in groups]


def collate_grpo(items: Sequence[tuple[Sample, float]]) -> dict[str, Tensor]:
    """Samples with their advantages as a padded batch; per-token advantages of all samples take precedence."""
    import torch

    from rollouts.training.batching import pad_samples

    batch = pad_samples([sample for sample, _ in items])
    batch.setdefault("advantages", torch.tensor([advantage for _, advantage in items]))
    return batch


async def next_batch(backend: TrainingBackend, rollout_manager: AsyncRolloutManager) -> RolloutBatch:
    """Scored groups from rank 0's manager, the same on every rank."""
    rank, size = rank_of(backend)
    payload = b""
    if rank == 0:
        batch = await rollout_manager.generate_batch()
        if rollout_manager.reward_fn is compute_reward:  # groups that were generated before may have no reward
            batch.rewards = [compute_reward(sample) for sample in batch.samples]
        if size == 1:
            return batch
        rewards = list(map(float, batch.rewards))
        batch = RolloutBatch.from_samples([sample.with_floats() for sample in batch.samples], batch.metadata)
        batch.rewards = rewards
        payload = msgspec.msgpack.encode(batch, enc_hook=as_plain)
    shared: Any = backend  # a backend of several ranks can broadcast
    return msgspec.msgpack.decode(await shared.broadcast(payload), type=RolloutBatch)


async def publish(backend: TrainingBackend, engines: Sequence[InferenceEngine], step: int, row: Row) -> None:
    """Update the engines to version `step`, from published weights if the backend supports them, else a checkpoint."""
    if not engines:
        return
    export = getattr(backend, "publish_weights", None)
    path = await (export(step) if export is not None else backend.save_checkpoint(step, row))
    if rank_of(backend)[0] == 0:
        await sync_weights_to_engines(engines, str(path))


def summarize_rewards(rewards: Sequence[float]) -> Row:
    """Mean, largest and smallest."""
    return {"mean_reward": sum(rewards) / len(rewards), "max_reward": max(rewards), "min_reward": min(rewards)}


def check_run(
    data_buffer: DataBuffer, manager: AsyncRolloutManager, engines: Sequence[InferenceEngine], config: RLTrainingConfig
) -> None:
    """Raise `ValueError` for inconsistent arguments."""
    if manager.data_buffer is not data_buffer:
        raise ValueError("rollout_manager draws from another DataBuffer than data_buffer: pass the same one")
    needed = config.sync_every * manager.config.batch_size
    if manager.slots is not None and engines and manager.slots < needed:
        raise ValueError(
            f"slots {manager.slots} are used up before the engines get new weights after {config.sync_every} steps: "
            f"use at least {needed}, or a smaller sync_every"
        )
    generates_one = manager.config.generate_fn is not None and manager.config.n_samples_per_prompt == 1
    if generates_one and config.estimator not in (None, "baseline"):
        raise ValueError(
            f"estimator {config.estimator!r} compares the samples of a prompt, so with n_samples_per_prompt = 1 every "
            "advantage is 0: use at least 2, or the estimator 'baseline'"
        )
