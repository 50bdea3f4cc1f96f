"""Order of passes: packs of micro-batches of several models, models in turn.

A pass waits at most for one pack of the others before each of its micro-batches, so a large request does not hold up
small ones. Packs of different models are computed at the same time while threads are free.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container
from typing import Any

from prime_rl.training_api.adapters import AdapterTrainer
from prime_rl.training_api.passes import RunningPass
from prime_rl.training_api.wire import decode_pass, encode_pass


class PassScheduler:
    """Runs passes of different models of `models`.

    `execute` calls a function in a thread, and `count_threads` is the number of packs that may be computed now.
    """

    def __init__(
        self,
        trainer: AdapterTrainer,
        execute: Callable[[Callable[[], None]], Awaitable[None]],
        models: Container[str],
        count_threads: Callable[[], int],
    ) -> None:
        self._trainer, self._execute, self._models, self._count_threads = trainer, execute, models, count_threads
        self._running: dict[RunningPass, asyncio.Future[None]] = {}
        self._packs: dict[asyncio.Task[None], list[RunningPass]] = {}

    async def run(self, model_id: str, body: bytes) -> bytes:
        """Run an encoded pass; `ValueError`, without any change, for bad data."""
        # Beside the training threads, so that requests that arrive during a pack are in the next one.
        started = await asyncio.to_thread(lambda: self._trainer.start_pass(model_id, decode_pass(body)))
        if model_id not in self._models:
            raise _unloaded(model_id)
        done = self._running[started] = asyncio.get_running_loop().create_future()
        self._start_packs()
        await done
        return encode_pass([{"logprobs": x} for x in started.result.logprobs], {"loss:sum": started.result.loss})

    def remove(self, model_id: str) -> None:
        """End the pass of a model that is unloaded; a pack that is being computed is finished first."""
        for running, done in list(self._running.items()):
            if running.name == model_id:
                self._finish(running, done, _unloaded(model_id))

    async def wait_for_pack(self, model_id: str) -> None:
        """Wait until no pack that is being computed uses the adapter of a model."""
        if tasks := [task for task, pack in self._packs.items() if model_id in [p.name for p in pack]]:
            await asyncio.wait(tasks)

    def _start_packs(self) -> None:
        """Start packs while threads are free, and share what waits among these."""
        while (free := self._count_threads() - len(self._packs)) > 0:
            packed = {running for pack in self._packs.values() for running in pack}
            if not (waiting := [running for running in self._running if running not in packed]):
                return
            chosen = self._trainer.choose_mix(waiting)[: -(-len(waiting) // free)]
            self._packs[asyncio.create_task(self._compute(chosen))] = chosen

    async def _compute(self, chosen: list[RunningPass]) -> None:
        """Compute a pack."""
        error: Exception | None = None
        try:
            await self._execute(lambda: self._trainer.advance(chosen))
        except Exception as failed:
            error = failed
        for running in chosen:
            if (done := self._running.pop(running, None)) is None:
                continue
            if running.parts and error is None:
                self._running[running] = done  # behind the others
            else:
                self._finish(running, done, error)
        self._packs = {task: pack for task, pack in self._packs.items() if pack is not chosen}
        self._start_packs()

    def _finish(self, running: RunningPass, done: asyncio.Future[Any], error: Exception | None) -> None:
        self._running.pop(running, None)
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)


def _unloaded(model_id: str) -> ValueError:
    return ValueError(f"model {model_id} was unloaded")
