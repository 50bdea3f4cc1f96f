"""Each health check reports its problem and passes healthy batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from prime_rl.telemetry.health_checks import CONSTANT_BATCHES, WINDOW, RolloutHealthChecks, TrainerHealthChecks
from rollouts.training.types import Sample, Status

END = 2


def make_sample(number: int, **changes: Any) -> Sample:
    values: dict[str, Any] = {
        "prompt": "p",
        "tokens": [7, 8, 9, 10 + number, END],
        "loss_mask": [0.0, 0.0, 0.0, 1.0, 1.0],
        "reward": float(number % 2),
        "group_index": number // 4,
        "index": number % 4,
        "status": Status.COMPLETED,
        "stop_reason": "stop",
        "versions": [(3, 4)],
        "metadata": {"num_turns": 1},
    }
    return Sample(**values | changes)


def batch(**changes: Any) -> list[Sample]:
    return [make_sample(number, **changes) for number in range(16)]


def output(samples: Sequence[Sample]) -> list[str]:
    return RolloutHealthChecks(2, log=lambda line: None).check(samples)


def test_healthy_batches_pass() -> None:
    assert output(batch()) == [] and output([]) == []
    assert output(batch(status=Status.TRUNCATED, stop_reason="length")) == []


def test_prompts_that_carry_loss() -> None:
    [line] = output([make_sample(n, loss_mask=[1.0] * 5 if n == 3 else [0, 0, 0, 1.0, 1.0]) for n in range(16)])
    assert line.startswith("health check mask: 1 of 16 samples carry loss on their first token")


def test_almost_nothing_carries_loss() -> None:
    tools = [5] * 1000
    thin = [make_sample(0, tokens=[7, 9, *tools, END], loss_mask=[0, 1.0, *[0.0] * 1000, 0.0])]
    assert "only 1 of 1002 tokens" in output(thin)[0]
    fuller = [make_sample(0, tokens=[7, *[9] * 20, *tools], loss_mask=[0, *[1.0] * 20, *[0.0] * 1000])]
    assert output(fuller) == []


def test_the_end_of_turn_is_not_in_the_loss() -> None:
    [line] = output(batch(loss_mask=[0.0, 0.0, 0.0, 1.0, 0.0]))
    assert "end of turn" in line and "16 different last trained tokens" in line and "cannot learn to stop" in line
    two = [make_sample(n, tokens=[7, 8, 9, 10 + n, END + n % 2]) for n in range(16)]
    assert output(two) == [], "a model may have two tokens that end a turn"


def test_turns_that_rewrite_the_history() -> None:
    talks = [make_sample(n, metadata={"num_turns": 2}) for n in range(16)]
    assert output(talks) == []
    split = [sample for sample in talks for _ in range(2)]
    [line] = output(split)
    assert "prefixes: in 16 of 16 conversations" in line and "template" in line


def test_each_seat_of_a_game_has_a_sample_of_its_own() -> None:
    metadata = {"num_turns": 4}
    assert output([make_sample(n, seat=seat, metadata=metadata) for n in range(16) for seat in ("x", "o")]) == []


@pytest.mark.parametrize(
    ("answer", "reply", "found", "cure"),
    [
        (98, "It is 98.", True, "are int, not text: compare with str(answer)"),
        ("98", "98", True, "finds it"),
        (98, "It is 980", False, ""),
        (None, "None", False, ""),
        ("", "98", False, ""),
    ],
)
def test_rewards_of_0_for_right_answers_name_the_cause(answer: Any, reply: str, found: bool, cure: str) -> None:
    checks = RolloutHealthChecks(2, log=lambda line: None)
    wrong = batch(reward=0.0, response=reply, metadata={"answer": answer})
    [line] = [line for _ in range(CONSTANT_BATCHES) for line in checks.check(wrong)]
    assert ("48 of 48 completions contain the expected answer" in line) == found, line
    assert cure in line and ("may fail to parse" in line) != found


def test_a_right_answer_among_rewards_of_0_warns_later_too() -> None:
    checks = RolloutHealthChecks(2, log=lambda line: None)
    wrong, right = ({"reward": 0.0, "response": text, "metadata": {"answer": "98"}} for text in ("7", "98"))
    lines = [*(checks.check(batch(**wrong)) for _ in range(CONSTANT_BATCHES)), checks.check(batch(**right))]
    assert [len(new) for new in lines] == [0, 0, 1, 1] and "may fail to parse" in lines[2][0]
    assert lines[3][0].startswith("health check reward function: ") and "16 of 64 completions contain" in lines[3][0]
    assert checks.check(batch(**wrong)) == checks.check(batch(**right)) == [], "once"


def test_constant_rewards_warn_once() -> None:
    checks = RolloutHealthChecks(2, log=lambda line: None)
    lines = [checks.check(batch(reward=0.0)) for _ in range(CONSTANT_BATCHES + 2)]
    assert [bool(line) for line in lines] == [*[False] * (CONSTANT_BATCHES - 1), True, False, False], "logged once"
    assert "has reward 0" in lines[CONSTANT_BATCHES - 1][0]
    assert checks.check(batch()) == []
    assert [bool(checks.check(batch(reward=1.0))) for _ in range(CONSTANT_BATCHES)][-1], (
        "logged again after it was resolved"
    )
    unverified = RolloutHealthChecks(2, verified=False, log=lambda line: None)
    assert not any(unverified.check(batch(reward=0.0)) for _ in range(9)), "without verification all rewards are 0"


@pytest.mark.parametrize(
    ("level", "stalled_s", "is_reporting_rank"), [(2, 0.9, True), (2, 0.3, False), (0, 0.9, False)]
)
def test_starved_trainer_or_engine(level: int, stalled_s: float, is_reporting_rank: bool) -> None:
    """In turn (level 0) each waits for the other, which is no fault."""
    engine, trainer = (
        RolloutHealthChecks(level, log=lambda line: None),
        TrainerHealthChecks(level, log=lambda line: None),
    )
    times = {"time/wait_for_batch": stalled_s, "time/step": 1.0}
    lines = [[*engine.check(batch(), stalled_s, 1.0), *trainer.check(n, times, [])] for n in range(WINDOW)]
    assert not any(lines[:-1]), "not before there is enough to judge by"
    assert bool(lines[-1]) == is_reporting_rank
    if is_reporting_rank:
        assert "trainer.parallel.dp" in lines[-1][0] and "max_async_level (now 2)" in lines[-1][1]


@pytest.mark.parametrize(
    ("step", "metrics", "is_reporting_rank"),
    [
        (5, {"importance_ratio/mean": 0.895}, "health check ratio: the mean importance ratio is 0.895"),
        (5, {"importance_ratio/mean": 1.001}, None),
        (6, {"importance_ratio/mean": 0.895}, None),  # older weights: it may differ
        (6, {"importance_ratio/mean": 0.895, "optim/lr": 0.0}, "have not changed"),
        (5, {"mismatch_kl/mean": 0.3}, "labeled with the newest adapter"),
        (5, {"mismatch_kl/mean": 0.004}, None),
        (6, {"mismatch_kl/mean": 0.3}, None),
    ],
)
def test_wrong_ratios_and_undelivered_weights(
    step: int, metrics: dict[str, float], is_reporting_rank: str | None
) -> None:
    """The samples are of version 4, which step 5 trains."""
    found = TrainerHealthChecks(2, adapter=True, log=lambda line: None).check(step, metrics, batch())
    assert [bool(found)] == [is_reporting_rank is not None] and (
        is_reporting_rank is None or is_reporting_rank in found[0]
    )


@pytest.mark.parametrize(
    ("late", "kl", "is_reporting_rank"), [(0.1, 1e-5, True), (0.9, 1e-5, False), (0.1, 0.3, False)]
)
def test_student_and_teacher_collapse_together(late: float, kl: float, is_reporting_rank: bool) -> None:
    checks, lines = TrainerHealthChecks(2, log=lambda line: None), list[str]()
    for step in range(3 * WINDOW):
        reward = 0.9 if step < WINDOW else late
        lines += checks.check(step, {"teacher_kl/mean": kl}, batch(reward=reward))
    assert [line.startswith("health check teacher collapse") for line in lines] == [True] * is_reporting_rank
