"""Text summary of a run under its documented metric names, and its failed samples."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prime_rl.monitor.distillation import TEACHER_METRICS, align_columns
from prime_rl.monitor.run_kind import Kind, RunKind
from prime_rl.monitor.series import Series

DOCUMENTED = {
    "loss/mean": ("loss/mean",),
    "entropy": ("entropy/mean", "entropy"),
    "mismatch_kl": ("mismatch_kl/mean", "mismatch_kl"),
    "reward/mean": ("reward/mean",),
    "val_reward": ("val_reward/mean", "val_reward"),
    "throughput": ("perf/throughput",),
    "MFU": ("perf/mfu",),
}
"""Documented name -> candidate metrics, in order of preference."""

FURTHER = (
    "val_loss/mean",
    "optim/grad_norm",
    "optim/lr",
    "completion_len/mean",
    "is_truncated/mean",
    "batch/async_level",
    "teacher_kl/mean",
)
SERVER = tuple(
    f"{name}/{part}"
    for name, parts in (
        ("tokens_per_s", ("trained", "sampled")),
        ("queue", ("training", "sampling")),
        ("latency", ("training/p50", "training/p99", "sampling/p50", "sampling/p99")),
        ("open", ("tenants", "sessions", "models", "loaded_adapters")),
        ("perf", ("peak_memory",)),
    )
    for part in parts
)
"""Metrics of a training server."""

REWARDS = ("reward/mean", "val_reward")
WINDOW = 10


@dataclass(frozen=True)
class Line:
    """Summary of one metric: first and last value, extremes, and mean of the last steps."""

    name: str
    first: float
    last: float
    low: float
    high: float
    recent: float
    count: int


def summarize_metrics(series: Mapping[str, Series], kind: RunKind | None = None) -> list[Line]:
    """Summarize the documented metrics and a few others that the run has.

    Teacher metrics come first; rewards are skipped if the run does not compute them.
    """
    kind = kind or RunKind(Kind.UNKNOWN)
    first = TEACHER_METRICS if kind.has_teacher else ()
    names = dict.fromkeys(SERVER if kind.kind is Kind.SERVER else (*first, *DOCUMENTED, *FURTHER))
    lines = []
    for name in names:
        if name in REWARDS and not kind.scores_rewards:
            continue
        keys = DOCUMENTED.get(name, (name,))
        points = next((series[key] for key in keys if series.get(key)), None)
        if points is None:
            continue
        values = [value for _, value in points]
        recent = values[-WINDOW:]
        lines.append(
            Line(name, values[0], values[-1], min(values), max(values), sum(recent) / len(recent), len(values))
        )
    return lines


def summary_text(lines: Sequence[Line]) -> str:
    """A table with one line per metric."""
    if not lines:
        return "no metrics yet"
    head = ("metric", "first", "last", "min", "max", f"last {WINDOW}", "points")
    table = [head, *((i.name, *map(_number, (i.first, i.last, i.low, i.high, i.recent)), str(i.count)) for i in lines)]
    return align_columns(table)


def failed_samples(rows: Iterable[Mapping[str, Any]], threshold: float, limit: int) -> list[Mapping[str, Any]]:
    """Rollouts with a reward below `threshold`, by newest step, then by lowest reward."""
    bad = [row for row in rows if isinstance(row.get("reward"), (int, float)) and row["reward"] < threshold]
    return sorted(bad, key=lambda row: (-int(row.get("step") or 0), row["reward"]))[:limit]


def unscored_samples(rows: Iterable[Mapping[str, Any]], limit: int) -> list[Mapping[str, Any]] | None:
    """Rollouts without teacher scores, newest step first; None if no row has log-probs."""
    recorded = [row for row in rows if row.get("logprobs") is not None]
    found = [row for row in recorded if row.get("teacher_logprobs") is None]
    return sorted(found, key=lambda row: -int(row.get("step") or 0))[:limit] if recorded else None


def sample_text(row: Mapping[str, Any], show_reward: bool = True) -> str:
    """One sample with its messages, without control characters."""
    facts = [f"step {row.get('step')}"]
    if show_reward and isinstance(row.get("reward"), (int, float)):
        facts.append(f"reward {row['reward']:.4g}")
    facts += [
        f"{name} {row[name]}"
        for name in ("env", "group_index", "index", "status", "stop_reason")
        if row.get(name) is not None
    ]
    out = ["--- " + " | ".join(facts)]
    if row.get("error"):
        out.append(f"error: {printable(str(row['error']))}")
    for role, content in messages_of(row):
        out.append(f"[{role}] {printable(content)}")
    if row.get("answer") not in (None, ""):
        out.append(f"[expected answer] {printable(str(row['answer']))}")
    rewards = row.get("metrics")
    if show_reward and isinstance(rewards, Mapping) and len(rewards) > 1:
        # JSON has no NaN: it is null.
        numbers = {name: math.nan if value is None else value for name, value in rewards.items()}
        out.append("[rewards] " + ", ".join(f"{printable(name)} {value:.4g}" for name, value in numbers.items()))
    return "\n".join(out)


def messages_of(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(role, text) of a sample, from `messages` or from prompt and completion."""
    found: list[tuple[str, str]] = []
    parts = ("messages",) if row.get("messages") else ("prompt", "completion")
    for part, role in zip(parts, ("user", "assistant"), strict=False):
        value = _parsed(row.get(part))
        if isinstance(value, list):
            found += [
                (str(m.get("role", role)), message_text(m)) if isinstance(m, Mapping) else (role, str(m)) for m in value
            ]
        elif value is not None:
            found.append((role, str(value)))
    return found


def message_text(message: Mapping[str, Any]) -> str:
    """Content of a chat message, including tool calls."""
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", part)) if isinstance(part, Mapping) else str(part) for part in content)
    calls = [f"tool call: {json.dumps(call, ensure_ascii=False)}" for call in message.get("tool_calls") or ()]
    return "\n".join([*([str(content)] if content else []), *calls])


def printable(text: str) -> str:
    """Text with control characters escaped."""
    return "".join(c if c in "\n\t" or c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def _parsed(value: Any) -> Any:
    """Decode messages, which tables of Weights & Biases store as JSON text."""
    if isinstance(value, str) and value[:1] == "[" and '"role"' in value:
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.4g}"
