"""One rollout as the page shows it: messages, tokens and their streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

STREAMS = ("logprob", "advantage", "teacher", "trainer", "version")
"""Per-token streams by which tokens can be colored; missing if the run did not record them.

logprob    of the engine that sampled the token
advantage  that the token is trained with
teacher    log-prob of the teacher minus that of the engine: above 0 where the teacher finds the token more likely
trainer    log-prob of the trainer minus that of the engine: 0 where both compute the same
version    of the policy that wrote the token
"""


def rollout_detail(number: int, row: Mapping[str, Any]) -> dict[str, Any]:
    """Facts, messages and per-token streams of a line of `samples.jsonl`."""
    facts = (
        "step",
        "env",
        "reward",
        "advantage",
        "status",
        "stop_reason",
        "error",
        "metrics",
        "prompt",
        "completion",
        "answer",
        "info",
    )
    return {
        "id": number,
        "group": row.get("group_index"),
        "index": row.get("index"),
        **{name: row.get(name) for name in facts},
        "tokens": row.get("tokens") or [],
        "mask": row.get("loss_mask") or [],
        "streams": token_streams(row),
    }


def token_streams(row: Mapping[str, Any]) -> dict[str, list[float]]:
    """The streams of a line; 0 outside the tokens of the policy."""
    n, mask = len(row.get("tokens") or ()), row.get("loss_mask") or []
    if not n or len(mask) != n:
        return {}
    streams: dict[str, list[float]] = {}
    engine = _stream(row, "logprobs", n) or _stream(row, "inference_logprobs", n)
    if engine is not None:
        streams["logprob"] = engine
        for name, key in (("teacher", "teacher_logprobs"), ("trainer", "trainer_logprobs")):
            other = _stream(row, key, n)
            if other is not None:
                streams[name] = [(a - b) if m else 0.0 for a, b, m in zip(other, engine, mask, strict=True)]
    recorded, constant = _stream(row, "advantages", n), row.get("advantage")
    if recorded is not None:
        streams["advantage"] = recorded
    elif isinstance(constant, (int, float)):
        streams["advantage"] = [float(constant) if m else 0.0 for m in mask]
    if row.get("versions"):
        streams["version"] = _spread(row["versions"], n)
    return streams


def _stream(row: Mapping[str, Any], key: str, n: int) -> list[float] | None:
    values = row.get(key)
    return [float(v or 0.0) for v in values] if isinstance(values, list) and len(values) == n else None


def _spread(spans: Sequence[Sequence[int]], n: int) -> list[float]:
    """`(start, version)` spans as one version per token, that of the first span before it."""
    out = [float(spans[0][1])] * n
    for start, version in spans:
        out[start:] = [float(version)] * (n - start)
    return out
