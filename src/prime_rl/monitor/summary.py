"""The summary of a run under its documented names, and the samples that failed, as text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
"""Documented name -> metrics that carry it, the first that is there."""

FURTHER = (
    "optim/grad_norm",
    "optim/lr",
    "completion_len/mean",
    "is_truncated/mean",
    "batch/async_level",
    "teacher_kl/mean",
)
WINDOW = 10


@dataclass(frozen=True)
class Line:
    """What became of one metric: its values at both ends, its extremes, and the mean of the last steps."""

    name: str
    first: float
    last: float
    low: float
    high: float
    recent: float
    count: int


def summarise(series: Mapping[str, Series]) -> list[Line]:
    """Lines for the documented names and a few further ones, of what the run has."""
    lines = []
    for name, keys in (*DOCUMENTED.items(), *((key, (key,)) for key in FURTHER)):
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
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in table
    )


def failed_samples(rows: Iterable[Mapping[str, Any]], threshold: float, limit: int) -> list[Mapping[str, Any]]:
    """Rollouts with a reward below `threshold`: of the newest step first, the worst of a step first."""
    bad = [row for row in rows if isinstance(row.get("reward"), (int, float)) and row["reward"] < threshold]
    return sorted(bad, key=lambda row: (-int(row.get("step") or 0), row["reward"]))[:limit]


def sample_text(row: Mapping[str, Any]) -> str:
    """One sample with its messages, safe to print: what a model writes cannot move the cursor."""
    facts = [f"step {row.get('step')}", f"reward {row['reward']:.4g}"]
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
    return "\n".join(out)


def messages_of(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(role, text) of a sample: prompt and completion, or `messages` where the row has them."""
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
    """Content of a chat message, its tool calls included."""
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", part)) if isinstance(part, Mapping) else str(part) for part in content)
    calls = [f"tool call: {json.dumps(call, ensure_ascii=False)}" for call in message.get("tool_calls") or ()]
    return "\n".join([*([str(content)] if content else []), *calls])


def printable(text: str) -> str:
    """Text without control characters, which a terminal would obey."""
    return "".join(c if c in "\n\t" or c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def _parsed(value: Any) -> Any:
    """Tables of Weights & Biases hold messages as JSON text."""
    if isinstance(value, str) and value[:1] == "[" and '"role"' in value:
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.4g}"
