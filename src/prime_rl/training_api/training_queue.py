"""The order of training requests: those of a model by sequence number, one at a time; models in turn."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from prime_rl.training_api.requests import TrainingRequest


class TrainingQueue:
    """Training requests that have not started."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, dict[int, TrainingRequest]] = OrderedDict()
        self._next: dict[str, int] = {}
        self._held: set[str] = set()
        self._arrived = asyncio.Event()

    def is_open(self, model_id: str, seq_id: int) -> bool:
        """Whether a number is not past: its request has not started."""
        return seq_id >= self._next.setdefault(model_id, 0)

    def find_next(self, model_id: str) -> int:
        """The number of a model's next request."""
        return self._next[model_id]

    def restore(self, model_id: str, next_seq: int) -> None:
        """Continue at a number."""
        self._next[model_id] = next_seq

    def add(self, request: TrainingRequest) -> None:
        """Queue a request whose number `is_open`."""
        self._waiting.setdefault(request.model_id, {})[request.seq_id] = request
        self._arrived.set()

    def ready(self) -> list[TrainingRequest]:
        """Requests that may start now, at most one per model; the model that started longest ago comes first."""
        idle = ((name, waiting) for name, waiting in self._waiting.items() if name not in self._held)
        found = (waiting.get(self._next[name]) for name, waiting in idle)
        return [request for request in found if request is not None]

    def start(self, request: TrainingRequest) -> None:
        """Take a ready request out of the queue; its model is held until `release`."""
        del self._waiting[request.model_id][request.seq_id]
        self._next[request.model_id] += 1
        self._held.add(request.model_id)
        self._waiting.move_to_end(request.model_id)

    def hold(self, model_id: str) -> bool:
        """Let no request of a model start until `release`; False if it is held, or one is running."""
        held = model_id in self._held
        self._held.add(model_id)
        return not held

    def release(self, model_id: str) -> None:
        """Let the next request of a model start."""
        self._held.discard(model_id)
        self._arrived.set()

    async def wait(self) -> None:
        """Wait until a request is ready."""
        while not self.ready():
            self._arrived.clear()
            await self._arrived.wait()

    def remove(self, model_id: str) -> list[TrainingRequest]:
        """Drop a model; returns its waiting requests."""
        self._next.pop(model_id, None)
        return list(self._waiting.pop(model_id, {}).values())

    def find_loads(self) -> set[str]:
        """Paths of the checkpoints that waiting requests load."""
        waiting = (request for requests in self._waiting.values() for request in requests.values())
        return {request.fields()["path"] for request in waiting if request.kind == "load_weights"}
