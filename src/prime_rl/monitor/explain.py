"""Explains a run in text: batch composition, pipeline stalls, symptoms and recommended changes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from prime_rl.monitor.checks import WARM_UP, run_checks
from prime_rl.monitor.distillation import DistillationScores, count_skipped, latest_scores, read_scores, skipped_text
from prime_rl.monitor.run_kind import RunKind, find_kind
from prime_rl.monitor.series import Series, join_processes
from prime_rl.monitor.trend import MIN_EVIDENCE, exceeds, find_trend
from prime_rl.telemetry.advice import MORE_SERVERS
from prime_rl.telemetry.busy_intervals import Interval

Lanes = Mapping[str, Sequence[tuple[str, float, float, int]]]
"""Process -> (what, start, end, step), times in seconds."""

SERVER = re.compile(r"inference(_\d+)?")
"""Processes of the policy's servers; those of a deployment have numbers."""

IDLE_SHARE = 0.2
"""Idle time below this share is normal pipeline overhead."""

LOW_RETENTION = 0.9
"""Below this fraction of its initial score an environment counts as forgotten."""

COLLAPSE_FRACTION = 0.5
"""A student with context below this fraction of the teacher's score forgets how to use it."""


@dataclass(frozen=True)
class Finding:
    """One observation; `advice` is a recommended change, or empty."""

    topic: str
    text: str
    advice: str | None = None


def explain(
    series: Mapping[str, Mapping[str, Series]], lanes: Lanes, config: Mapping[str, Mapping[str, Any]]
) -> list[Finding]:
    """All findings of a run, from its metrics by process, its timelines and its configurations by process."""
    trainer = series.get("trainer") or series.get("sft") or {}
    orchestrator = series.get("orchestrator", {})
    joined = join_processes(series)
    kind = find_kind(joined, config)
    return [
        *(_distillation(joined, config) if kind.has_teacher else []),
        *_batch_composition(trainer, orchestrator, config),
        *_stalls(lanes, orchestrator, config),
        *find_symptoms(joined, kind),
    ]


def findings_text(findings: Sequence[Finding]) -> str:
    """One paragraph per finding, followed by its advice."""
    out = []
    for finding in findings:
        out.append(f"{finding.topic}: {finding.text}")
        if finding.advice:
            out.append(f"  -> {finding.advice}")
    return "\n".join(out) if out else "no complete step yet"


def _distillation(series: Mapping[str, Series], config: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Distance to the teacher, retention, and samples without teacher scores."""
    findings = []
    if (trend := find_trend(series.get("teacher_kl/mean", []))) is not None:
        moved = f"is {trend.last:.3g}, no change beyond its noise"
        if trend.verb != "unchanged":
            moved = f"{trend.verb} from {trend.first:.3g} to {trend.last:.3g}"
        findings.append(Finding("teacher KL", f"on the student's tokens it {moved} (nats per token)"))
    scores = latest_scores(read_scores(series))
    findings += [finding for row in scores for finding in _judge_scores(row)]
    teacher = config.get("orchestrator", {}).get("teacher_model")
    if not scores and isinstance(teacher, Mapping) and teacher.get("eval_baseline") is False:
        advice = "set orchestrator.teacher_model.eval_baseline and orchestrator.eval to measure them"
        findings.append(Finding("gap and retention", "they are not measured in this run", advice))
    if skipped := count_skipped(series):
        num_skipped = sum(skipped.values())
        share = num_skipped / (num_skipped + sum(value for _, value in series.get("progress/samples", [])))
        cures = {
            "overlong": "raise teacher_inference.model.max_model_len",
            "prompt": "see the warnings in logs/orchestrator.log: the prompt with the context cannot be rendered",
            "server": "see the log of the teacher's server (logs/teacher_inference.log)",
        }
        fix = cures.get(max(skipped, key=lambda reason: skipped[reason])) if share > 0.01 else None
        findings.append(Finding("samples without teacher scores", f"{skipped_text(skipped)}, {share:.1%} of all", fix))
    return findings


def _judge_scores(row: DistillationScores) -> list[Finding]:
    """Findings from the newest evaluation of one environment."""
    if row.step == 0 and row.student_context is not None:
        teacher = "" if row.teacher_context is None else f", the teacher {row.teacher_context:.3g} with the context"
        return [Finding(f"gap on {row.env}", f"before training the student scores {row.student:.3g}{teacher}")]
    if row.step == 0:
        return []
    if row.retention is not None:
        advice = None
        if row.retention < LOW_RETENTION:
            advice = "raise reference_weight of a reference environment, add one like it, or lower trainer.optim.lr"
        text = f"the student keeps {row.retention:.0%} of its score from before training (step {row.step})"
        return [Finding(f"retention of {row.env}", text, advice)]
    if row.student_context is None:
        return []
    text = f"the gap between student and teacher is not significant (step {row.step})"
    if row.gap_closed is not None:
        teacher = "" if row.teacher_context is None else f", the teacher {row.teacher_context:.3g} with the context"
        text = f"{row.gap_text} at step {row.step}: the student scores {row.student:.3g}{teacher}"
    advice = None
    if row.collapsed and row.student_context >= COLLAPSE_FRACTION * (row.teacher_context or 0.0):
        advice = (
            "without the context the student scores less than half of what it did before training: the context teaches "
            "it wrong answers; stop the run and correct the context"
        )
    elif row.collapsed:
        advice = (
            "with the context the student scores less than half of what the teacher did: add an environment with "
            'teacher = "reference", or lower trainer.optim.lr'
        )
    return [Finding(f"gap closed on {row.env}", text, advice)]


def _batch_composition(
    trainer: Mapping[str, Series], orchestrator: Mapping[str, Series], config: Mapping[str, Mapping[str, Any]]
) -> list[Finding]:
    steps = max((points[-1][0] for table in (trainer, orchestrator) for points in table.values()), default=0)
    if not steps:
        return []
    findings = []
    prompts, rollouts = _mean(orchestrator, "progress/problems"), _mean(orchestrator, "progress/samples")
    if prompts and rollouts:
        turns = _mean(orchestrator, "num_turns/mean") or 1.0
        findings.append(
            Finding(
                "prompts to samples",
                f"a step takes {prompts:.4g} prompts x {rollouts / prompts:.4g} rollouts = {rollouts:.4g} rollouts of "
                f"{_many(turns, 'turn')} and {_mean(orchestrator, 'seq_len/mean') or 0:.4g} tokens on average",
            )
        )
    samples, tokens = _mean(trainer, "batch/samples"), _mean(trainer, "batch/tokens")
    micros = _mean(trainer, "batch/micro_batches")
    if samples and tokens and micros:
        section = config.get("trainer") or config.get("sft") or {}
        rows, seq_len = section.get("micro_bs"), (section.get("model") or {}).get("seq_len")
        rows = None if rows == "auto" else rows  # the number is in the log
        capacity = f" (capacity {rows} x {seq_len} = {rows * seq_len} tokens each)" if rows and seq_len else ""
        shared = _mean(trainer, "batch/shared_ratio") or 0.0
        computed = f", {tokens * (1 - shared):.5g} without shared beginnings," if shared else ""
        per_micro = _mean(trainer, "batch/micro_batch_tokens")
        full = per_micro / (rows * seq_len) if per_micro is not None and rows and seq_len else None
        advice = None
        if steps < WARM_UP + MIN_EVIDENCE:
            pass  # the first batches may not be typical
        elif full is not None and full < 0.5 and micros > 1:
            fitting = max(int(rows * full * 1.3), 1)
            advice = f"micro-batches are {full:.0%} full: trainer.micro_bs {fitting} needs less memory"
        elif full is not None and micros > 2:
            advice = "several passes per step: a larger trainer.micro_bs makes fewer of them if memory allows"
        findings.append(
            Finding(
                "samples to steps",
                f"{samples:.4g} samples of {tokens:.5g} tokens in all{computed} are packed into "
                f"{_many(micros, 'micro-batch')} per rank{capacity}, then one optimizer step; "
                f"{steps} steps so far, {samples * steps:,.0f} samples",
                advice,
            )
        )
    return findings


def waiting_shares(lanes: Lanes) -> dict[str, dict[str, float]]:
    """Process -> activity -> its share of the steady part of the run.

    Time without an activity of any process does not count: pauses between the attempts of a resumed run.
    """
    starts = [start for spans in lanes.values() for _, start, _, step in spans if step > WARM_UP]
    if not starts:
        return {}
    first = min(starts)
    steady = [(max(start, first), end) for spans in lanes.values() for _, start, end, _ in spans if end > first]
    span = max(_covered(steady), 1e-9)
    shares: dict[str, dict[str, float]] = {}
    for process, spans in lanes.items():
        for what in sorted({what for what, *_ in spans}):
            covered = _covered([(max(s, first), e) for name, s, e, _ in spans if name == what and e > first])
            shares.setdefault(process, {})[what] = covered / span
    return shares


def _stalls(lanes: Lanes, orchestrator: Mapping[str, Series], config: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    shares = waiting_shares(lanes)
    trainer = shares.get("trainer")
    steady = {step for _, _, _, step in lanes.get("trainer", ()) if step > WARM_UP}
    if trainer is None or len(steady) < MIN_EVIDENCE:
        return []
    waits = trainer.get("wait_for_batch", 0.0)
    engine = _mean_share_of_servers(shares, "generate")
    stalls = _shares_of_steps(orchestrator, "time/slots_exhausted")
    level = (config.get("orchestrator") or {}).get("max_async_level")
    used = _mean(orchestrator, "batch/off_policy_level/max")
    text = f"the trainer waits for batches {waits:.0%} of the time"
    if engine is not None:
        text += f", the engine generates {engine:.0%} of it"
    if stalls:
        text += f", and generation is stalled {fmean(stalls):.0%} of it because every slot waits for the trainer"
    advice, is_starved = None, exceeds(_waits_by_step(lanes["trainer"]), IDLE_SHARE)
    if is_starved and (engine is None or engine > 0.7):
        advice = (
            f"generation is the bottleneck: {MORE_SERVERS}, shorten sampling.max_tokens, or let batches take the "
            "groups that finish first (orchestrator.oversampling_factor)"
        )
    elif is_starved:
        deeper = f" (now {level}, staleness reaches {used:.1f})" if level is not None and used is not None else ""
        advice = f"both wait for each other: raise max_async_level{deeper} so that they overlap"
    elif exceeds(stalls, IDLE_SHARE):
        advice = "the trainer is the bottleneck: more ranks (trainer.parallel.dp) or a larger trainer.micro_bs"
    findings = [Finding("pipeline stalls", text, advice)]
    publish = trainer.get("broadcast_weights", 0.0)
    update = _mean_share_of_servers(shares, "update_weights") or 0.0
    if publish + update > IDLE_SHARE:
        findings.append(
            Finding(
                "weight updates",
                f"publishing takes the trainer {publish:.0%} and loading takes the engine {update:.0%} of the time",
                "put output_dir on a faster disk (or in memory), or train LoRA adapters, which are small",
            )
        )
    return findings


def _mean_share_of_servers(shares: Mapping[str, Mapping[str, float]], what: str) -> float | None:
    found = [activities.get(what, 0.0) for process, activities in shares.items() if SERVER.fullmatch(process)]
    return fmean(found) if any(found) else None


def find_symptoms(joined: Mapping[str, Series], kind: RunKind) -> list[Finding]:
    """Health checks that failed, with advice."""
    return [Finding(check.name, check.text, check.advice) for check in run_checks(joined, kind) if check.advice]


def _many(value: float, word: str) -> str:
    """A number with its noun."""
    return f"{value:.3g} {word}" + ("" if value == 1 else "es" if word.endswith("ch") else "s")


def _mean(table: Mapping[str, Series], name: str) -> float | None:
    points = table.get(name)
    return fmean(value for _, value in points[-20:]) if points else None


def _waits_by_step(spans: Sequence[tuple[str, float, float, int]]) -> list[float]:
    """Share of each step after the warm-up in which the trainer waits for its batch."""
    steps: dict[int, list[Interval]] = {}
    waits: dict[int, list[Interval]] = {}
    for what, start, end, step in spans:
        if step > WARM_UP:
            steps.setdefault(step, []).append((start, end))
            waits.setdefault(step, []).extend([(start, end)] if what == "wait_for_batch" else [])
    lengths = {step: max(end for _, end in parts) - min(start for start, _ in parts) for step, parts in steps.items()}
    return [_covered(waits[step]) / max(lengths[step], 1e-9) for step in sorted(steps)]


def _shares_of_steps(table: Mapping[str, Series], name: str) -> list[float]:
    """A duration over that of its step, for each step after the warm-up."""
    steps = dict(table.get("time/step", []))
    return [value / max(steps[step], 1e-9) for step, value in table.get(name, []) if step > WARM_UP and step in steps]


def _covered(intervals: list[Interval]) -> float:
    """Length of the union of intervals."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
