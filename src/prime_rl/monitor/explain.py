"""What a run did in words: the algebra of its batches, who waited for whom, and what to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from prime_rl.monitor.series import Series
from prime_rl.utils.timeline import Interval

Lanes = Mapping[str, Sequence[tuple[str, float, float, int]]]
"""Process -> (what, start, end, step), times in seconds."""

IDLE_SHARE = 0.2
"""Waiting below this share of the time is what pipelines cost, not a fault."""

WARM_UP = 2
"""Steps at the start that are left out: engines and caches fill, nothing overlaps yet."""


@dataclass(frozen=True)
class Finding:
    """One observation; `advice` says what to change where something is wrong."""

    topic: str
    text: str
    advice: str | None = None


def explain(
    series: Mapping[str, Mapping[str, Series]], lanes: Lanes, config: Mapping[str, Mapping[str, Any]]
) -> list[Finding]:
    """All findings of a run, from its metrics by process, its timelines and its configurations by process."""
    trainer = series.get("trainer") or series.get("sft") or {}
    conductor = series.get("orchestrator", {})
    return [
        *_algebra(trainer, conductor, config),
        *_waits(lanes, conductor, config),
        *_symptoms(trainer, conductor, config),
    ]


def findings_text(findings: Sequence[Finding]) -> str:
    """One paragraph per finding, the advice below it."""
    out = []
    for finding in findings:
        out.append(f"{finding.topic}: {finding.text}")
        if finding.advice:
            out.append(f"  -> {finding.advice}")
    return "\n".join(out) if out else "nothing to explain yet: no step is complete"


def _algebra(
    trainer: Mapping[str, Series], conductor: Mapping[str, Series], config: Mapping[str, Mapping[str, Any]]
) -> list[Finding]:
    steps = max((points[-1][0] for table in (trainer, conductor) for points in table.values()), default=0)
    if not steps:
        return []
    found = []
    prompts, rollouts = _mean(conductor, "progress/problems"), _mean(conductor, "progress/samples")
    if prompts and rollouts:
        turns = _mean(conductor, "num_turns/mean") or 1.0
        found.append(
            Finding(
                "prompts to samples",
                f"a step takes {prompts:.4g} prompts x {rollouts / prompts:.4g} rollouts = {rollouts:.4g} rollouts of "
                f"{_many(turns, 'turn')} and {_mean(conductor, 'seq_len/mean') or 0:.4g} tokens on average",
            )
        )
    samples, tokens = _mean(trainer, "batch/samples"), _mean(trainer, "batch/tokens")
    micros = _mean(trainer, "batch/micro_batches")
    if samples and tokens and micros:
        section = config.get("trainer") or config.get("sft") or {}
        rows, seq_len = section.get("micro_bs"), (section.get("model") or {}).get("seq_len")
        room = f" (room for {rows} x {seq_len} = {rows * seq_len} tokens each)" if rows and seq_len else ""
        full = tokens / (micros * rows * seq_len) if rows and seq_len else None
        cure = None
        if full is not None and full < 0.5 and micros > 1:
            fitting = max(int(rows * full * 1.3), 1)
            cure = f"micro-batches are {full:.0%} full: trainer.micro_bs {fitting} needs less memory"
        elif full is not None and micros > 2:
            cure = "several passes per step: a larger trainer.micro_bs makes fewer of them if memory allows"
        found.append(
            Finding(
                "samples to steps",
                f"{samples:.4g} samples of {tokens:.5g} tokens in all are packed into {_many(micros, 'micro-batch')} "
                f"per rank{room}, then one optimizer step; {steps} steps so far, {samples * steps:,.0f} samples",
                cure,
            )
        )
    return found


def waiting_shares(lanes: Lanes) -> dict[str, dict[str, float]]:
    """Process -> what -> share of the steady part of the run that went into it."""
    starts = [start for spans in lanes.values() for _, start, _, step in spans if step > WARM_UP]
    ends = [end for spans in lanes.values() for _, _, end, step in spans if step > WARM_UP]
    if not starts:
        return {}
    first, last = min(starts), max(ends)
    span = max(last - first, 1e-9)
    shares: dict[str, dict[str, float]] = {}
    for process, spans in lanes.items():
        for what in sorted({what for what, *_ in spans}):
            covered = _covered([(max(s, first), e) for name, s, e, _ in spans if name == what and e > first])
            shares.setdefault(process, {})[what] = covered / span
    return shares


def _waits(lanes: Lanes, conductor: Mapping[str, Series], config: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    shares = waiting_shares(lanes)
    trainer = shares.get("trainer")
    if trainer is None:
        return []
    waits = trainer.get("wait_for_batch", 0.0)
    engine = shares.get("inference", {}).get("generate")
    stalled = _share_of_time(conductor, "time/wait_for_ckpt")
    level = (config.get("orchestrator") or {}).get("max_async_level")
    used = _mean(conductor, "batch/off_policy_level/max")
    text = f"the trainer waits for batches {waits:.0%} of the time"
    if engine is not None:
        text += f", the engine writes {engine:.0%} of it"
    if stalled is not None:
        text += f", and generation stands still {stalled:.0%} of it because every slot waits for the trainer"
    advice = None
    if waits > IDLE_SHARE and (engine is None or engine > 0.7):
        advice = (
            "generation is the bottleneck: add engines (inference.parallel.dp), shorten sampling.max_tokens, "
            "or let batches take the groups that finish first (orchestrator.oversampling_factor)"
        )
    elif waits > IDLE_SHARE:
        deeper = f" (now {level}, staleness reaches {used:.1f})" if level is not None and used is not None else ""
        advice = f"both wait for each other: raise max_async_level{deeper} so that they overlap"
    elif (stalled or 0.0) > IDLE_SHARE:
        advice = "the trainer is the bottleneck: more ranks (trainer.parallel.dp) or a larger trainer.micro_bs"
    found = [Finding("who waits for whom", text, advice)]
    publish, update = trainer.get("broadcast_weights", 0.0), shares.get("inference", {}).get("update_weights", 0.0)
    if publish + update > IDLE_SHARE:
        found.append(
            Finding(
                "weights on their way",
                f"publishing takes the trainer {publish:.0%} and loading takes the engine {update:.0%} of the time",
                "put output_dir on a faster disk (or in memory), or train LoRA adapters, which are small",
            )
        )
    return found


def _symptoms(
    trainer: Mapping[str, Series], conductor: Mapping[str, Series], config: Mapping[str, Mapping[str, Any]]
) -> list[Finding]:
    """Plain thresholds on the last steps; each names its cure."""
    checks = (
        (conductor, "is_truncated/mean", 0.1, "of the rollouts are cut off at the token limit",
         "raise orchestrator.sampling.max_tokens (and seq_len), or reward shorter answers"),
        (conductor, "error/mean", 0.02, "of the rollouts fail", "see logs/orchestrator.log and their errors"),
        (trainer, "is_masked/mean", 0.2, "of the tokens are outside the trust region and teach nothing",
         "lower max_async_level or the learning rate"),
        (trainer, "batch/padding_ratio", 0.2, "of what ranks compute is padding", "use fewer ranks or larger batches"),
    )  # fmt: skip
    found = []
    for table, name, limit, what, cure in checks:
        value = _mean(table, name)
        if value is not None and value > limit:
            found.append(Finding(name, f"{value:.0%} {what}", cure))
    spread = _mean(conductor, "batch/effective_batch_size")
    if spread is not None and spread < 0.5:
        easy, hard = _mean(conductor, "batch/solve_all") or 0.0, _mean(conductor, "batch/solve_none") or 0.0
        found.append(
            Finding(
                "batch/effective_batch_size",
                f"only {spread:.0%} of the groups have different rewards and teach anything "
                f"({easy:.0%} are solved by all, {hard:.0%} by none)",
                "choose prompts nearer to what the policy can just do: buffer.online_difficulty_filtering, easy and "
                "hard thresholds, or more rollouts_per_example",
            )
        )
    apart = _mean(trainer, "mismatch_kl/mean")
    if apart is not None and apart > 0.05:
        found.append(
            Finding(
                "mismatch_kl",
                f"engine and trainer are {apart:.3g} apart on the same tokens",
                "serve with inference.exact, lower max_async_level, or lower the learning rate",
            )
        )
    return found


def _many(value: float, word: str) -> str:
    """A number with its word."""
    return f"{value:.3g} {word}" + ("" if value == 1 else "es" if word.endswith("ch") else "s")


def _mean(table: Mapping[str, Series], name: str, last: int = 20) -> float | None:
    points = table.get(name)
    return fmean(value for _, value in points[-last:]) if points else None


def _share_of_time(table: Mapping[str, Series], name: str) -> float | None:
    """Sum of a duration over the sum of the steps' durations, without the first steps."""
    points, steps = table.get(name), dict(table.get("time/step", []))
    if not points or not steps:
        return None
    known = [(value, steps[step]) for step, value in points if step > WARM_UP and step in steps]
    return sum(value for value, _ in known) / max(sum(step for _, step in known), 1e-9) if known else None


def _covered(intervals: list[Interval]) -> float:
    """Length of the union of intervals."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
