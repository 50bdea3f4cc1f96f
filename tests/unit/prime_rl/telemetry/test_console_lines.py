"""The console lines of a step and of an evaluation, by what the run learns from."""

from __future__ import annotations

from prime_rl.orchestrator import report
from prime_rl.orchestrator.distillation import baseline_eval as arms
from prime_rl.trainer import session

BATCH = {
    "time/step": 1.0,
    "reward/mean": 0.0,
    "perf/throughput": 100.0,
    "seq_len/mean": 20.0,
    "batch/async_level": 1.0,
}
STEP = {
    "time/step": 1.0,
    "loss/mean": 0.5,
    "optim/grad_norm": 1.0,
    "optim/lr": 1e-3,
    "perf/throughput": 100.0,
    "perf/mfu": 1.0,
    "perf/peak_memory": 1.0,
}


def test_batch_line_has_no_reward_where_none_is_computed() -> None:
    assert "| Reward: 0.0000 |" in report.format_step(3, BATCH, None)
    teacher = {**BATCH, "teacher/skipped/overlong": 2.0, "teacher/skipped/server": 1.0}
    line = report.format_step(3, teacher, None, is_scored=False)
    assert "Reward" not in line and "| Not Scored by Teacher: 3 |" in line
    assert "Not Scored" not in report.format_step(3, {**BATCH, "teacher/skipped/server": 0.0}, None)


def test_trainer_line_has_the_distance_to_the_teacher() -> None:
    assert "Teacher KL" not in session.format_step(1, STEP)
    line = session.format_step(1, {**STEP, "teacher_kl/mean": 0.25, "reference_kl/mean": 0.01})
    assert "Loss: 0.5000 | Teacher KL: 0.2500 | Reference KL: 0.0100" in line


def test_evaluation_line_has_gap_or_retention() -> None:
    gap = {"gap_closed": 0.8, "gap_closed/ci_low": 0.5, "gap_closed/ci_high": 1.125}
    line = arms.format_scores("facts", 20, {"student/avg": 0.5, "teacher_context/avg": 0.6, **gap})
    assert line.startswith("Distillation of facts at version 20 | Student: 0.5000 | Teacher with Context: 0.6000")
    assert line.endswith("Gap Closed: 0.80 (0.50 to 1.12)")
    assert arms.format_scores("other", 0, {"student/avg": 0.5, "retention": 1.0}).endswith("| Retention: 1.0000")
