"""Evaluation files of a distillation: the answers of student and teacher to each example, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from prime_rl.runtime.redaction import redact_fields
from rollouts.training.agent_integration import Rollout
from rollouts.training.metrics import replace_jsonl

FILE = "answers.jsonl"


def write_answers(
    folder: Path, rows: Sequence[Mapping[str, Any]], answers: Mapping[str, Sequence[Sequence[Rollout]]]
) -> None:
    """Write answers.jsonl, one example per line; `answers`: groups of rollouts of the rows by who answered.

    A row without rollouts of one of them has an empty list there.
    """
    replace_jsonl(folder / FILE, [_to_line(i, row, answers) for i, row in enumerate(rows)])


def _to_line(index: int, row: Mapping[str, Any], answers: Mapping[str, Sequence[Sequence[Rollout]]]) -> dict[str, Any]:
    line: dict[str, Any] = {"example_id": row.get("example_id"), "prompt": row["prompt"], "answer": row.get("answer")}
    for name, groups in answers.items():
        group = groups[index] if index < len(groups) else ()
        line[name] = [
            {"completion": rollout.response, "reward": None if rollout.failed else rollout.reward} for rollout in group
        ]
    plain: dict[str, Any] = redact_fields(msgspec.to_builtins(line, enc_hook=str))
    return plain
