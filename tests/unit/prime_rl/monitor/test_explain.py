"""Findings of a run and their evidence."""

from __future__ import annotations

from pathlib import Path

import pytest
from page_runs import (
    write_distillation_run,
)

from prime_rl.monitor.explain import explain, findings_text, waiting_shares
from prime_rl.monitor.local_runs import open_run
from prime_rl.monitor.page_data import explain_run


def test_explanations_name_stalls_and_fixes() -> None:
    def lanes(wait: float, generate: float) -> dict[str, list[tuple[str, float, float, int]]]:
        spans = [("wait_for_batch", 10.0 * s, 10.0 * s + wait, s) for s in range(1, 9)]
        spans += [("forward_backward", 10.0 * s + wait, 10.0 * s + 10, s) for s in range(1, 9)]
        return {"trainer": spans, "inference": [("generate", 10.0 * s, 10.0 * s + generate, s) for s in range(1, 9)]}

    config = {"orchestrator": {"max_async_level": 1}, "trainer": {"micro_bs": 8, "model": {"seq_len": 100}}}
    shares = waiting_shares(lanes(4, 9))
    assert shares["trainer"]["wait_for_batch"] == pytest.approx(0.4)
    assert shares["inference"]["generate"] == pytest.approx(0.9)
    starved = findings_text(explain({}, lanes(4, 9), config))
    assert "waits for batches 40%" in starved and "add inference servers" in starved
    assert "raise max_async_level" in findings_text(explain({}, lanes(4, 5), config))
    stalled = {
        "orchestrator": {
            "time/slots_exhausted": [(s, 5.0) for s in range(1, 9)],
            "time/step": [(s, 10.0) for s in range(1, 9)],
        }
    }
    assert "trainer is the bottleneck" in findings_text(explain(stalled, lanes(1, 4), config))
    cut = {name: [(s, share) for s in range(1, 9)] for name, share in (
        ("is_truncated/mean", 0.5), ("batch/effective_batch_size", 0.2), ("reward/mean", 0.1)
    )}  # fmt: skip
    text = findings_text(explain({"orchestrator": cut}, {}, config))
    assert "max_tokens" in text and "online_difficulty_filtering" in text
    batch = {name: [(8, value)] for name, value in (
        ("batch/samples", 40.0), ("batch/tokens", 1000.0), ("batch/micro_batches", 5.0)
    )}  # fmt: skip
    assert "full" not in findings_text(explain({"trainer": batch}, {}, config)), "tokens are those of all ranks"
    batch["batch/micro_batch_tokens"] = [(8, 80.0)]
    assert "micro-batches are 10% full" in findings_text(explain({"trainer": batch}, {}, config))
    text = findings_text(explain({"trainer": batch | {"batch/shared_ratio": [(8, 0.6)]}}, {}, config))
    assert "1000 tokens in all, 400 without shared beginnings, are packed" in text
    assert findings_text([]) == "no complete step yet"


def test_pauses_between_attempts_do_not_count() -> None:
    starts = {step: 10.0 * step + 5000.0 * (step > 8) for step in range(1, 17)}  # resumed after step 8
    waits = [("wait_for_batch", at, at + 4, step) for step, at in starts.items()]
    trained = [("forward_backward", at + 4, at + 10, step) for step, at in starts.items()]
    lanes = {"trainer": waits + trained, "inference": [("generate", at, at + 9, step) for step, at in starts.items()]}
    text = findings_text(explain({}, lanes, {}))
    assert "waits for batches 40% of the time, the engine generates 90% of it" in text
    assert "generation is the bottleneck" in text


def test_the_servers_of_a_deployment_are_the_engine() -> None:
    lanes = {
        "trainer": [("wait_for_batch", 10.0 * s, 10.0 * s + 4, s) for s in range(1, 9)]
        + [("forward_backward", 10.0 * s + 4, 10.0 * s + 10, s) for s in range(1, 9)],
        "inference_0": [("generate", 10.0 * s, 10.0 * s + 6, s) for s in range(1, 9)],
        "inference_1": [("update_weights", 10.0 * s, 10.0 * s + 5, s) for s in range(1, 9)],
        "teacher_inference_0": [("generate", 10.0 * s, 10.0 * s + 10, s) for s in range(1, 9)],
    }
    text = findings_text(explain({}, lanes, {}))
    assert "the engine generates 30% of it" in text and "raise max_async_level" in text
    assert "loading takes the engine 25% of the time" in text


def test_no_advice_without_evidence_beyond_the_noise() -> None:
    def text(values: list[float]) -> str:
        series = {"is_truncated/mean": list(enumerate(values, 1)), "reward/mean": list(enumerate(values, 1))}
        return findings_text(explain({"orchestrator": series}, {}, {}))

    assert "cut off" not in text([0.5] * 6), "four steps after the warm-up"
    assert "50% of the rollouts are cut off" in text([0.5] * 7)
    assert "cut off" not in text([0.5] * 2 + [0.0, 0.25] * 10), "the mean is .125, but so is its noise"
    lanes = {"trainer": [("wait_for_batch", 10.0 * s, 10.0 * s + 9, s) for s in range(1, 7)]}
    assert "waits" not in findings_text(explain({}, lanes, {}))


def test_distillation_is_explained_without_rewards(tmp_path: Path) -> None:
    text = findings_text(explain_run(open_run(write_distillation_run(tmp_path / "run"))))
    assert "reward" not in text and "groups" not in text
    assert "teacher KL: on the student's tokens it fell from" in text
    assert "gap closed on facts: 0.80 (0.60 to 1.10) at step 12: the student scores 0.5, the teacher 0.6" in text
    assert "retention of other: the student keeps 70%" in text and "raise reference_weight" in text
    assert "2 samples were not scored by the teacher" in text and "max_model_len" in text


@pytest.mark.parametrize(("with_context", "cure"), [(0.5, "correct the context"), (0.1, 'teacher = "reference"')])
def test_collapse_names_what_was_lost(with_context: float, cure: str) -> None:
    """With the context as good as the teacher, without it worse than before: the context is wrong."""
    values = {"student/avg": 0.1, "student_context/avg": with_context, "teacher_context/avg": 0.6, "collapsed": 1.0}
    series = {"orchestrator": {f"distill/world/{key}": [(9, value)] for key, value in values.items()}}
    loss = {"adv_tau": 0.0, "teacher_tau": 1.0}
    config = {"trainer": {"loss": loss}, "orchestrator": {"teacher_model": {"context": "x"}}}
    assert cure in findings_text(explain(series, {}, config))


def test_equal_rewards_still_teach_beside_a_teacher() -> None:
    loss = {"adv_tau": 1.0, "teacher_tau": 1.0}
    config = {"trainer": {"loss": loss}, "orchestrator": {"teacher_model": {"context": "x"}}}
    series = {"orchestrator": {"batch/effective_batch_size": [(s, 0.2) for s in range(1, 9)]}}
    text = findings_text(explain(series, {}, config))
    assert "the others are trained on the teacher only" in text and "a gradient" not in text
