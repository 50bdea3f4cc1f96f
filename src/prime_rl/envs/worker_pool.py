"""A pool of environment worker processes; crashed or hung workers are replaced.

run_group --> least busy worker --> rollouts
                | an exception leaves the environment: the group is charged with a retry
                | crashes, hangs or exceeds its memory limit
                +--> the group whose code was running is charged with a retry; all its groups restart elsewhere
"""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from loguru import logger

from prime_rl.envs.worker import Cancel, Finished, GroupRequest, RowsReply, encode
from prime_rl.envs.worker_process import GroupFailure, WorkerDied, WorkerProcess
from prime_rl.runtime.machine import find_memory
from rollouts.training.agent_integration import Rollout
from rollouts.training.environments.protocol import fail_rollout

if TYPE_CHECKING:
    from prime_rl.configuration.sections import EnvConfig

T = TypeVar("T")
CHECK_INTERVAL_S = 0.25  # of hangs and memory: a crash is detected immediately by the closed connection
MAX_LOADS = 3  # of one slot before the first group, if the worker was killed by a signal (an exit is final)
MAX_LOSSES_IN_ROW = 8  # workers lost without any finished group in between: the environment is broken
MAX_LOSSES_OF_GROUP = 10  # workers that a group lost because of other groups
LONGEST_PAUSE_S = 5.0
STOPPED_FACTOR = 4  # longer timeout if no group is running: the machine is busy, or the process was stopped
GRACE_S = 30.0
DRAIN_S = 1.0


class EnvironmentCrashLoop(RuntimeError):
    """Several workers in a row exited without finishing a group."""


class EnvironmentWorkers:
    """The `Environment` of a config section, run by `num_workers` processes that `close` terminates.

    The processes start immediately; `wait_ready` (or the first use) waits until they have loaded the environment.
    """

    def __init__(self, config: EnvConfig, *, score: bool = True) -> None:
        self.id = config.id
        self.name = config.display_name
        self.losses = 0
        """Number of workers that crashed, hung or exceeded their memory limit."""
        self._config = config
        self._score = score
        self._max_rss = read_max_rss(config.max_memory_gb)
        self._rows: dict[str, list[dict[str, Any]]] = {}
        self._numbers = itertools.count(1)
        self._losses_in_row = 0
        self._broken: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._outputs: list[threading.Thread] = []
        self._workers = [self._start() for _ in range(config.num_workers)]
        self._leaving: list[WorkerProcess] = []
        self._last_loss = ""

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.process.pid for worker in self._workers]

    @property
    def builds_prompts(self) -> bool:
        """Whether the prompts of the rows are never sent; see `require_row_prompts`."""
        return any(worker.builds_prompts for worker in self._workers)

    @property
    def scores_groups(self) -> bool:
        """Whether rewards compare the rollouts of a group, which are then run and scored only together."""
        return any(worker.scores_groups for worker in self._workers)

    # before the event loop

    def wait_ready(self) -> None:
        """Wait until every worker has loaded the environment; raises as `WorkerProcess.wait_loaded`."""
        for slot in range(len(self._workers)):
            self._retry_if_killed(slot, self._load)

    def _load(self, worker: WorkerProcess) -> None:
        if not worker.ready:
            worker.wait_loaded()
            self._check_memory(worker)

    def _retry_if_killed(self, slot: int, request: Callable[[WorkerProcess], T]) -> T:
        """Call `request` with the worker of `slot`; replace the worker and retry if it was killed."""
        for left in reversed(range(MAX_LOADS)):
            worker = self._workers[slot]
            try:
                return request(worker)
            except WorkerDied:
                if not left or worker.channel is not None or not worker.was_killed:
                    raise
                self.losses += 1
                worker.disconnect()
                self._workers[slot] = self._start()
        raise AssertionError("the last try returns or raises")

    def rows(self, split: str = "train") -> list[dict[str, Any]]:
        """Rows of the split, fetched from a worker the first time."""
        if split not in self._rows:
            self.wait_ready()

            def request(worker: WorkerProcess) -> RowsReply:
                self._load(worker)
                return worker.read_rows(split)

            if not self._workers:
                raise WorkerDied(f"environment {self.name!r}: every worker is being replaced: {self._last_loss}")
            slot = next((i for i, worker in enumerate(self._workers) if worker.ready), 0)
            reply = self._retry_if_killed(slot, request)
            if reply.error is not None:
                raise ValueError(f"environment {self.name!r} has no {split} rows that can be sent: {reply.error}")
            self._rows[split] = reply.rows
        return self._rows[split]

    def close(self) -> None:
        """Terminate the processes by closing their connections; kill those that do not exit."""
        workers, self._workers, self._leaving = [*self._workers, *self._leaving], [], []
        for task in self._tasks:
            if self._loop is not None and not self._loop.is_closed():
                task.cancel()
        for worker in workers:
            worker.disconnect()
        disconnected = time.monotonic()
        for worker in workers:
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(disconnected + worker.leave_s - time.monotonic(), 0.01))
            worker.kill()
        for output in self._outputs:
            output.join(DRAIN_S)

    # in the event loop

    async def run_group(
        self, row: dict[str, Any], client: Any, model: str, sampling_args: Sequence[dict[str, Any]], retries: int = 0
    ) -> list[Rollout]:
        """See `Environment.run_group`; raises `EnvironmentCrashLoop` if all workers keep crashing."""
        self._attach()
        number = next(self._numbers)
        request = encode(GroupRequest(number, row, client.describe(), model, list(sampling_args), retries))
        tries = losses = 0
        while True:
            outcome = await self._send(number, request, retries)
            if not isinstance(outcome, GroupFailure):
                return outcome
            tries, losses = tries + outcome.charged, losses + 1
            if tries > retries or losses > MAX_LOSSES_OF_GROUP:
                return [fail_rollout(row, args, outcome.error_type, outcome.error) for args in sampling_args]

    async def _send(self, number: int, request: bytes, retries: int) -> list[Rollout] | GroupFailure:
        worker = await self._pick()
        assert self._loop is not None and worker.channel is not None
        future: asyncio.Future[list[Rollout] | GroupFailure] = self._loop.create_future()
        worker.pending[number] = future
        worker.channel.send(request)
        # The worker enforces timeouts itself; this covers a worker that cannot. Programs of `env.command` may wait long
        # for their start, which does not count.
        limit = compute_limit(self._config.timeout, retries)
        try:
            async with asyncio.timeout(limit if self._config.command is None else None):
                return await future
        except TimeoutError:
            if worker in self._workers:
                self._lose(worker, "RolloutTimeout", f"a group did not end within {limit:g} s", culprit=number)
            return GroupFailure("RolloutTimeout", f"the group did not end within {limit:g} s", True)
        except asyncio.CancelledError:
            if worker.pending.pop(number, None) is not None and worker in self._workers:
                worker.channel.send(encode(Cancel(number)))
            raise
        finally:
            worker.pending.pop(number, None)

    async def _pick(self) -> WorkerProcess:
        """The worker with the fewest groups; waits while all are being replaced."""
        while True:
            if self._broken is not None:
                raise EnvironmentCrashLoop(self._broken)
            available = [w for w in self._workers if w.channel is not None and not w.draining]
            if available:
                return min(available, key=lambda w: len(w.pending))
            self._changed.clear()
            await self._changed.wait()

    def _attach(self) -> None:
        """Attach to the running loop; a pool may be used by several loops in sequence."""
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        self._loop, self._changed, self._tasks = loop, asyncio.Event(), set()
        missing = self._config.num_workers - sum(not worker.draining for worker in self._workers)
        self._workers += [self._start() for _ in range(missing)]  # a loop may have ended before it replaced one
        for worker in list(self._workers):
            worker.pending.clear()
            if worker.ready:
                self._listen(worker)
            else:
                self._spawn(self._finish_start(worker))
        self._spawn(self._watch())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._loop is not None
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _listen(self, worker: WorkerProcess) -> None:
        assert self._loop is not None

        def on_finished(group: Finished) -> None:
            future = worker.pending.pop(group.number, None)
            if future is None or future.done():
                return
            self._losses_in_row = 0
            future.set_result(group.rollouts if group.error is None else GroupFailure(*group.error, charged=True))

        def on_close() -> None:
            worker.channel = None
            if worker in self._workers:
                self._lose(worker, "WorkerDied", f"the worker process ended ({worker.describe_end()})")

        worker.listen(self._loop, on_finished, on_close)

    def _lose(self, worker: WorkerProcess, error_type: str, reason: str, culprit: int | None = None) -> None:
        """Return its groups, kill it, and start a replacement, which a draining worker has already. Without a known
        culprit, all groups are charged."""
        culprit = worker.heartbeat.group if culprit is None else culprit
        self._workers.remove(worker)
        worker.disconnect()
        worker.kill()
        self._losses_in_row += 1
        logger.warning(f"environment {self.name}: {reason}; its {len(worker.pending)} groups start again in another")
        self._last_loss = reason
        for number, future in worker.pending.items():
            if not future.done():
                charged = number == culprit or culprit not in worker.pending
                future.set_result(GroupFailure(error_type, reason, charged))
        worker.pending.clear()
        if not worker.draining:
            self.losses += 1
            self._spawn(self._replace())

    async def _replace(self) -> None:
        """Start a replacement: at once after a single loss, with exponential backoff after consecutive losses."""
        if self._losses_in_row >= MAX_LOSSES_IN_ROW:
            self._broken = (
                f"environment {self.name!r}: {self._losses_in_row} workers in a row ended without finishing a group; "
                f"the last: {self._last_loss}"
            )
            self._changed.set()
            return
        if self._losses_in_row > 1:
            await asyncio.sleep(min(0.1 * 2**self._losses_in_row, LONGEST_PAUSE_S))
        try:
            worker = self._start()
        except OSError as error:  # such as a limit of processes
            self._last_loss = f"a new worker did not start: {error}"
            logger.warning(f"environment {self.name}: {self._last_loss}")
            if self._workers:  # they go on
                await asyncio.sleep(LONGEST_PAUSE_S)
            else:
                self._losses_in_row += 1
            self._spawn(self._replace())
            return
        self._workers.append(worker)
        await self._finish_start(worker)

    async def _finish_start(self, worker: WorkerProcess) -> None:
        try:
            await asyncio.to_thread(worker.wait_loaded)
        except asyncio.CancelledError:
            # Otherwise the loop would wait for the thread, which waits for an unneeded environment; see `_attach`.
            if worker in self._workers:
                self._workers.remove(worker)
            worker.kill()
            raise
        except Exception as error:
            if worker in self._workers:
                self._lose(worker, "WorkerDied", f"a new worker did not load: {error}")
            return
        if worker in self._workers:
            self._listen(worker)
            self._changed.set()

    async def _watch(self) -> None:
        """Replace workers with a blocked event loop or too much memory."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            for worker in list(self._workers):
                if worker.ready and worker.channel is not None and worker in self._workers:
                    self._check_worker(worker)

    def _check_worker(self, worker: WorkerProcess) -> None:
        stalled_s = worker.measure_stall()
        if stalled_s > self._config.stall_timeout * (1 if worker.heartbeat.group else STOPPED_FACTOR):
            self._lose(worker, "WorkerStalled", f"a worker stood still for {stalled_s:.1f} s")
            return
        rss = worker.rss
        if rss > 2 * self._max_rss:
            self._lose(worker, "WorkerMemory", f"a worker took {rss / 2**30:.2f} GiB at once")
        elif rss > self._max_rss and not worker.draining:
            self._drain(worker, rss)
        if worker.draining and not worker.pending and worker in self._workers:
            self._workers.remove(worker)
            worker.disconnect()
            self._leaving.append(worker)
            self._spawn(self._reap(worker))

    def _drain(self, worker: WorkerProcess, rss: int) -> None:
        """Assign no more groups to a worker over its memory limit, and start its replacement."""
        logger.warning(
            f"environment {self.name}: a worker has grown to {rss / 2**30:.2f} GiB (max_memory_gb = "
            f"{self._max_rss / 2**30:.2f}): it finishes its {len(worker.pending)} groups and is replaced"
        )
        worker.draining = True
        self.losses += 1
        self._spawn(self._replace())

    async def _reap(self, worker: WorkerProcess) -> None:
        deadline = time.monotonic() + worker.leave_s
        while worker.process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        worker.kill()
        self._leaving.remove(worker)

    def _start(self) -> WorkerProcess:
        worker = WorkerProcess(self._config, self._score)
        self._outputs = [output for output in self._outputs if output.is_alive()] + worker.outputs
        return worker

    def _check_memory(self, worker: WorkerProcess) -> None:
        rss = worker.rss
        if rss > self._max_rss:
            raise ValueError(
                f"environment {self.name!r} takes {rss / 2**30:.2f} GiB when it is loaded but max_memory_gb is "
                f"{self._max_rss / 2**30:.2f}: raise env.max_memory_gb"
            )


def compute_limit(timeout_s: float, retries: int) -> float:
    """The most seconds that a group may take: each attempt has a timeout for the rollout and one for its scoring."""
    return 2 * (retries + 1) * timeout_s + GRACE_S


def read_max_rss(max_memory_gb: float | None) -> int:
    """Memory limit of one worker in bytes; None: a quarter of the memory of the machine or container."""
    if max_memory_gb is not None:
        return int(max_memory_gb * 2**30)
    return find_memory() // 4
