"""Progress of a distillation: scores of student and teacher on held-out examples, by environment."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prime_rl.monitor.series import Series

TEACHER_METRICS = (
    "teacher_kl/mean",
    "teacher_kl_reverse/mean",
    "teacher_kl_forward/mean",
    "teacher_coverage/mean",
    "reference_kl/mean",
)
"""Trainer metrics of the distance between student and teacher, most important first."""

SKIPPED = "teacher/skipped/"

_SCORE = re.compile(r"distill/(?P<env>.+)/student/avg")


@dataclass(frozen=True)
class DistillationScores:
    """One evaluation of one environment (`orchestrator.teacher_model.eval_baseline`); None: not measured.

    Scores are mean rewards. An environment whose context is learned has `gap_closed`, the others have `retention`.
    """

    env: str
    step: int
    student: float
    student_context: float | None = None
    teacher_context: float | None = None
    gap_closed: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    retention: float | None = None
    kl: float | None = None
    """KL(student || teacher) on the student's samples, nats per token."""
    collapsed: bool = False

    @property
    def gap_text(self) -> str:
        """Closed share of the gap with its interval; "n.s." if the gap itself is not significant."""
        if self.gap_closed is None:
            return "-" if self.student_context is None else "n.s."
        interval = "" if self.ci_low is None else f" ({self.ci_low:.2f} to {self.ci_high:.2f})"
        return f"{self.gap_closed:.2f}{interval}"


def read_scores(series: Mapping[str, Series]) -> list[DistillationScores]:
    """All evaluations, by environment and step."""
    scores = []
    for name in sorted(series):
        if (match := _SCORE.fullmatch(name)) is None:
            continue
        env = match["env"]
        keys = {
            "student_context": "student_context/avg",
            "teacher_context": "teacher_context/avg",
            "gap_closed": "gap_closed",
            "ci_low": "gap_closed/ci_low",
            "ci_high": "gap_closed/ci_high",
            "retention": "retention",
            "kl": "kl_rev",
            "collapsed": "collapsed",
        }
        columns = {field: dict(series.get(f"distill/{env}/{key}", [])) for field, key in keys.items()}
        for step, student in series[name]:
            values = {field: column.get(step) for field, column in columns.items()}
            is_collapsed = bool(values.pop("collapsed"))
            scores.append(DistillationScores(env, step, student, **values, collapsed=is_collapsed))
    return scores


def latest_scores(scores: Sequence[DistillationScores]) -> list[DistillationScores]:
    """The newest evaluation of each environment."""
    return list({row.env: row for row in sorted(scores, key=lambda row: row.step)}.values())


def scores_text(scores: Sequence[DistillationScores]) -> str:
    """A table with one line per evaluation."""
    head = ("environment", "step", "student", "student + context", "teacher + context", "gap closed (95%)")
    table = [[*head, "retention", "KL to teacher"]]
    for row in scores:
        numbers = (row.student, row.student_context, row.teacher_context)
        table.append([row.env, str(row.step), *map(_cell, numbers), row.gap_text, _cell(row.retention), _cell(row.kl)])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in table
    ]
    if any(row.gap_text == "n.s." for row in scores):
        lines.append("n.s.: the gap between student and teacher is not significant, so no share of it is reported")
    return "\n".join(lines)


def count_skipped(series: Mapping[str, Series]) -> dict[str, int]:
    """Dropped samples without teacher scores, by reason."""
    totals = {
        name.removeprefix(SKIPPED): round(sum(value for _, value in points))
        for name, points in sorted(series.items())
        if name.startswith(SKIPPED)
    }
    return {reason: count for reason, count in totals.items() if count}


def skipped_text(skipped: Mapping[str, int]) -> str:
    """Number and reasons of dropped samples."""
    reasons = ", ".join(f"{reason} {count}" for reason, count in skipped.items())
    return f"{sum(skipped.values())} samples were not scored by the teacher and left out ({reasons})"


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
