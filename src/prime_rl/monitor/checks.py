"""Health checks of a run: metrics that exceed a threshold by more than their noise, each with example rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from prime_rl.monitor.run_kind import Kind, RunKind
from prime_rl.monitor.series import Series
from prime_rl.monitor.trend import MIN_EVIDENCE, RECENT, exceeds

WARM_UP = 2
"""Initial steps excluded from timing and checks: caches fill and nothing overlaps yet."""

Query = Mapping[str, Any]


@dataclass(frozen=True)
class Check:
    """One health check. `state` is ok, warning, or waiting (too few steps); `query` selects example rollouts."""

    name: str
    label: str
    state: str
    text: str
    advice: str | None = None
    query: Query | None = None


@dataclass(frozen=True)
class _Limit:
    """A metric that should stay below `limit`, or above 1 - `limit`; `{}` in `text` is its value."""

    metric: str
    label: str
    limit: float
    text: str
    advice: str
    query: Query | None = None
    is_share: bool = True
    above: bool = False


TRUNCATED = {"status": "truncated", "sort": "tokens"}
FAILED = {"status": "failed"}
LARGEST_MISMATCH = {"view": "tokens", "color": "trainer"}

LIMITS = (
    _Limit("is_truncated/mean", "Truncation", 0.1, "{} of the rollouts are cut off at the token limit",
           "raise orchestrator.sampling.max_tokens (and seq_len)", TRUNCATED),
    _Limit("error/mean", "Errors", 0.02, "{} of the rollouts fail",
           "see logs/orchestrator.log and their errors", FAILED),
    _Limit("is_masked/mean", "Trust region", 0.2, "{} of the tokens are outside the trust region and masked",
           "lower max_async_level or the learning rate", {"view": "tokens", "color": "version"}),
    _Limit("batch/padding_ratio", "Padding", 0.2, "{} of what ranks compute is padding",
           "use fewer ranks or larger batches"),
    _Limit("mismatch_kl/mean", "Equal log-probs", 0.05,
           "KL of {} between engine and trainer",
           "serve with inference.exact, lower max_async_level, or lower the learning rate", LARGEST_MISMATCH, False),
)  # fmt: skip

VARIED_REWARDS = _Limit(
    "batch/effective_batch_size", "Varied rewards", 0.5, "{} of the groups have different rewards",
    "choose prompts of medium difficulty for the policy: buffer.online_difficulty_filtering, easy and "
    "hard thresholds, or more rollouts_per_example", {"equal": True}, above=True,
)  # fmt: skip
"""Groups whose rewards are all equal have no advantages, if rewards are compared within groups."""

NOTHING_SOLVED = (
    "compare completions with expected answers: where they agree, the reward function does not find the answer, else "
    "the task is too hard: rewards for partial success, easier prompts, or SFT first"
)


def run_checks(series: Mapping[str, Series], kind: RunKind) -> list[Check]:
    """The checks of the metrics that a run has (all processes joined)."""
    checks = [check for limit in LIMITS if (check := _check(series, limit, kind)) is not None]
    rewards = _check(series, VARIED_REWARDS, kind) if kind.trains_on_rewards and kind.compares_group else None
    if rewards is None:
        return checks
    if rewards.state == "warning":
        rewards = replace(rewards, text=f"only {rewards.text}{_describe_equal_groups(series, kind)}")
        if _recent_mean(series.get("batch/solve_none")) == 1:
            rewards = replace(rewards, advice=NOTHING_SOLVED)
    return [rewards, *checks]


def _check(series: Mapping[str, Series], limit: _Limit, kind: RunKind) -> Check | None:
    values = _steady(series.get(limit.metric))
    if values is None:
        return None
    if len(values) < MIN_EVIDENCE:
        text = f"from step {WARM_UP + MIN_EVIDENCE} on"
        return Check(limit.metric, limit.label, "waiting", text, query=limit.query)
    mean = fmean(values[-RECENT:])
    text = limit.text.format(_percent(mean) if limit.is_share else f"{mean:.3g}")
    if not exceeds([1 - value for value in values] if limit.above else values, limit.limit):
        return Check(limit.metric, limit.label, "ok", text, query=limit.query)
    shorter = ", or reward shorter answers" if limit.query is TRUNCATED and kind.trains_on_rewards else ""
    return Check(limit.metric, limit.label, "warning", text, limit.advice + shorter, limit.query)


def _describe_equal_groups(series: Mapping[str, Series], kind: RunKind) -> str:
    easy, hard = (_recent_mean(series.get(f"batch/{which}")) for which in ("solve_all", "solve_none"))
    others = "; the others are trained on the teacher only" if kind.kind is Kind.MIXED else " and a gradient"
    return f"{others} ({easy:.0%} are solved by all, {hard:.0%} by none)"


def _percent(share: float) -> str:
    return f"{share:.1%}" if 0 < share < 0.01 else f"{share:.0%}"


def _steady(points: Series | None) -> list[float] | None:
    """The values after the warm-up; None without the metric."""
    return None if not points else [value for step, value in points if step > WARM_UP]


def _recent_mean(points: Series | None) -> float:
    return fmean(value for _, value in points[-RECENT:]) if points else 0.0
