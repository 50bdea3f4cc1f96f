"""Accounts of sampled tokens: generated = trained + dropped + unscored + in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from rollouts.training.rollout_gen.groups import DropReason
from rollouts.training.types import Sample


class TokenLedger:
    """Counts where the sampled tokens of a run end up.

        receive() -> running -> settle() -> ready samples -> emit() -> pending batch -> release() -> trained
                        |  \\-> leave_unscored()   \\-> drop_samples()     \\-> drop_from_batch()
                        \\-> drop(reason)

    A token is generated when the server has returned it and its rollout, failed or not, has come to the manager: also
    in an attempt that failed and was retried. Aborted requests, restarted groups and work lost with a process return no
    rollout. Tokens of ready groups are counted from the samples themselves, so that `check` detects samples that are
    lost or duplicated.
    """

    def __init__(self) -> None:
        self.generated = self.trained = self.unscored = 0
        self.dropped: Counter[str] = Counter()  # `DropReason` or name of a filter -> tokens
        self._running: dict[int, int] = {}  # group index -> tokens that are being scored
        self._pending: dict[int, int] = {}  # batch -> tokens; its version is not live yet

    def receive(self, group_index: int, num_tokens: int) -> None:
        """Count the sampled tokens of a group's rollouts."""
        self.generated += num_tokens
        self._running[group_index] = self._running.get(group_index, 0) + num_tokens

    def has_received(self, group_index: int) -> bool:
        """Whether tokens of a running group have been counted."""
        return group_index in self._running

    def leave_unscored(self, group_index: int, num_tokens: int) -> None:
        """Count tokens of failed rollouts and attempts, and of samples that the teacher cannot score."""
        self._running[group_index] -= num_tokens
        self.unscored += num_tokens

    def settle(self, group_index: int) -> None:
        """The group is ready: its tokens are those of its samples."""
        self._running.pop(group_index, None)

    def drop(self, group_index: int, reason: str) -> None:
        """Drop the received tokens of a running group."""
        if num_tokens := self._running.pop(group_index, 0):
            self.dropped[reason] += num_tokens

    def drop_samples(self, samples: Iterable[Sample], reason: str) -> None:
        """Drop the samples of a ready group."""
        self.dropped[reason] += count_sampled(samples)

    def emit(self, step: int, samples: Iterable[Sample]) -> None:
        """Move ready samples to batch `step`."""
        self._pending[step] = count_sampled(samples)

    def drop_from_batch(self, step: int, samples: Iterable[Sample], reason: str) -> None:
        """Drop samples of batch `step` that are not sent."""
        if num_tokens := count_sampled(samples):
            self._pending[step] -= num_tokens
            self.dropped[reason] += num_tokens

    def release(self, step: int) -> None:
        """The batches up to `step` are trained."""
        for done in [batch for batch in self._pending if batch <= step]:
            self.trained += self._pending.pop(done)

    def count_in_flight(self, ready: Iterable[Sample]) -> int:
        """Tokens in scoring, in the `ready` samples and in batches whose version is not live."""
        return sum(self._running.values()) + count_sampled(ready) + sum(self._pending.values())

    def check(self, ready: Iterable[Sample]) -> None:
        """Assert that every generated token is accounted for once."""
        accounted = self.trained + self.dropped.total() + self.unscored + self.count_in_flight(ready)
        assert self.generated == accounted, f"{self.generated} tokens were generated, {accounted} are accounted for"

    def describe(self, ready: Iterable[Sample]) -> str:
        """The accounts in one line."""
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(self.dropped.items()))
        return (
            f"generated={self.generated} trained={self.trained} dropped={self.dropped.total()}"
            f"{f' ({reasons})' if reasons else ''} unscored={self.unscored} in_flight={self.count_in_flight(ready)}"
        )

    def state_dict(self) -> dict[str, Any]:
        """The state, serializable as JSON."""
        return {
            "generated": self.generated,
            "trained": self.trained,
            "unscored": self.unscored,
            "dropped": {str(reason): count for reason, count in sorted(self.dropped.items())},
            "running": sum(self._running.values()),
            "pending": sum(self._pending.values()),
        }

    def load_state_dict(self, state: dict[str, Any] | None, ready: Iterable[Sample]) -> None:
        """Restore `state`: saved batches are trained, and groups that were being scored run again.

        None, from checkpoints without accounts: counting starts with the `ready` samples.
        """
        TokenLedger.__init__(self)
        if state is None:
            self.generated = count_sampled(ready)
            return
        self.generated, self.unscored = state["generated"], state["unscored"]
        self.trained = state["trained"] + state["pending"]
        self.dropped = Counter(state["dropped"])
        if state["running"]:
            self.dropped[DropReason.INTERRUPTED] += state["running"]


def count_sampled(samples: Iterable[Sample]) -> int:
    """Number of tokens that carry loss."""
    return sum(sample.response_length for sample in samples)
