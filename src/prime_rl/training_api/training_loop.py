"""Runs queued training requests, takes snapshots of models, and restores models after a restart or a failure.

Passes and checkpoints, whose files are synced to disk, have threads of their own; one thread does everything else, so
that an optimizer step does not wait for the passes of other models.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from loguru import logger

from prime_rl.training_api.execution import Executor, Result
from prime_rl.training_api.futures import Future, Futures
from prime_rl.training_api.pass_scheduler import PassScheduler
from prime_rl.training_api.request_log import RequestLog
from prime_rl.training_api.requests import REPLAYED, SAVES, Model, TrainingRequest
from prime_rl.training_api.snapshots import SnapshotStore
from prime_rl.training_api.training_queue import TrainingQueue

T = TypeVar("T")
MAX_PACKS = 4
"""Maximum number of packs at a time, each with the memory of a forward and backward pass."""

NUM_SAVES = 4


class TrainingLoop:
    """Executes requests: those of a model one after the other, models in turn."""

    def __init__(
        self,
        executor: Executor,
        log: RequestLog,
        futures: Futures,
        snapshots: SnapshotStore,
        snapshot_interval_s: float,
        max_loaded: int,
        on_saved: Callable[[Model, TrainingRequest, Result], Result],
        count_threads: Callable[[], int],
    ) -> None:
        self.executor, self.log, self.futures, self.snapshots = executor, log, futures, snapshots
        self.snapshot_interval_s, self.max_loaded, self.on_saved = snapshot_interval_s, max_loaded, on_saved
        self.models: dict[str, Model] = {}
        self.queue = TrainingQueue()
        self._pass_threads = ThreadPoolExecutor(MAX_PACKS, "passes")
        self._save_threads = ThreadPoolExecutor(NUM_SAVES, "checkpoints")
        self._thread = ThreadPoolExecutor(1, "training")
        self.passes = PassScheduler(
            executor.trainer,
            lambda work: self._execute(work, self._pass_threads),
            self.models,
            lambda: min(count_threads(), MAX_PACKS),
        )

    async def _execute(self, work: Callable[[], T], threads: ThreadPoolExecutor | None = None) -> T:
        """Call `work` in one of `threads`, by default in the training thread."""
        return await asyncio.get_running_loop().run_in_executor(threads or self._thread, work)

    def close(self) -> None:
        """Stop; what is running is finished first."""
        for threads in (self._pass_threads, self._save_threads, self._thread):
            threads.shutdown(wait=True, cancel_futures=True)

    async def run(self) -> None:
        """Run requests until canceled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self.queue.wait()
                for request in self.queue.ready():
                    self.queue.start(request)
                    future, model = self.futures.by_id[request.request_id], self.models[request.model_id]
                    tasks.create_task(self._process(request, future, model))

    async def _process(self, request: TrainingRequest, future: Future, model: Model) -> None:
        try:
            result = await self._run(model, request)
        except Exception as error:
            self.futures.fail(future, error)
            if model.adapter is None and request.seq_id == 0:
                self.remove(model.model_id)
        else:  # with progress and snapshot one transaction
            self.futures.finish(future, result, keep_request=request.kind in REPLAYED)
        self.log.set_progress(model.model_id, request.seq_id + 1)
        if self.models.get(model.model_id) is not model:  # removed in the meantime
            await self._drop(model.model_id)
        self.queue.release(model.model_id)
        await self._evict()

    async def _run(self, model: Model, request: TrainingRequest) -> Result:
        """Execute a request; after an unexpected error, the model is restored before its next request."""
        try:
            if model.adapter is None and request.seq_id > 0:
                await self._restore(model, request.seq_id)
            result = await self._measure(model, request)
            if request.kind == "load_weights" or model.unsaved_s >= self.snapshot_interval_s:
                await self._take_snapshot(model, request.seq_id)
        except ValueError:
            raise
        except Exception:
            await self._drop(model.model_id)
            raise
        return self.on_saved(model, request, result)

    async def _measure(self, model: Model, request: TrainingRequest) -> Result:
        start = time.monotonic()
        if request.kind in ("forward", "forward_backward"):
            result: Result = await self.passes.run(model.model_id, request.body)
        else:
            threads = self._save_threads if request.kind in SAVES else self._thread
            result = await self._execute(lambda: self.executor.run(model, request), threads)
        model.last_run = time.monotonic()
        if request.kind in REPLAYED:
            model.unsaved_s += model.last_run - start
        return result

    async def _restore(self, model: Model, seq_id: int) -> None:
        """Restore a model before request `seq_id`: load its last snapshot, and replay what was executed after it."""
        start = 0
        model.unsaved_s = 0.0
        if model.snapshot is not None:
            start = model.snapshot + 1
            await self._execute(lambda: self.executor.load_snapshot(model, self.snapshots))
        for number in range(start, seq_id):
            query = (
                "SELECT kind, body, (SELECT payload FROM results WHERE id = requests.id) FROM requests "
                "WHERE target = ? AND seq_id = ?"
            )
            for kind, body, expected in await self.log.execute(query, model.model_id, number):
                result = await self._measure(model, TrainingRequest(model.model_id, number, kind, body))
                if expected is not None and isinstance(result, bytes) and result != expected:
                    logger.warning(f"{model.model_id}:{number} has another result when it is replayed")
        if model.adapter is None:
            raise RuntimeError(f"{model.model_id} cannot be restored")
        logger.info(f"{model.model_id} is restored before request {seq_id}, replayed from request {start}")

    async def _take_snapshot(self, model: Model, seq_id: int) -> None:
        """Publish a snapshot after request `seq_id`; the one before the last is deleted."""
        await self.log.commit()
        adapter, before = model.adapter, model.snapshot
        if adapter is None or model.model_id not in self.models:
            return

        def save() -> None:
            if before is not None:
                self.snapshots.prune(model.model_id, before)
            self.snapshots.save(adapter, seq_id)

        await self._execute(save)
        model.snapshot, model.unsaved_s = seq_id, 0.0
        if model.model_id in self.models:
            self.log.set_snapshot(model.model_id, seq_id)

    async def _evict(self) -> None:
        """Keep `max_loaded` models in memory, and those that run: the ones that ran last. The next request of another
        one restores it."""
        loaded = sorted((m for m in self.models.values() if m.adapter is not None), key=lambda m: m.last_run)
        for model in loaded[: max(len(loaded) - self.max_loaded, 0)]:
            if not self.queue.hold(model.model_id):
                continue
            try:
                if model.unsaved_s and model.model_id in self.models:
                    await self._take_snapshot(model, self.queue.find_next(model.model_id) - 1)
                await self._drop(model.model_id)
            except Exception:
                logger.exception(f"{model.model_id} cannot be saved; it stays in memory")
            finally:
                self.queue.release(model.model_id)

    async def _drop(self, model_id: str) -> None:
        """Free a model's parameters, and delete its snapshots unless it is restored later."""

        def drop() -> None:
            self.executor.trainer.remove(model_id)
            if (model := self.models.get(model_id)) is not None:
                model.adapter = None
            else:
                self.snapshots.prune(model_id, None)

        await self.passes.wait_for_pack(model_id)
        await self._execute(drop)

    def remove(self, model_id: str) -> None:
        """Forget a model; its waiting requests fail."""
        self.models.pop(model_id, None)
        self.passes.remove(model_id)
        self.log.remove_target(model_id)
        for request in self.queue.remove(model_id):
            if (future := self.futures.by_id.get(request.request_id)) is not None:
                self.futures.fail(future, ValueError(f"model {model_id} was unloaded"))

    async def unload(self, model_id: str) -> None:
        """Forget a model and its parameters."""
        self.remove(model_id)
        await self._drop(model_id)
