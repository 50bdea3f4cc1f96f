"""Step reports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from prime_rl.orchestrator.report import WINDOW_STEPS, Reporter
from rollouts.training.rollout_gen.groups import DropReason, GroupBuffer


def build_reporter(groups: GroupBuffer) -> Reporter:
    generator = SimpleNamespace(config=SimpleNamespace(rollouts_per_example=8))
    orchestrator = SimpleNamespace(rollouts=SimpleNamespace(groups=groups), generator=generator)
    return Reporter(cast(Any, orchestrator))


def test_filtered_rollouts_of_a_resumed_run_are_those_since() -> None:
    groups = GroupBuffer()
    groups.load_state_dict({**GroupBuffer().state_dict(), "drops": {"easy": 1000, "hard": 500}})
    reporter = build_reporter(groups)
    groups.drop(groups.draw(0)[0], DropReason.HARD, 0.0)
    assert reporter._filtered() == {"filtered_rollouts/easy": 0.0, "filtered_rollouts/hard": 8.0}
    assert reporter._filtered() == {"filtered_rollouts/easy": 0.0, "filtered_rollouts/hard": 0.0}


def test_throughput_covers_the_steps_in_which_it_was_generated() -> None:
    """Two batches that are generated together are ready together: the second takes no time of its own."""
    reporter = build_reporter(GroupBuffer())
    assert reporter._throughput(1000, 10.0) == 100
    assert reporter._throughput(1000, 0.0) == 200
    for _ in range(WINDOW_STEPS):
        last = reporter._throughput(1000, 20.0)
    assert last == 50
