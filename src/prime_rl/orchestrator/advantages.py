"""Advantages of a batch: length penalties and baselines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean

from prime_rl.orchestrator.config import AdvantageConfig, LengthPenaltyConfig, OrchestratorConfig
from rollouts.training.advantages import assign_advantages, assign_role_advantages, compute_overlong_penalty
from rollouts.training.objectives import Baseline
from rollouts.training.types import Sample


def build_advantages(
    config: OrchestratorConfig, baselines: dict[str, float] | None = None
) -> Callable[[list[Sample]], None]:
    """Build the function that sets the advantages of a batch, and the objectives of samples of environments that have
    one of their own. `baselines` are running means by role, which it changes.

    The log-probs of a reference that is part of the reward are removed: the trainer does not use them.
    """
    baselines = {} if baselines is None else baselines
    whole = build_estimator(config.advantage, config, baselines)
    envs = [env for env in config.env if env.advantage is not None]
    own = {str(env.name): build_estimator(env.advantage, config, baselines) for env in envs}
    with_loss = {str(env.name) for env in config.env if env.loss is not None}

    def assign(samples: list[Sample]) -> None:
        by_env: dict[str | None, list[Sample]] = defaultdict(list)
        for sample in samples:
            env = str(sample.metadata.get("env"))
            sample.objective = env if env in with_loss else None
            if sample.reference_weight:  # its reward is ignored, also in statistics of the batch
                sample.advantages = [0.0] * len(sample.tokens)
            else:
                by_env[env if env in own else None].append(sample)
        for name, part in by_env.items():
            (whole if name is None else own[name])(part)
        for sample in samples if config.reward_kl_key else ():
            sample.teacher_logprobs = sample.teacher_table = None

    return assign


def build_estimator(
    advantage: AdvantageConfig | None, config: OrchestratorConfig, baselines: dict[str, float]
) -> Callable[[list[Sample]], None]:
    """Build one advantage estimator; None: the reward is the advantage."""
    penalty, max_tokens = config.length_penalty, config.sampling.max_tokens
    if advantage is not None and (custom := advantage.import_custom()) is not None:
        return partial(assign_advantages, custom=custom)
    if advantage is not None and advantage.rewards:
        return partial(assign_advantages, components=advantage.rewards)
    baseline: Baseline = "none"
    if advantage is not None:
        if advantage.baseline == "role":
            return partial(assign_role_advantages, baselines=baselines, decay=advantage.decay)
        baseline = "length_weighted" if advantage.length_weighted_mean else advantage.baseline
    return partial(
        assign_advantages,
        baseline=baseline,
        std="none" if advantage is None else advantage.std,
        shape=partial(shape_rewards, config=penalty, seq_len=config.seq_len, max_tokens=max_tokens),
        kl_coef=0.0 if advantage is None else advantage.kl_coef,
    )


def shape_rewards(
    rewards: Sequence[float],
    completions: Sequence[Sequence[int]],
    config: LengthPenaltyConfig | None,
    *,
    seq_len: int,
    max_tokens: int | None = None,
) -> list[float]:
    """Rewards r of one group after the penalty for n sampled tokens, m of them in the longest completion, c = coef:

    relative   r / (1 + c n / mean(n)); r (1 + c n / mean(n)) if r < 0  wrong answers (r = 0) are not penalized
    linear     r - c p min(n / seq_len, 1),  p = mean(r) within 0..1   no penalty while a prompt is unsolved
    overlong   r - c clip((m - (max_tokens - window)) / window, 0, 1)  DAPO, 2503.14476, equation 13

    `completions` are the lengths of the completions of each rollout; `max_tokens` limits each of them. A rollout of
    several samples may have more than `seq_len` tokens.
    """
    if config is None:
        return list(rewards)
    lengths = [sum(rollout) for rollout in completions]
    if config.type == "relative":
        mean = fmean(lengths) or 1.0
        factors = [1 + config.coef * n / mean for n in lengths]
        # Dividing a negative reward would reward length.
        return [r * factor if r < 0 else r / factor for r, factor in zip(rewards, factors, strict=True)]
    if config.type == "linear":
        solved = min(max(fmean(rewards), 0.0), 1.0)
        return [r - config.coef * solved * min(n / seq_len, 1) for r, n in zip(rewards, lengths, strict=True)]
    assert max_tokens is not None, "validated by the config"
    costs = [compute_overlong_penalty(max(rollout, default=0), max_tokens, config.window) for rollout in completions]
    return [r - config.coef * cost for r, cost in zip(rewards, costs, strict=True)]
