"""An environment behind worker processes: groups go out, rollouts come back, and what dies or hangs is replaced.

run_group --> least busy worker --> rollouts
                | dies, hangs or outgrows its memory
                +--> the group whose code ran is charged with a try; all its groups start again elsewhere
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
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from prime_rl.utils.env_worker import Cancel, Group, Load, Loaded, Pulse, Rows, Server, decode_finished, encode
from prime_rl.utils.frames import FrameChannel, receive_frame, send_frame
from rollouts.training.agent_integration import Rollout
from rollouts.training.types import Status

if TYPE_CHECKING:
    from prime_rl.utils.config import EnvConfig

T = TypeVar("T")
LOOK_EVERY_S = 0.25  # supervision only: an ended worker is noticed at once by its closed connection
LOAD_TIMEOUT_S = 600.0
MAX_LOADS = 3  # of one worker's place before the first group: a signal may have come from anywhere, an exit did not
MAX_LOSSES_IN_ROW = 8  # workers lost with no group finished in between: the environment itself is broken
MAX_LOSSES_OF_GROUP = 10  # of workers that a group shared with a culprit
LONGEST_PAUSE_S = 5.0
STOPPED_FACTOR = 4  # standing still in nobody's code: the machine is busy, or the process was stopped
LEAVE_S = 3.0
GRACE_S = 30.0


class Lost(msgspec.Struct):
    """A worker ended while a group was with it; `charged`: the group's own code may have been the reason."""

    error_type: str
    error: str
    charged: bool


@dataclass(eq=False)
class _Worker:
    """One process, and the groups that are with it."""

    process: subprocess.Popen[bytes]
    work: socket.socket
    control: socket.socket
    pulse: Pulse
    channel: FrameChannel | None = None
    ready: bool = False
    draining: bool = False
    pending: dict[int, asyncio.Future[list[Rollout] | Lost]] = field(default_factory=dict)
    beats: int = -1
    beat_seen: float = field(default_factory=time.monotonic)


class WorkerGone(ValueError):
    """A worker ended before it had loaded the environment or sent its rows."""


class EnvironmentBroken(RuntimeError):
    """Worker after worker ended without finishing a single group."""


class EnvironmentWorkers:
    """The `Environment` of a config section, run by `num_workers` processes that `close` ends.

    The processes start at once; `wait_ready` (or the first use) waits until they have loaded the environment.
    """

    def __init__(self, config: EnvConfig, *, score: bool = True) -> None:
        self.id = config.id
        self.name = config.name or config.id
        self.losses = 0
        """Workers that ended, hung or were replaced for their memory."""
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
        self._workers = [self._start() for _ in range(config.num_workers)]
        self._leaving: list[_Worker] = []
        self._last_words = ""

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.process.pid for worker in self._workers]

    # before the event loop

    def wait_ready(self) -> None:
        """Wait until every worker has loaded the environment; raises `ValueError` with the words of one that cannot."""
        for place in range(len(self._workers)):
            self._until_alive(place, self._load)

    def _load(self, worker: _Worker) -> None:
        if not worker.ready:
            _await_loaded(worker)
            self._check_memory(worker)

    def _until_alive(self, place: int, ask: Callable[[_Worker], T]) -> T:
        """What `ask` gets out of the worker at `place`; one that was killed meanwhile is replaced and asked again."""
        for left in reversed(range(MAX_LOADS)):
            worker = self._workers[place]
            try:
                return ask(worker)
            except WorkerGone:
                if not left or worker.channel is not None or not _was_killed(worker):
                    raise
                self.losses += 1
                self._disconnect(worker)
                self._workers[place] = self._start()
        raise AssertionError("the last try returns or raises")

    def rows(self, split: str = "train") -> list[dict[str, Any]]:
        """Rows of the split, fetched from a worker the first time."""
        if split not in self._rows:
            self.wait_ready()

            def ask(worker: _Worker) -> Any:
                self._load(worker)
                try:
                    send_frame(worker.control, encode(Rows(split)))
                    return msgspec.msgpack.decode(receive_frame(worker.control))
                except (EOFError, OSError) as error:
                    end = _describe_end(worker)
                    raise WorkerGone(
                        f"environment {self.name!r}: the worker ended while it made its rows ({end})"
                    ) from error

            if not self._workers:
                raise WorkerGone(f"environment {self.name!r}: every worker is being replaced: {self._last_words}")
            answer = self._until_alive(next((i for i, w in enumerate(self._workers) if w.ready), 0), ask)
            if isinstance(answer, str):
                raise ValueError(f"environment {self.name!r} has no {split} rows that can be sent: {answer}")
            self._rows[split] = answer
        return self._rows[split]

    def close(self) -> None:
        """End the processes: they see their connection close, and are killed if they do not leave."""
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

    # in the event loop

    async def run_group(
        self, row: dict[str, Any], client: Any, model: str, sampling_args: Sequence[dict[str, Any]], retries: int = 0
    ) -> list[Rollout]:
        """See `Environment.run_group`; raises `EnvironmentBroken` when no worker ever gets anywhere."""
        self._attach()
        number = next(self._numbers)
        server = describe_server(client)
        order = encode(Group(number, row, server, model, list(sampling_args), retries))
        tries = losses = 0
        while True:
            outcome = await self._send(number, order, retries)
            if not isinstance(outcome, Lost):
                return outcome
            tries, losses = tries + outcome.charged, losses + 1
            if tries > retries or losses > MAX_LOSSES_OF_GROUP:
                return [_failed(row, args, outcome) for args in sampling_args]

    async def _send(self, number: int, order: bytes, retries: int) -> list[Rollout] | Lost:
        worker = await self._pick()
        assert self._loop is not None and worker.channel is not None
        future: asyncio.Future[list[Rollout] | Lost] = self._loop.create_future()
        worker.pending[number] = future
        worker.channel.send(order)
        # The worker itself ends what takes too long; this is for one that cannot.
        limit = (retries + 2) * self._config.timeout + GRACE_S
        try:
            async with asyncio.timeout(limit):
                return await future
        except TimeoutError:
            if worker in self._workers:
                self._lose(worker, "RolloutTimeout", f"a group did not end within {limit:g} s", culprit=number)
            return Lost("RolloutTimeout", f"the group did not end within {limit:g} s", True)
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
                raise EnvironmentBroken(self._broken)
            open_ones = [w for w in self._workers if w.channel is not None and not w.draining]
            if open_ones:
                return min(open_ones, key=lambda w: len(w.pending))
            self._changed.clear()
            await self._changed.wait()

    def _attach(self) -> None:
        """Listen in the running loop; a pool may be used by one loop after the other."""
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
        """Give its groups back, end it, and start another in its place. Without a culprit, all are charged."""
        from loguru import logger

        culprit = worker.pulse.group if culprit is None else culprit
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
                future.set_result(Lost(error_type, reason, charged))
        worker.pending.clear()
        self._spawn(self._replace())

    async def _replace(self) -> None:
        """Another worker, at once after a single loss, more slowly after each that follows without any success."""
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
            # Or the loop would wait for the thread, and that for an environment that nobody needs; see `_attach`.
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
        """Replace workers whose event loop stands still or whose memory has grown too much."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for worker in list(self._workers):
                if worker.ready and worker.channel is not None and worker in self._workers:
                    self._look_at(worker)

    def _look_at(self, worker: _Worker) -> None:
        now, beats = time.monotonic(), worker.pulse.beats
        if beats != worker.beats:
            worker.beats, worker.beat_seen = beats, now
        elif now - worker.beat_seen > self._config.stall_timeout * (1 if worker.pulse.group else STOPPED_FACTOR):
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
        """No more groups for a worker that has grown; another takes its place already."""
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
        # A worker lives no longer than the thread that started it: this must be the one that stays.
        with tempfile.TemporaryFile() as shared:
            shared.truncate(mmap.PAGESIZE)
            pulse = Pulse(shared.fileno())
            fds = [*(sock.fileno() for sock in theirs), shared.fileno()]
            paths = os.pathsep.join(path for path in sys.path if path)
            process = subprocess.Popen(
                [sys.executable, "-m", "prime_rl.utils.env_worker", *map(str, fds), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": paths},
                pass_fds=fds,
                start_new_session=True,
            )
        for sock in theirs:
            sock.close()
        worker = _Worker(process, ours[0], ours[1], pulse)
        load = Load(self._config.id, self._config.args, self._config.timeout, self._score, sys.path)
        with suppress(OSError):  # it ended already: that shows where its answer is awaited
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


def describe_server(client: Any) -> Server:
    """The server of an `InferenceClient`."""
    return Server(
        base_url=client.base_url,
        headers=tuple(client.headers.items()),
        timeout_s=client.timeout_s,
        max_connections=client.max_connections,
        seq_len=client.seq_len,
        reconnect_s=client.reconnect_s,
    )


def read_rss(pid: int) -> int:
    """Bytes of memory that a process holds; 0 where the system does not tell."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        return 0


def read_max_rss(max_memory_gb: float | None) -> int:
    """Bytes that one worker may hold; None: a quarter of the machine's memory."""
    if max_memory_gb is not None:
        return int(max_memory_gb * 2**30)
    return os.sysconf("SC_PHYS_PAGES") * resource.getpagesize() // 4


def _await_loaded(worker: _Worker) -> None:
    """Wait for the answer to `Load`; raises `ValueError` with the worker's words."""
    worker.control.settimeout(LOAD_TIMEOUT_S)
    try:
        answer = msgspec.msgpack.decode(receive_frame(worker.control), type=Loaded)
    except (EOFError, OSError) as error:
        if isinstance(error, TimeoutError):
            raise ValueError(f"the environment did not load within {LOAD_TIMEOUT_S:g} s") from error
        raise WorkerGone(f"the worker ended while it loaded the environment ({_describe_end(worker)})") from error
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
    """True when a signal ended it."""
    return (worker.process.poll() or 0) < 0


def _kill(worker: _Worker) -> None:
    if worker.process.poll() is None:
        worker.process.kill()
    worker.process.wait()


def _failed(row: dict[str, Any], args: dict[str, Any], lost: Lost) -> Rollout:
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
