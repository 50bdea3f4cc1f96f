"""Summary metrics of an environment."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from loguru import logger

from rollouts.training.metrics import (
    compute_interval,
    compute_pass_at_k,
    compute_standard_error,
    compute_stats,
    reaches,
)

if TYPE_CHECKING:
    from prime_rl.generation.resume_log import Result


def summarize(groups: Sequence[Sequence[Result]], num_rollouts: int, pass_threshold: float) -> dict[str, float]:
    """Metrics of one environment. Failed rollouts count only in `error/mean`.

    `avg@k` is the mean reward over the k rollouts of an example, averaged over examples; `avg@k/stderr` the standard
    error of that average over examples; `pass@k` the unbiased estimate of 2107.03374 for 1, 2, 4, ... rollouts.
    `/ci_low` and `/ci_high` are 95 % confidence intervals over examples. Also means of the reward functions, lengths,
    the share of truncated rollouts and the shares of stop reasons. `error/RewardError`, if there are any, is the number
    of rollouts with a reward function that raised.
    """
    all_results = [result for group in groups for result in group]
    good = [[(result.reward, result) for result in group if result.reward is not None] for group in groups]
    scored = [group for group in good if group]
    results = [result for group in scored for _, result in group]
    means = [statistics.fmean(reward for reward, _ in group) for group in scored]
    average = f"avg@{num_rollouts}"
    summary = _mean_and_interval(average, means)
    summary[f"{average}/stderr"] = compute_standard_error(means)
    for k in powers_of_two(num_rollouts):
        estimates = [
            compute_pass_at_k(len(group), sum(reaches(reward, pass_threshold) for reward, _ in group), k)
            for group in scored
            if len(group) >= k
        ]
        summary |= _mean_and_interval(f"pass@{k}", estimates)
    for name in sorted({name for result in results for name in result.metrics}):
        found = (result.metrics.get(name) for result in results)
        # A value that is not finite is None in a result that was read from its file.
        values = [value for value in found if value is not None and math.isfinite(value)]
        summary[f"metrics/{name}"] = statistics.fmean(values) if values else math.nan
    lengths = [result.completion_len for result in results if result.completion_len is not None]
    if lengths:
        summary |= {f"completion_len/{name}": value for name, value in compute_stats(lengths).items()}
    truncated = [result.is_truncated for result in results]
    summary["is_truncated/mean"] = statistics.fmean(truncated) if truncated else math.nan
    for reason, count in sorted(Counter(result.stop_reason or "unknown" for result in results).items()):
        summary[f"stop/{reason}"] = count / len(results)
    summary["num_turns/mean"] = statistics.fmean(r.num_turns for r in results) if results else math.nan
    summary["error/mean"] = 1 - len(results) / len(all_results) if all_results else math.nan
    if unscored := sum(result.unscored for result in results):
        summary["error/RewardError"] = unscored
    summary["examples"] = len(groups)
    summary["rollouts"] = len(results)
    return summary


def warn_unscored(name: str, groups: Sequence[Sequence[Result]]) -> None:
    """Log the number of rollouts with a reward function that raised, and the first error."""
    results = [result for group in groups for result in group]
    if unscored := [result for result in results if result.unscored]:
        logger.warning(
            f"{name}: reward functions failed in {len(unscored)} of {len(results)} rollouts, where they count as 0; "
            f"first error: {unscored[0].error}"
        )


def _mean_and_interval(name: str, values: Sequence[float]) -> dict[str, float]:
    low, high = compute_interval(values)
    mean = statistics.fmean(values) if values else math.nan
    return {name: mean, f"{name}/ci_low": low, f"{name}/ci_high": high}


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4, ... up to `limit`, including `limit` itself."""
    return sorted({2**i for i in range(limit.bit_length())} | {limit})
