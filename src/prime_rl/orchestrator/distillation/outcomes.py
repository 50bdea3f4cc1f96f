"""Contexts from outcomes: the reference answer, a successful rollout of the same group, feedback of the environment.

The teacher scores a rollout after the whole group is finished, so its context may show what happened (SDPO 2601.20802,
OPSD 2601.18734).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prime_rl.client.contexts import Context
from prime_rl.orchestrator.distillation.config import TEMPLATES, ContextFrom
from rollouts.training.agent_integration import Rollout, describe_completion
from rollouts.training.metrics import reaches
from rollouts.training.types import Sample

MIN_WITHOUT_FEEDBACK = 32
"""Unsuccessful rollouts of an environment after which feedback must have been seen."""


@dataclass(frozen=True)
class RolloutOutcome:
    """A finished rollout as contexts see it."""

    index: int
    completion: str
    reward: float
    feedback: str | None = None


Source = Callable[[Mapping[str, Any], RolloutOutcome | None, Sequence[RolloutOutcome]], Context | None]
"""(row, rollout or None before there is one, all rollouts of its group) -> context of the teacher."""


def read_outcomes(samples: Sequence[Sample]) -> dict[int | None, RolloutOutcome]:
    """The rollouts of a group of one seat by `index`, in that order; parts of one rollout share its outcome."""
    found: dict[int | None, RolloutOutcome] = {}
    for sample in sorted(samples, key=lambda sample: sample.index or 0):
        completion = sample.metadata.get("transcript", sample.response)
        feedback = sample.metadata.get("feedback")
        found.setdefault(sample.index, RolloutOutcome(sample.index or 0, completion, sample.reward, feedback))
    return found


def to_outcomes(group: Sequence[Rollout]) -> list[RolloutOutcome]:
    """Outcomes of the rollouts of an evaluation, without failed ones."""
    return [
        RolloutOutcome(index, describe_completion(rollout.completion), rollout.reward, rollout.feedback)
        for index, rollout in enumerate(group)
        if not rollout.failed
    ]


def build_outcome_source(
    context_from: ContextFrom, template: str | None, success_reward: float, seed: int, fill: Callable[..., str]
) -> Source:
    """Build the source of `context_from`; `fill(template, row, fields)` fills the placeholders.

    answer    the reference answer of the row
    sibling   a random other rollout of the group with a reward of at least `success_reward`
    feedback  the rollout's own feedback; before there is a rollout, the first feedback of the group

    None, and thus no teacher, where there is none of these.
    """
    text = TEMPLATES[context_from][0] if template is None else template

    def build(
        row: Mapping[str, Any], rollout: RolloutOutcome | None, group: Sequence[RolloutOutcome]
    ) -> Context | None:
        shown = _choose(context_from, row, rollout, group, success_reward, seed)
        if not shown:
            return None
        return fill(text, row, {key: format_value(value) for key, value in shown.items()})

    return build


def format_value(value: Any) -> str:
    """A value of a row as text, a list or dict as JSON."""
    return json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, list | dict) else str(value)


def _choose(
    context_from: ContextFrom,
    row: Mapping[str, Any],
    rollout: RolloutOutcome | None,
    group: Sequence[RolloutOutcome],
    success_reward: float,
    seed: int,
) -> dict[str, Any]:
    """The values of the template's fields; empty if there is no context."""
    if context_from == "answer":
        answer = row.get("answer")
        return {} if answer in (None, "") else {"answer": answer}
    if context_from == "feedback":
        candidates = [rollout] if rollout is not None else group
        found = next((one for one in candidates if one.feedback), None)
        if found is None:
            return {}
        return {"feedback": found.feedback, "completion": found.completion, "reward": f"{found.reward:g}"}
    index = None if rollout is None else rollout.index
    others = [one for one in group if one.index != index and one.completion.strip()]
    siblings = [one for one in others if reaches(one.reward, success_reward)]
    if not siblings:
        return {}
    one = random.Random(f"{seed}/{row.get('example_id')}/{index}").choice(siblings)
    return {"demonstration": one.completion, "reward": f"{one.reward:g}"}


class FeedbackCheck:
    """Raises `ValueError` for an environment whose unsuccessful rollouts never have feedback."""

    def __init__(self, success_reward: float) -> None:
        self.success_reward = success_reward
        self._num_without: dict[str, int] = {}

    def count(self, env: str, group: Sequence[RolloutOutcome]) -> None:
        """Count the rollouts of a group of an environment with `context_from = "feedback"`."""
        if any(one.feedback for one in group):
            self._num_without[env] = -1  # seen: the others have no feedback for reasons of their own
        if (num := self._num_without.get(env, 0)) < 0:
            return
        num += sum(not reaches(one.reward, self.success_reward) for one in group)
        self._num_without[env] = num
        if num >= MIN_WITHOUT_FEEDBACK:
            raise ValueError(
                f'context_from = "feedback", but none of {num} unsuccessful rollouts of {env} has state["feedback"]: '
                'set it in a reward function of the environment, or use context_from = "sibling" or "answer"'
            )
