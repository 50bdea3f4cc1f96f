"""Pareto search over contexts (GEPA, 2507.19457, algorithms 1 and 2, with one set of examples for both of its roles).

parent from the front --> proposal --> minibatch --better--> all examples --> front
                                           +------not better: rejected

The search is a deterministic function of its seed, of the scores and of the proposals. A resumed search replays
recorded scores and proposals and thereby reaches the same state. The `gepa` package does not offer this: it pickles its
state and does not store its random state.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

from rollouts.training.metrics import reaches

if TYPE_CHECKING:
    from prime_rl.evolve.config import EvolveConfig


class CandidateStatus(StrEnum):
    """Result of a proposal."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    DUPLICATE = "duplicate"
    EMPTY = "empty"


@dataclass
class Candidate:
    """A context with its parent and its scores by example: all of an accepted one, else those of its minibatch."""

    number: int
    text: str
    parent: int | None = None
    status: CandidateStatus = CandidateStatus.ACCEPTED
    minibatch: list[int] = field(default_factory=list)
    scores: dict[int, float] = field(default_factory=dict)

    @property
    def mean(self) -> float | None:
        """Mean score of an accepted candidate."""
        return statistics.fmean(self.scores.values()) if self.status is CandidateStatus.ACCEPTED else None


Evaluate = Callable[[int, str, Sequence[int]], Awaitable[Mapping[int, float]]]
"""(candidate number, context, examples) -> score of each example."""
Propose = Callable[[int, Candidate, Sequence[int]], Awaitable[str]]
"""(candidate number, parent, minibatch) -> new context."""


@dataclass
class Search:
    """The candidates of a search and the number of rollouts that it has used.

    An evaluation of one example costs `cost` rollouts. `examples` are the numbers of the examples.
    """

    limits: EvolveConfig
    examples: Sequence[int]
    cost: int
    evaluate: Evaluate
    propose: Propose
    on_candidate: Callable[[Search], None] = lambda _: None
    candidates: list[Candidate] = field(default_factory=list)
    num_rollouts: int = 0

    async def run(self, context: str, scores: Mapping[int, float] = MappingProxyType({})) -> None:
        """Search until the budget, `max_proposals`, `max_repeats` or `stop_reward` is reached.

        `scores` of the first context are already known, and counted in `num_rollouts`.
        """
        await self._try(Candidate(0, context, scores=dict(scores)))
        while self._may_continue():
            number = len(self.candidates)
            rng = random.Random(f"{self.limits.seed}/{number}")
            parent = select_parent(self.accepted, rng)
            minibatch = self._draw_minibatch(parent, rng)
            text = await self.propose(number, parent, minibatch)
            await self._try(Candidate(number, text, parent.number, minibatch=minibatch), parent)

    @property
    def accepted(self) -> list[Candidate]:
        """Candidates with scores of all examples."""
        return [candidate for candidate in self.candidates if candidate.status is CandidateStatus.ACCEPTED]

    @property
    def best(self) -> Candidate:
        """The accepted candidate with the highest mean score; of equal ones the first."""
        return max(self.accepted, key=lambda candidate: statistics.fmean(candidate.scores.values()))

    @property
    def num_repeats(self) -> int:
        """Proposals since the last new context: empty ones and copies of an earlier one."""
        is_new = [c.status not in (CandidateStatus.DUPLICATE, CandidateStatus.EMPTY) for c in self.candidates]
        return is_new[::-1].index(True)

    def _may_continue(self) -> bool:
        """Whether the budget suffices for a proposal that is accepted, and a better score is possible."""
        limits = self.limits
        return (
            self.num_rollouts + len(self.examples) * self.cost <= limits.budget
            and len(self.candidates) <= limits.max_proposals
            and self.num_repeats < limits.max_repeats
            and any(not reaches(score, limits.stop_reward) for score in self.best.scores.values())
        )

    def _draw_minibatch(self, parent: Candidate, rng: random.Random) -> list[int]:
        """Half of the minibatch, rounded up, from the examples that the parent fails, the rest from all others."""
        size = min(self.limits.minibatch_size, len(self.examples))
        failed = [i for i in self.examples if not reaches(parent.scores[i], self.limits.stop_reward)]
        chosen = rng.sample(failed, min(len(failed), (size + 1) // 2))
        others = [i for i in self.examples if i not in set(chosen)]
        return sorted(chosen + rng.sample(others, size - len(chosen)))

    async def _try(self, candidate: Candidate, parent: Candidate | None = None) -> None:
        if parent is not None:
            candidate.status = await self._screen(candidate, parent)
        missing = [i for i in self.examples if i not in candidate.scores]
        if candidate.status is CandidateStatus.ACCEPTED and missing:
            await self._score(candidate, missing)
        self.candidates.append(candidate)
        self.on_candidate(self)

    async def _screen(self, candidate: Candidate, parent: Candidate) -> CandidateStatus:
        """Accept a new text whose minibatch scores have a higher sum than the parent's."""
        if not candidate.text.strip():
            return CandidateStatus.EMPTY
        if any(candidate.text == other.text for other in self.candidates):
            return CandidateStatus.DUPLICATE
        await self._score(candidate, candidate.minibatch)
        before = sum(parent.scores[i] for i in candidate.minibatch)
        is_better = sum(candidate.scores.values()) > before
        return CandidateStatus.ACCEPTED if is_better else CandidateStatus.REJECTED

    async def _score(self, candidate: Candidate, examples: Sequence[int]) -> None:
        candidate.scores |= await self.evaluate(candidate.number, candidate.text, examples)
        candidate.scores = dict(sorted(candidate.scores.items()))
        self.num_rollouts += len(examples) * self.cost


def find_front(candidates: Sequence[Candidate]) -> dict[int, list[int]]:
    """Pareto front over examples: candidate number -> examples on which it has the best score.

    A candidate is in the front if it is best on some example and no other candidate is at least as good on every
    example and better on one (GEPA, algorithm 2). All candidates have scores of the same examples.
    """
    front: dict[int, list[int]] = {}
    for candidate in candidates:
        if not any(_dominates(other, candidate) for other in candidates):
            wins = [i for i, score in candidate.scores.items() if score == max(c.scores[i] for c in candidates)]
            if wins:
                front[candidate.number] = wins
    return front


def _dominates(one: Candidate, other: Candidate) -> bool:
    pairs = [(score, other.scores[i]) for i, score in one.scores.items()]
    return all(a >= b for a, b in pairs) and any(a > b for a, b in pairs)


def select_parent(candidates: Sequence[Candidate], rng: random.Random) -> Candidate:
    """Sample from the front, weighted by the number of examples on which a candidate is best."""
    front = find_front(candidates)
    [number] = rng.choices(list(front), weights=[len(wins) for wins in front.values()])
    return next(candidate for candidate in candidates if candidate.number == number)
