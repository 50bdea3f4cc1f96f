"""Step metrics and sample records."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from statistics import fmean, pstdev
from typing import Any

from prime_rl.orchestrator.distillation.context import first_user_text
from rollouts.training.advantages import split_groups
from rollouts.training.metrics import reaches
from rollouts.training.rollout_gen.groups import DropReason, GroupBuffer
from rollouts.training.rollout_gen.token_ledger import TokenLedger
from rollouts.training.types import Sample, Status

Rollout = list[Sample]


def drop_overlong(samples: list[Sample], seq_len: int) -> list[Sample]:
    """Keep samples of at most `seq_len` tokens. Longer ones are marked truncated, never cut."""
    for sample in samples:
        if len(sample.tokens) > seq_len:
            sample.status, sample.stop_reason = Status.TRUNCATED, "seq_len"
    return [sample for sample in samples if len(sample.tokens) <= seq_len]


def compute_batch_metrics(samples: list[Sample], *, step: int, version: int, num_kept: int) -> dict[str, float]:
    """Metrics of one batch. Every rollout counts once, and in self-play every seat of it; `batch/overlong` is the share
    of samples over seq_len."""
    groups = split_groups(samples)
    rollouts = [rollout for group in groups for rollout in group]
    rewards = [[rollout[0].reward for rollout in group] for group in groups]
    scores = [reward for group in rewards for reward in group]
    metrics: dict[str, float] = {
        **_summary("reward", scores),
        "reward/std": pstdev(scores),
        "frac_reward_zero_std": fmean(max(group) == min(group) for group in rewards),
        "batch/solve_none": fmean(reaches(0, max(group)) for group in rewards),
        "batch/solve_all": fmean(reaches(min(group), 1) for group in rewards),
        "batch/effective_batch_size": fmean(max(group) > min(group) for group in rewards),
        "batch/async_level": float(max(step - 1 - version, 0)),
        "batch/overlong": 1.0 - num_kept / len(samples),
        "progress/problems": float(len({sample.group_index for sample in samples})),
        "progress/samples": float(len({(sample.group_index, sample.index) for sample in samples})),
        "progress/tokens": float(sum(len(sample.tokens) for sample in samples)),
        "progress/ckpt_step": float(version),
    }
    staleness = [max(step - 1 - version_of, 0) for sample in samples for _, version_of in sample.versions]
    for name, values in [*_lengths(rollouts), ("batch/off_policy_level", map(float, staleness))]:
        metrics |= _summary(name, list(values))
    return metrics | _by_environment(rollouts) | _environment_metrics(rollouts)


def compute_error_metrics(errors: dict[str, int], num_failed: int, num_rollouts: int) -> dict[str, float]:
    """Failed rollouts as a share of all (`error/mean`), and rollouts with an error by its type.

    Environments of verifiers give a rollout whose reward function raised the reward 0: it has an error and is trained.
    """
    share = num_failed / (num_rollouts + num_failed) if num_rollouts + num_failed else 0.0
    return {"error/mean": share, **{f"error/{kind}": float(count) for kind, count in sorted(errors.items())}}


def compute_group_metrics(groups: GroupBuffer, restarts: Mapping[str, int]) -> dict[str, float]:
    """Group counts since the start: drawn = trained + filtered + quarantined + in flight."""
    quarantined = groups.drops[DropReason.ALL_FAILED]
    return {
        "groups/drawn": float(groups.next_group_index),
        "groups/trained": float(groups.num_emitted),
        "groups/filtered": float(groups.drops.total() - quarantined),
        "groups/quarantined": float(quarantined),
        "groups/in_flight": float(groups.num_open),
        **{f"drops/{reason}": float(count) for reason, count in groups.drops.items()},
        **{f"restarts/{reason}": float(count) for reason, count in restarts.items()},
    }


def compute_token_metrics(tokens: TokenLedger, ready: Iterable[Sample]) -> dict[str, float]:
    """Sampled tokens since the start: generated = trained + dropped + unscored + in flight."""
    return {
        "tokens/generated": float(tokens.generated),
        "tokens/trained": float(tokens.trained),
        "tokens/dropped": float(tokens.dropped.total()),
        "tokens/unscored": float(tokens.unscored),
        "tokens/in_flight": float(tokens.count_in_flight(ready)),
        **{f"tokens/dropped/{reason}": float(count) for reason, count in tokens.dropped.items()},
    }


def sample_rows(samples: list[Sample]) -> Iterator[dict[str, Any]]:
    """One row per sample for `samples.jsonl`."""
    for sample in samples:
        assert not isinstance(sample.prompt, dict), "only programs of the library have rows as prompts"
        yield {
            "env": sample.metadata.get("env"),
            "group_index": sample.group_index,
            "index": sample.index,
            **({} if sample.seat is None else {"seat": sample.seat}),
            "prompt": sample.prompt,
            "prompt_text": first_user_text(sample.prompt),
            "completion": sample.response,
            "answer": sample.metadata.get("answer"),
            "info": sample.metadata.get("info"),
            "reward": sample.reward,
            "advantage": sample.advantages[sample.loss_mask.index(1.0)] if sample.advantages else None,
            "metrics": sample.metadata.get("metrics", {}),
            "status": sample.status.value,
            "stop_reason": sample.stop_reason,
            "error": sample.error,
            "versions": sample.versions,
            "tokens": sample.tokens,
            "loss_mask": [int(mask) for mask in sample.loss_mask],
            "logprobs": sample.inference_logprobs,
            **({"feedback": sample.metadata["feedback"]} if "feedback" in sample.metadata else {}),
            **({"teacher_logprobs": sample.teacher_logprobs} if sample.teacher_logprobs is not None else {}),
        }


def _lengths(rollouts: list[Rollout]) -> Iterator[tuple[str, Iterable[float]]]:
    for name in ("num_turns", "generation_ms", "scoring_ms"):
        yield name, [float(rollout[0].metadata.get(name, 0.0)) for rollout in rollouts]
    yield "seq_len", [float(sum(len(s.tokens) for s in rollout)) for rollout in rollouts]
    yield "completion_len", [float(sum(s.response_length for s in rollout)) for rollout in rollouts]
    yield "prompt_len", [float(rollout[0].loss_mask.index(1.0)) for rollout in rollouts]
    yield "is_truncated", [float(any(s.status == Status.TRUNCATED for s in rollout)) for rollout in rollouts]


def _by_environment(rollouts: list[Rollout]) -> dict[str, float]:
    by_env: dict[str, list[float]] = defaultdict(list)
    by_seat: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        by_env[str(rollout[0].metadata.get("env"))].append(rollout[0].reward)
        if rollout[0].seat is not None:
            by_seat[f"{rollout[0].metadata.get('env')}/{rollout[0].seat}"].append(rollout[0].reward)
    shares = {f"batch/{env}": len(rewards) / len(rollouts) for env, rewards in by_env.items()}
    return shares | {f"reward/{env}": fmean(rewards) for env, rewards in (by_env | by_seat).items()}


def _environment_metrics(rollouts: list[Rollout]) -> dict[str, float]:
    """Mean of each environment metric over the rollouts that report it; those of seats of a rollout are the same.

    NaN and infinity, which are None in groups of a checkpoint, mean that a metric does not apply to a rollout.
    """
    values: dict[str, list[float]] = defaultdict(list)
    for first in {(rollout[0].group_index, rollout[0].index): rollout[0] for rollout in rollouts}.values():
        for name, value in first.metadata.get("metrics", {}).items():
            if value is not None and math.isfinite(value):
                values[f"metrics/{name}"].append(value)
    return {name: fmean(found) for name, found in values.items()}


def _summary(name: str, values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"{name}/mean": fmean(values), f"{name}/max": max(values), f"{name}/min": min(values)}
