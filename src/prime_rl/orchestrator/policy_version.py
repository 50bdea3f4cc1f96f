"""The policy version that the inference servers serve, shared by the components of the orchestrator."""

from __future__ import annotations

from collections.abc import Callable

import anyio


class PolicyVersion:
    """The live version, and the observers that are called when it changes.

        WeightRelay --> update --> rollout slots are freed, due evaluations start, old batches are removed

    `live` is the last version that all servers in use have loaded. `released` is the last batch whose rollout slots are
    free: the batch of the live version, or the last batch sent if the trainer reads no batches.
    """

    def __init__(self, version: int = 0) -> None:
        self.live = self.released = version
        self.lock = anyio.Lock()
        """Locked while servers load another version."""
        self._observers: list[Callable[[PolicyVersion], None]] = []

    def subscribe(self, observer: Callable[[PolicyVersion], None]) -> None:
        """Call `observer` after every update, in the order of subscription."""
        self._observers.append(observer)

    def update(self, *, live: int, released: int) -> None:
        """Set both numbers and call the observers."""
        self.live, self.released = live, released
        for observer in self._observers:
            observer(self)
