"""State machine of prompt groups: in flight, returned, ready, emitted or dropped."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean
from typing import Any

from rollouts.training.types import Sample


class DropReason(StrEnum):
    """Why a group was dropped. Filters add their own names as plain strings."""

    ALL_FAILED = "all_failed"  # none of the prompt's rollouts succeeded
    ENGINE_ERROR = "engine_error"  # every failure was an error of the inference server or a timeout
    TOO_FEW = "too_few"  # too few rollouts succeeded to be compared
    STALE = "stale"  # weight changes restarted the group too often
    EASY = "easy"  # online difficulty filtering: mean reward 1
    HARD = "hard"  # online difficulty filtering: mean reward 0
    EMPTY = "empty"  # the generator returned no samples
    INCOMPLETE = "incomplete"  # samples were missing or aborted
    INTERRUPTED = "interrupted"  # tokens only: a lost server, an abort or a resume restarted the group
    OVERLONG = "overlong"  # tokens only: the sample is longer than seq_len


@dataclass(frozen=True)
class Outcome:
    """The outcome of the prompt at `position`: its group's mean reward, or the reason for dropping the group.

    A group rejected by a filter has both. `reason` is a `DropReason`, the name of a filter, or an error text.
    """

    position: int
    reward: float | None
    reason: str | None = None

    def to_list(self) -> list[Any]:
        """JSON-ready: position, reward, reason."""
        return [self.position, self.reward, None if self.reason is None else str(self.reason)]

    @classmethod
    def from_list(cls, values: Sequence[Any]) -> Outcome:
        """The inverse of `to_list`."""
        return cls(*values)


class GroupBuffer:
    """States of groups, without I/O, clocks or tasks.

        draw() -> IN FLIGHT -> finish() -> READY -> take() -> EMITTED
                    |    ^  \\-> drop(reason) -> DROPPED
         return_group()v    | draw()     READY -> return_group() too, if it is stale
                  RETURNED

    Groups have increasing indices and are emitted in this order, independently of the order of completion: `take`
    returns a group once all lower indices are settled. Hence the stream is the accepted groups in index order for all
    latencies, failures, aborts and save points. `take(n, in_order=False)` does not wait for lower indices.
    Invariant: next_group_index = in flight + returned + ready + emitted + dropped.
    """

    def __init__(self) -> None:
        self.next_group_index = 0
        self.in_flight: dict[int, int] = {}  # group index -> position of its prompt in the data buffer
        self.returned: dict[int, int] = {}
        self.num_emitted = 0
        self.drops: Counter[str] = Counter()
        self.rejected_streak: Counter[str] = Counter()  # groups dropped since the last accepted one, by reason
        self._positions: dict[int, int] = {}  # of ready groups
        self._ready: dict[int, list[Sample]] = {}
        self._outcomes: dict[int, Outcome] = {}  # of settled groups, until they are emitted with a batch
        self._frontier = 0  # every lower index is settled
        self._settled: set[int] = set()  # at or above the frontier: ready, dropped or emitted
        self._queue: deque[int] = deque()  # ready and below the frontier, in order
        self._last_taken = -1

    @property
    def num_ready(self) -> int:
        """Number of finished groups that are not emitted yet."""
        return len(self._ready)

    @property
    def num_open(self) -> int:
        """Number of drawn groups that are neither emitted nor dropped."""
        return len(self.in_flight) + len(self.returned) + len(self._ready)

    @property
    def num_from_returned(self) -> int:
        """Number of open groups from the first returned one on."""
        first = min(self.returned)
        return sum(index >= first for groups in (self.in_flight, self.returned, self._ready) for index in groups)

    @property
    def ready(self) -> dict[int, list[Sample]]:
        """Group index -> samples of the finished groups that are not emitted yet."""
        return dict(self._ready)

    def draw(self, position: int) -> tuple[int, int]:
        """Start a group: a returned one at its old position if there is one, else a new one at `position`."""
        if self.returned:
            group_index = min(self.returned)
            position = self.returned.pop(group_index)
        else:
            group_index = self.next_group_index
            self.next_group_index += 1
        self.in_flight[group_index] = position
        return group_index, position

    def finish(self, group_index: int, samples: list[Sample]) -> None:
        """Mark a group as scored and accepted."""
        position = self.in_flight.pop(group_index)
        self.rejected_streak.clear()
        self._ready[group_index], self._positions[group_index] = samples, position
        self._outcomes[group_index] = Outcome(position, mean_reward(samples))
        self._settle(group_index)

    def drop(self, group_index: int, reason: str, reward: float | None = None) -> None:
        """Mark a group as dropped; `reward` is its mean reward if it was scored."""
        self._outcomes[group_index] = Outcome(self.in_flight.pop(group_index), reward, reason)
        self.drops[reason] += 1
        self.rejected_streak[reason] += 1
        self._settle(group_index)

    def return_group(self, group_index: int) -> None:
        """Return an interrupted or stale group; it is drawn again before new ones."""
        if group_index in self.in_flight:
            self.returned[group_index] = self.in_flight.pop(group_index)
            return
        del self._ready[group_index], self._outcomes[group_index]
        self.returned[group_index] = self._positions.pop(group_index)
        self._settled.discard(group_index)
        if group_index in self._queue:
            self._queue.remove(group_index)
        self._frontier = min(self._frontier, group_index)
        # All other indices above the lowered frontier are settled again.
        self._settled |= {
            i
            for i in range(self._frontier, self.next_group_index)
            if i not in self.in_flight and i not in self.returned
        }
        self._queue = deque(i for i in self._queue if i < self._frontier)

    def take(self, num_groups: int, *, in_order: bool = True) -> list[list[Sample]] | None:
        """The next `num_groups` groups in index order; None if too few are ready or a lower index is open."""
        if len(self._queue if in_order else self._ready) < num_groups:
            return None
        taken = [self._queue.popleft() for _ in range(num_groups)] if in_order else sorted(self._ready)[:num_groups]
        if not in_order:
            self._queue = deque(i for i in self._queue if i not in taken)
        self.num_emitted += num_groups
        self._last_taken = max(taken)
        for index in taken:
            del self._positions[index]
        return [self._ready.pop(index) for index in taken]

    def take_outcomes(self) -> list[Outcome]:
        """Outcomes of the groups up to the last emitted one, in index order."""
        settled = sorted(i for i in self._outcomes if i <= self._last_taken and i not in self._ready)
        return [self._outcomes.pop(index) for index in settled]

    def state_dict(self, *, keep_ready: bool = True) -> dict[str, Any]:
        """The state, serializable as JSON. Groups in flight are saved as returned: they run again after loading; ready
        groups, too, unless `keep_ready`.
        """
        ready = self._ready if keep_ready else {}
        unfinished = {index: position for index, position in self._positions.items() if index not in ready}
        open_groups = sorted({**self.returned, **self.in_flight, **unfinished}.items())
        return {
            "next_group_index": self.next_group_index,
            "num_emitted": self.num_emitted,
            "drops": {str(reason): count for reason, count in self.drops.items()},
            "rejected_streak": {str(reason): count for reason, count in self.rejected_streak.items()},
            "returned": [{"group_index": index, "position": position} for index, position in open_groups],
            "outcomes": [[i, *out.to_list()] for i, out in sorted(self._outcomes.items()) if i not in unfinished],
            "partial_samples": [sample.to_dict() for _, group in sorted(ready.items()) for sample in group],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the current state by `state`."""
        GroupBuffer.__init__(self)
        self.next_group_index = state["next_group_index"]
        self.num_emitted = state["num_emitted"]
        self.drops = Counter(state["drops"])
        streak = state["rejected_streak"]
        self.rejected_streak = Counter(streak if isinstance(streak, dict) else {})  # earlier versions: without reasons
        self.returned = {entry["group_index"]: entry["position"] for entry in state["returned"]}
        self._outcomes = {i: Outcome.from_list(values) for i, *values in state["outcomes"]}
        for row in state["partial_samples"]:
            self._ready.setdefault(row["group_index"], []).append(Sample.from_dict(row))
        self._positions = {index: self._outcomes[index].position for index in self._ready}
        self._frontier = min(self.returned, default=self.next_group_index)
        self._settled = set(range(self._frontier, self.next_group_index)) - set(self.returned)
        self._queue = deque(index for index in sorted(self._ready) if index < self._frontier)

    def _settle(self, group_index: int) -> None:
        self._settled.add(group_index)
        while self._frontier in self._settled:
            self._settled.remove(self._frontier)
            if self._frontier in self._ready:
                self._queue.append(self._frontier)
            self._frontier += 1


def mean_reward(samples: list[Sample]) -> float:
    """Mean over the rollouts of a group; a rollout of several samples counts once, with its first seat's reward."""
    return fmean({sample.index: sample.reward for sample in reversed(samples)}.values())
