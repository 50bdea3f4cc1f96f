"""Book-keeping of groups: every prompt that was drawn is running, waiting, ready, out, or dropped for a reason."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from rollouts.training.types import Sample


class GroupAssembler:
    """The life of groups, without IO, clocks or tasks.

        draw() -> IN FLIGHT -> finish() -> READY -> take() -> EMITTED
                    |    ^  \\-> drop(reason) -> DROPPED
         give_back()v    | draw()
                  RETURNED

    Groups carry a growing index. They are emitted in that order, whatever order they finish in: `take` hands out a
    group once every lower index is settled. Hence the emitted stream is the accepted groups in index order, for all
    latencies, failures, aborts and save points. Always: next_group_index = in flight + returned + ready + emitted
    + dropped.
    """

    def __init__(self) -> None:
        self.next_group_index = 0
        self.in_flight: dict[int, int] = {}  # group index -> position of its prompt in the data buffer
        self.returned: dict[int, int] = {}
        self.num_emitted = 0
        self.drops: Counter[str] = Counter()
        self.rejected_streak = 0  # dropped since the last group that was kept
        self._frontier = 0  # every lower index is settled
        self._settled: dict[int, list[Sample] | None] = {}  # at or above the frontier; None: dropped
        self._queue: deque[list[Sample]] = deque()  # ready and below the frontier, in order
        self._num_ready = 0

    @property
    def num_ready(self) -> int:
        """Groups that are finished and wait to be taken."""
        return self._num_ready

    @property
    def num_open(self) -> int:
        """Groups that are drawn but neither emitted nor dropped."""
        return len(self.in_flight) + len(self.returned) + self._num_ready

    def draw(self, position: int) -> tuple[int, int]:
        """Start a group: a returned one at its own position if there is any, else a new one at `position`."""
        if self.returned:
            group_index = min(self.returned)
            position = self.returned.pop(group_index)
        else:
            group_index = self.next_group_index
            self.next_group_index += 1
        self.in_flight[group_index] = position
        return group_index, position

    def finish(self, group_index: int, samples: list[Sample]) -> None:
        """The group is scored and accepted."""
        del self.in_flight[group_index]
        self.rejected_streak = 0
        self._num_ready += 1
        self._settle(group_index, samples)

    def drop(self, group_index: int, reason: str) -> None:
        """The group will never be emitted."""
        del self.in_flight[group_index]
        self.drops[reason] += 1
        self.rejected_streak += 1
        self._settle(group_index, None)

    def give_back(self, group_index: int) -> None:
        """The group was interrupted; it is drawn again before any new one."""
        self.returned[group_index] = self.in_flight.pop(group_index)

    def take(self, num_groups: int) -> list[list[Sample]] | None:
        """The next `num_groups` groups in index order, or None while a lower one is still open."""
        if len(self._queue) < num_groups:
            return None
        self.num_emitted += num_groups
        self._num_ready -= num_groups
        return [self._queue.popleft() for _ in range(num_groups)]

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready. Groups in flight are saved as returned: they run again after loading."""
        ready = [*self._queue, *(group for _, group in sorted(self._settled.items()) if group is not None)]
        open_groups = sorted({**self.returned, **self.in_flight}.items())
        return {
            "next_group_index": self.next_group_index,
            "num_emitted": self.num_emitted,
            "drops": dict(self.drops),
            "rejected_streak": self.rejected_streak,
            "dropped_ahead": sorted(index for index, group in self._settled.items() if group is None),
            "returned": [{"group_index": index, "position": position} for index, position in open_groups],
            "partial_samples": [sample.to_dict() for group in ready for sample in group],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become the assembler that was saved, whatever this one held before."""
        GroupAssembler.__init__(self)
        self.next_group_index = state["next_group_index"]
        self.num_emitted = state["num_emitted"]
        self.drops = Counter(state["drops"])
        self.rejected_streak = state["rejected_streak"]
        self.returned = {entry["group_index"]: entry["position"] for entry in state["returned"]}
        self._frontier = min(self.returned, default=self.next_group_index)
        self._settled = {index: None for index in state["dropped_ahead"] if index >= self._frontier}
        groups: dict[int, list[Sample]] = {}
        for row in state["partial_samples"]:
            groups.setdefault(row["group_index"], []).append(Sample.from_dict(row))
        self._num_ready = len(groups)
        for index, group in sorted(groups.items()):
            if index < self._frontier:
                self._queue.append(group)
            else:
                self._settled[index] = group

    def _settle(self, group_index: int, samples: list[Sample] | None) -> None:
        self._settled[group_index] = samples
        while self._frontier in self._settled:
            group = self._settled.pop(self._frontier)
            if group is not None:
                self._queue.append(group)
            self._frontier += 1
