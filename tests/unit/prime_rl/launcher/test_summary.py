"""Text about the progress and the result of a run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from prime_rl.config import RLConfig
from prime_rl.launcher import summary
from prime_rl.runtime.run_dir import CKPT_PARTS
from prime_rl.utils.pydantic_config import parse_argv
from rollouts.training.metrics import append_jsonl
from rollouts.training.steps import publish_dir, publish_step


def parse(*argv: str) -> RLConfig:
    return parse_argv(RLConfig, ["--model.name", "tiny-qwen3", *argv], "rl")[0]


def publish(root: Path, step: int) -> Path:
    return publish_step(root, step, lambda directory: (directory / "file").write_text("x"))


def test_the_summary_names_what_to_look_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "num_cores", lambda: 2)
    for step, reward in ((1, 0.25), (2, 0.75)):
        append_jsonl(tmp_path / "metrics.jsonl", [{"step": step, "process": "orchestrator", "reward/mean": reward}])
    weights = publish(tmp_path / "weights", 2)
    text = summary.summarize(parse("--output_dir", str(tmp_path)), 12.34, 20.0)
    for part in (
        "2 in 12.3 s",
        "CPU time 20 s, 81% of 2 cores",
        "0.2500 -> 0.7500",
        str(weights),
        "metrics.jsonl",
        "samples.jsonl",
        "monitor ",
        "eval @ ",
    ):
        assert part in text, part


def test_summary_of_a_distillation_shows_gap_and_retention(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"step": 1, "process": "orchestrator", "reward/mean": 0.0, "teacher/skipped/overlong": 2.0},
        {"step": 1, "process": "trainer", "teacher_kl/mean": 1.5},
        {"step": 2, "process": "trainer", "teacher_kl/mean": 0.25},
    ]
    closed = {"gap_closed": 0.8, "gap_closed/ci_low": 0.5, "gap_closed/ci_high": 1.1, "teacher_context/avg": 0.9}
    facts = {"student/avg": 0.7, "student_context/avg": 0.8, **closed}
    rows.append({"step": 2, "process": "orchestrator", **{f"distill/facts/{k}": v for k, v in facts.items()}})
    single = {"student/avg": 0.6, "teacher_context/avg": 0.9, "gap_closed": 0.7}  # one context of the environment
    rows[-1] |= {f"distill/facts/a/{k}": v for k, v in single.items()}
    other = {"distill/other/student/avg": 0.4, "distill/other/retention": 0.95}
    rows.append({"step": 2, "process": "orchestrator", **other})
    append_jsonl(tmp_path / "metrics.jsonl", rows)
    teacher = ["--output_dir", str(tmp_path), "--orchestrator.teacher_model.context", "x"]
    text = summary.summarize(
        parse(*teacher, "--trainer.loss.adv_tau", "0", "--trainer.loss.teacher_tau", "1"), 9.0, 9.0
    )
    assert "reward" not in text
    assert "teacher KL 1.5000 -> 0.2500" in text and "2 samples were not scored" in text
    assert re.search(r"facts +gap closed 0.80, 0.50 to 1.10 \(teacher 0.9000, student 0.7000, step 2\)", text)
    assert re.search(r"facts/a +gap closed 0.70 \(teacher 0.9000, student 0.6000, step 2\)", text)
    assert re.search(r"other +retention 0.95", text)
    assert "reward" in summary.summarize(parse(*teacher), 9.0, 9.0), "with adv_tau the reward matters too"


def test_commands_work_with_spaces_in_paths(tmp_path: Path) -> None:
    out = tmp_path / "my runs"
    weights = publish(out / "weights", 7)
    assert f"--model.name '{weights}' --output-dir NEW" in summary.describe_stop(out)
    text = summary.summarize(parse("--output_dir", str(out)), 12.34, 20.0)
    assert f"monitor '{out}' --open" in text and f"eval @ '{out}/configs/eval.toml' --model.name '{weights}'" in text


def test_stopped_run_reports_progress_and_how_to_resume(tmp_path: Path) -> None:
    assert "Stopped after step 0; no checkpoint (--ckpt.interval 10 writes" in summary.describe_stop(tmp_path)
    publish(tmp_path / "weights", 7)
    assert f"--model.name {tmp_path}/weights/step_7" in summary.describe_stop(tmp_path)
    for part in CKPT_PARTS:
        publish_dir(tmp_path / "checkpoints" / "step_5" / part, lambda directory: None)
    text = summary.describe_stop(tmp_path)
    assert "step 7" in text and "checkpoint of step 5" in text and "--resume" in text
