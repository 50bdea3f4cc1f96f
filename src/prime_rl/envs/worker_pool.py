"""A pool of environment worker processes; crashed or hung workers are replaced.

run_group --> least busy worker --> rollouts
                | crashes, hangs or exceeds its memory limit
                +--> the group whose code was running is charged with a retry; all its groups restart elsewhere
"""

from __future__ import annotations

import asyncio
import itertools
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from prime_rl.envs.worker import (
    Cancel,
    GroupRequest,
    Heartbeat,
    Load,
    Loaded,
    Rows,
    decode_finished,
    encode,
)
from prime_rl.runtime.framing import FrameChannel, receive_frame, send_frame
from prime_rl.runtime.redacted_output import copy_redacted
from rollouts.training.agent_integration import Rollout
from rollouts.training.types import Status

if TYPE_CHECKING:
    from prime_rl.configuration.sections import EnvConfig

T = TypeVar("T")
CHECK_INTERVAL_S = 0.25  # of hangs and memory: a crash is detected immediately by the closed connection
LOAD_TIMEOUT_S = 600.0
MAX_LOADS = 3  # of one slot before the first group, if the worker was killed by a signal (an exit is final)
MAX_LOSSES_IN_ROW = 8  # workers lost without any finished group in between: the environment is broken
MAX_LOSSES_OF_GROUP = 10  # workers that a group lost because of other groups
LONGEST_PAUSE_S = 5.0
STOPPED_FACTOR = 4  # longer timeout if no group is running: the machine is busy, or the process was stopped
LEAVE_S = 3.0
GRACE_S = 30.0
DRAIN_S = 1.0


class WorkerLoss(msgspec.Struct):
    """A worker was lost while running a group; `charged`: the group's own code may be the cause."""

    error_type: str
    error: str
    charged: bool


@dataclass(eq=False)
class _Worker:
    """One process and its assigned groups."""

    process: subprocess.Popen[bytes]
    work: socket.socket
    control: socket.socket
    heartbeat: Heartbeat
    channel: FrameChannel | None = None
    ready: bool = False
    draining: bool = False
    pending: dict[int, asyncio.Future[list[Rollout] | WorkerLoss]] = field(default_factory=dict)
    beats: int = -1
    beat_seen: float = field(default_factory=time.monotonic)


class WorkerDied(RuntimeError):
    """A worker exited before it had loaded the environment or sent its rows."""


class EnvironmentCrashLoop(RuntimeError):
    """Several workers in a row exited without finishing a group."""


class EnvironmentWorkers:
    """The `Environment` of a config section, run by `num_workers` processes that `close` terminates.

    The processes start immediately; `wait_ready` (or the first use) waits until they have loaded the environment.
    """

    def __init__(self, config: EnvConfig, *, score: bool = True) -> None:
        self.id = config.id
        self.name = config.name or config.id
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
        self._leaving: list[_Worker] = []
        self._last_words = ""

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.process.pid for worker in self._workers]

    # before the event loop

    def wait_ready(self) -> None:
        """Wait until every worker has loaded the environment; raises as `_await_loaded` does."""
        for slot in range(len(self._workers)):
            self._retry_if_killed(slot, self._load)

    def _load(self, worker: _Worker) -> None:
        if not worker.ready:
            _await_loaded(worker)
            self._check_memory(worker)

    def _retry_if_killed(self, slot: int, request: Callable[[_Worker], T]) -> T:
        """Call `request` with the worker of `slot`; replace the worker and retry if it was killed."""
        for left in reversed(range(MAX_LOADS)):
            worker = self._workers[slot]
            try:
                return request(worker)
            except WorkerDied:
                if not left or worker.channel is not None or not _was_killed(worker):
                    raise
                self.losses += 1
                self._disconnect(worker)
                self._workers[slot] = self._start()
        raise AssertionError("the last try returns or raises")

    def rows(self, split: str = "train") -> list[dict[str, Any]]:
        """Rows of the split, fetched from a worker the first time."""
        if split not in self._rows:
            self.wait_ready()

            def request(worker: _Worker) -> Any:
                self._load(worker)
                try:
                    send_frame(worker.control, encode(Rows(split)))
                    return msgspec.msgpack.decode(receive_frame(worker.control))
                except (EOFError, OSError) as error:
                    end = _describe_end(worker)
                    raise WorkerDied(
                        f"environment {self.name!r}: the worker exited while building its rows ({end})"
                    ) from error

            if not self._workers:
                raise WorkerDied(f"environment {self.name!r}: every worker is being replaced: {self._last_words}")
            answer = self._retry_if_killed(next((i for i, w in enumerate(self._workers) if w.ready), 0), request)
            if isinstance(answer, str):
                raise ValueError(f"environment {self.name!r} has no {split} rows that can be sent: {answer}")
            self._rows[split] = answer
        return self._rows[split]

    def close(self) -> None:
        """Terminate the processes by closing their connections; kill those that do not exit."""
        workers, self._workers, self._leaving = [*self._workers, *self._leaving], [], []
        for task in self._tasks:
            if self._loop is not None and not self._loop.is_closed():
                task.cancel()
        for worker in workers:
            self._disconnect(worker)
        deadline = time.monotonic() + LEAVE_S
        for worker in workers:
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(deadline - time.monotonic(), 0.01))
            _kill(worker)
        for output in self._outputs:
            output.join(DRAIN_S)

    # in the event loop

    async def run_group(
        self, row: dict[str, Any], client: Any, model: str, sampling_args: Sequence[dict[str, Any]], retries: int = 0
    ) -> list[Rollout]:
        """See `Environment.run_group`; raises `EnvironmentCrashLoop` if all workers keep crashing."""
        self._attach()
        number = next(self._numbers)
        order = encode(GroupRequest(number, row, client.describe(), model, list(sampling_args), retries))
        tries = losses = 0
        while True:
            outcome = await self._send(number, order, retries)
            if not isinstance(outcome, WorkerLoss):
                return outcome
            tries, losses = tries + outcome.charged, losses + 1
            if tries > retries or losses > MAX_LOSSES_OF_GROUP:
                return [_failed(row, args, outcome) for args in sampling_args]

    async def _send(self, number: int, order: bytes, retries: int) -> list[Rollout] | WorkerLoss:
        worker = await self._pick()
        assert self._loop is not None and worker.channel is not None
        future: asyncio.Future[list[Rollout] | WorkerLoss] = self._loop.create_future()
        worker.pending[number] = future
        worker.channel.send(order)
        # The worker enforces timeouts itself; this covers a worker that cannot.
        limit = (retries + 2) * self._config.timeout + GRACE_S
        try:
            async with asyncio.timeout(limit):
                return await future
        except TimeoutError:
            if worker in self._workers:
                self._lose(worker, "RolloutTimeout", f"a group did not end within {limit:g} s", culprit=number)
            return WorkerLoss("RolloutTimeout", f"the group did not end within {limit:g} s", True)
        except asyncio.CancelledError:
            if worker.pending.pop(number, None) is not None and worker in self._workers:
                worker.channel.send(encode(Cancel(number)))
            raise
        finally:
            worker.pending.pop(number, None)

    async def _pick(self) -> _Worker:
        """The worker with the fewest groups; waits while all are being replaced."""
        while True:
            if self._broken is not None:
                raise EnvironmentCrashLoop(self._broken)
            open_ones = [w for w in self._workers if w.channel is not None and not w.draining]
            if open_ones:
                return min(open_ones, key=lambda w: len(w.pending))
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

    def _spawn(self, work: Any) -> None:
        assert self._loop is not None
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _listen(self, worker: _Worker) -> None:
        assert self._loop is not None

        def on_frame(frame: bytes) -> None:
            answer = decode_finished(frame)
            future = worker.pending.pop(answer.number, None)
            if future is None or future.done():
                return
            self._losses_in_row = 0
            if answer.error is None:
                future.set_result(answer.rollouts)
            else:
                future.set_exception(RuntimeError(f"environment {self.name!r}: {answer.error}"))

        def on_close() -> None:
            worker.channel = None
            if worker in self._workers:
                self._lose(worker, "WorkerDied", f"the worker process ended ({_describe_end(worker)})")

        worker.channel = FrameChannel(worker.work, on_frame, on_close)
        worker.channel.attach(self._loop)
        worker.beat_seen = time.monotonic()

    def _lose(self, worker: _Worker, error_type: str, reason: str, culprit: int | None = None) -> None:
        """Return its groups, kill it, and start a replacement. Without a known culprit, all groups are charged."""
        from loguru import logger

        culprit = worker.heartbeat.group if culprit is None else culprit
        self._workers.remove(worker)
        self._disconnect(worker)
        _kill(worker)
        self.losses += 1
        self._losses_in_row += 1
        logger.warning(f"environment {self.name}: {reason}; its {len(worker.pending)} groups start again in another")
        self._last_words = reason
        for number, future in worker.pending.items():
            if not future.done():
                charged = number == culprit or culprit not in worker.pending
                future.set_result(WorkerLoss(error_type, reason, charged))
        worker.pending.clear()
        self._spawn(self._replace())

    async def _replace(self) -> None:
        """Start a replacement: at once after a single loss, with exponential backoff after consecutive losses."""
        if self._losses_in_row >= MAX_LOSSES_IN_ROW:
            self._broken = (
                f"environment {self.name!r}: {self._losses_in_row} workers in a row ended without finishing a group; "
                f"the last: {self._last_words}"
            )
            self._changed.set()
            return
        if self._losses_in_row > 1:
            await asyncio.sleep(min(0.1 * 2**self._losses_in_row, LONGEST_PAUSE_S))
        worker = self._start()
        self._workers.append(worker)
        await self._finish_start(worker)

    async def _finish_start(self, worker: _Worker) -> None:
        try:
            await asyncio.to_thread(_await_loaded, worker)
        except asyncio.CancelledError:
            # Otherwise the loop would wait for the thread, which waits for an unneeded environment; see `_attach`.
            if worker in self._workers:
                self._workers.remove(worker)
            _kill(worker)
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

    def _check_worker(self, worker: _Worker) -> None:
        now, beats = time.monotonic(), worker.heartbeat.beats
        if beats != worker.beats:
            worker.beats, worker.beat_seen = beats, now
        elif now - worker.beat_seen > self._config.stall_timeout * (1 if worker.heartbeat.group else STOPPED_FACTOR):
            self._lose(worker, "WorkerStalled", f"a worker stood still for {now - worker.beat_seen:.1f} s")
            return
        rss = read_rss(worker.process.pid)
        if rss > 2 * self._max_rss:
            self._lose(worker, "WorkerMemory", f"a worker took {rss / 2**30:.2f} GiB at once")
        elif rss > self._max_rss and not worker.draining:
            self._drain(worker, rss)
        if worker.draining and not worker.pending and worker in self._workers:
            self._workers.remove(worker)
            self._disconnect(worker)
            self._leaving.append(worker)
            self._spawn(self._reap(worker))

    def _drain(self, worker: _Worker, rss: int) -> None:
        """Assign no more groups to a worker over its memory limit, and start its replacement."""
        from loguru import logger

        logger.warning(
            f"environment {self.name}: a worker has grown to {rss / 2**30:.2f} GiB (max_memory_gb = "
            f"{self._max_rss / 2**30:.2f}): it finishes its {len(worker.pending)} groups and is replaced"
        )
        worker.draining = True
        self.losses += 1
        self._spawn(self._replace())

    async def _reap(self, worker: _Worker) -> None:
        deadline = time.monotonic() + LEAVE_S
        while worker.process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        _kill(worker)
        self._leaving.remove(worker)

    # processes

    def _start(self) -> _Worker:
        ours, theirs = zip(*(socket.socketpair() for _ in range(2)), strict=True)
        # The parent-death signal is tied to the thread that starts the worker, so this must be a long-lived thread.
        with tempfile.TemporaryFile() as shared:
            shared.truncate(mmap.PAGESIZE)
            heartbeat = Heartbeat(shared.fileno())
            fds = [*(sock.fileno() for sock in theirs), shared.fileno()]
            paths = os.pathsep.join(path for path in sys.path if path)
            (stdout, out), (stderr, err) = os.pipe(), os.pipe()
            process = subprocess.Popen(
                [sys.executable, "-m", "prime_rl.envs.worker", *map(str, fds), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, "PYTHONPATH": paths},
                pass_fds=fds,
                start_new_session=True,
            )
        for sock in theirs:
            sock.close()
        os.close(out)
        os.close(err)
        outputs = [copy_redacted(stdout, os.dup(1)), copy_redacted(stderr, os.dup(2))]
        self._outputs = [output for output in self._outputs if output.is_alive()] + outputs
        worker = _Worker(process, ours[0], ours[1], heartbeat)
        load = Load(self._config.id, self._config.args, self._config.timeout, self._score, sys.path)
        with suppress(OSError):  # it exited already, which `_await_loaded` reports
            send_frame(worker.control, encode(load))
        return worker

    def _check_memory(self, worker: _Worker) -> None:
        rss = read_rss(worker.process.pid)
        if rss > self._max_rss:
            raise ValueError(
                f"environment {self.name!r} takes {rss / 2**30:.2f} GiB when it is loaded but max_memory_gb is "
                f"{self._max_rss / 2**30:.2f}: raise env.max_memory_gb"
            )

    def _disconnect(self, worker: _Worker) -> None:
        if worker.channel is not None:
            worker.channel.close()
        worker.channel = None
        worker.work.close()
        worker.control.close()


def read_rss(pid: int) -> int:
    """Resident memory of a process in bytes; 0 if unavailable."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        return 0


def read_max_rss(max_memory_gb: float | None) -> int:
    """Memory limit of one worker in bytes; None: a quarter of the machine's memory."""
    if max_memory_gb is not None:
        return int(max_memory_gb * 2**30)
    return os.sysconf("SC_PHYS_PAGES") * resource.getpagesize() // 4


def _await_loaded(worker: _Worker) -> None:
    """Wait for the response to `Load`.

    Raises `ValueError` if the environment cannot be loaded, `WorkerDied` if the worker exited, `TimeoutError` after
    `LOAD_TIMEOUT_S`.
    """
    worker.control.settimeout(LOAD_TIMEOUT_S)
    try:
        answer = msgspec.msgpack.decode(receive_frame(worker.control), type=Loaded)
    except (EOFError, OSError) as error:
        if isinstance(error, TimeoutError):
            raise TimeoutError(f"the environment did not load within {LOAD_TIMEOUT_S:g} s") from error
        raise WorkerDied(f"the worker ended while it loaded the environment ({_describe_end(worker)})") from error
    if answer.error is not None:
        raise ValueError(answer.error)
    worker.control.settimeout(None)
    worker.ready = True


def _describe_end(worker: _Worker) -> str:
    with suppress(subprocess.TimeoutExpired):
        worker.process.wait(1)
    code = worker.process.returncode
    if code is None:
        return "closed its connection"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _was_killed(worker: _Worker) -> bool:
    """Whether a signal ended the worker."""
    return (worker.process.poll() or 0) < 0


def _kill(worker: _Worker) -> None:
    if worker.process.poll() is None:
        worker.process.kill()
    worker.process.wait()


def _failed(row: dict[str, Any], args: dict[str, Any], lost: WorkerLoss) -> Rollout:
    return Rollout(
        prompt=row["prompt"],
        answer=row.get("answer"),
        info=row.get("info"),
        example_id=int(row.get("example_id") or 0),
        temperature=float(args.get("temperature", 1.0)),
        status=Status.FAILED,
        error_type=lost.error_type,
        error=lost.error,
    )
