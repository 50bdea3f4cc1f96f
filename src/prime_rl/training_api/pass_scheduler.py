"""Order of passes: packs of micro-batches of several models, models in turn.

A pass waits at most for one pack of the others before each of its micro-batches, so a large request does not hold up
small ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container
from typing import Any

from prime_rl.training_api.adapters import AdapterTrainer
from prime_rl.training_api.passes import RunningPass
from prime_rl.training_api.wire import decode_pass, encode_pass


class PassScheduler:
    """Runs passes of different models of `models`; `execute` calls a function in the training thread."""

    def __init__(
        self,
        trainer: AdapterTrainer,
        execute: Callable[[Callable[[], None]], Awaitable[None]],
        models: Container[str],
    ) -> None:
        self._trainer, self._execute, self._models = trainer, execute, models
        self._running: dict[RunningPass, asyncio.Future[None]] = {}
        self._task: asyncio.Task[None] | None = None

    async def run(self, model_id: str, body: bytes) -> bytes:
        """Run an encoded pass; `ValueError`, without any change, for bad data."""
        # Beside the training thread, so that requests that arrive during a pack are in the next one.
        started = await asyncio.to_thread(lambda: self._trainer.start_pass(model_id, decode_pass(body)))
        if model_id not in self._models:
            raise _unloaded(model_id)
        done = self._running[started] = asyncio.get_running_loop().create_future()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._advance())
        await done
        return encode_pass([{"logprobs": x} for x in started.result.logprobs], {"loss:sum": started.result.loss})

    def remove(self, model_id: str) -> None:
        """End the pass of a model that is unloaded; a pack that is being computed is finished first."""
        for running, done in list(self._running.items()):
            if running.name == model_id:
                self._finish(running, done, _unloaded(model_id))

    async def _advance(self) -> None:
        """Compute packs until all passes have finished."""
        while self._running:
            chosen = self._trainer.choose_mix(self._running)
            error: Exception | None = None
            try:
                await self._execute(lambda chosen=chosen: self._trainer.advance(chosen))  # type: ignore[misc]
            except Exception as failed:
                error = failed
            for running in chosen:
                if (done := self._running.pop(running, None)) is None:
                    continue
                if running.parts and error is None:
                    self._running[running] = done  # behind the others
                else:
                    self._finish(running, done, error)

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
