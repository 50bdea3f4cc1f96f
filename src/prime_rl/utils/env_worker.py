"""A process that runs one environment for another: a crash, a hang or a leak in it costs nobody else anything.

    python -m prime_rl.utils.env_worker <work fd> <control fd> <pulse fd> <parent's pid>

The worker asks the engines itself. Messages are msgpack over two socket pairs inherited from the parent (`env_pool`):
`work` carries groups and their rollouts, `control` what is loaded and the rows. `Pulse` is shared memory: it beats
while the event loop lives, and names the group whose code runs right now, so that a crash or a hang has a culprit.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import mmap
import os
import signal
import socket
import struct
import sys
from collections.abc import Coroutine, Generator
from typing import Any

import msgspec

from prime_rl.utils.frames import FrameChannel, receive_frame, send_frame
from prime_rl.utils.process import die_with
from rollouts.training.agent_integration import Rollout

BEAT_S = 0.1
_CELLS = struct.Struct("<QQ")


class Load(msgspec.Struct, tag=True):
    """First order: which environment, and where Python looks for code."""

    id: str
    args: dict[str, Any]
    timeout_s: float | None
    score: bool
    sys_path: list[str]


class Loaded(msgspec.Struct, tag=True):
    """Answer to `Load`; `error` says why there is no environment."""

    error: str | None = None


class Server(msgspec.Struct, frozen=True):
    """An inference server, as `InferenceClient` takes it."""

    base_url: str
    headers: tuple[tuple[str, str], ...] = ()
    timeout_s: float = 1200
    max_connections: int = 1024
    seq_len: int | None = None
    reconnect_s: float = 0


class Group(msgspec.Struct, tag=True):
    """Order to run one group."""

    number: int
    row: dict[str, Any]
    server: Server
    model: str
    sampling_args: list[dict[str, Any]]
    retries: int


class Cancel(msgspec.Struct, tag=True):
    """Nobody waits for this group any more."""

    number: int


class Finished(msgspec.Struct, tag=True):
    """Rollouts of a group, or the error that kept an environment from answering at all."""

    number: int
    rollouts: list[Rollout] = []
    error: str | None = None


class Rows(msgspec.Struct, tag=True):
    """Order to send the rows of a split; the answer is a list of dicts, or a string saying why not."""

    split: str


decode_order = msgspec.msgpack.Decoder(Group | Cancel).decode
decode_finished = msgspec.msgpack.Decoder(Finished).decode


def encode(message: Any) -> bytes:
    """The message as msgpack; what msgpack does not know becomes a plain number or its text."""
    return msgspec.msgpack.encode(message, enc_hook=_as_plain)


def _as_plain(value: Any) -> Any:
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "ndim", None) == 0 else str(value)


class Pulse:
    """Shared memory of two numbers: the group whose code runs (0: none), and beats of the event loop."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, _CELLS.size)
        self._cells = memoryview(self._memory).cast("Q")

    @property
    def group(self) -> int:
        """Number of the group that runs, or ran when the process ended."""
        return int(self._cells[0])

    @group.setter
    def group(self, number: int) -> None:
        self._cells[0] = number

    @property
    def beats(self) -> int:
        """How often the event loop came round."""
        return int(self._cells[1])

    def beat(self) -> None:
        """Say that the event loop is alive."""
        self._cells[1] += 1


_current: contextvars.ContextVar[int] = contextvars.ContextVar("group", default=0)


class _Traced(Coroutine[Any, Any, Any]):
    """A coroutine of a group: the pulse names the group while it runs."""

    def __init__(self, inner: Any, number: int, pulse: Pulse) -> None:
        self._inner, self._number, self._pulse = inner, number, pulse

    def send(self, value: Any) -> Any:
        self._pulse.group = self._number
        try:
            return self._inner.send(value)
        finally:
            self._pulse.group = 0

    def throw(self, *error: Any) -> Any:
        self._pulse.group = self._number
        try:
            return self._inner.throw(*error)
        finally:
            self._pulse.group = 0

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._inner.__await__()

    def __getattr__(self, name: str) -> Any:  # cr_frame and others, which anyio looks at
        return getattr(self._inner, name)


class Worker:
    """Runs the groups it is told to until the parent closes the connection."""

    def __init__(self, environment: Any, pulse: Pulse) -> None:
        self.environment, self.pulse = environment, pulse
        self._clients: dict[Server, Any] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._work: FrameChannel | None = None
        self._control: FrameChannel | None = None

    async def serve(self, work: socket.socket, control: socket.socket) -> None:
        """Until the parent has gone; what still runs then is cancelled, so that the engines stop too."""
        loop, closed = asyncio.get_running_loop(), asyncio.Event()
        loop.set_task_factory(self._build_task)
        self._work = FrameChannel(work, self._on_order, closed.set)
        self._control = FrameChannel(control, self._on_control, closed.set)
        self._beat()
        self._work.attach(loop)
        self._control.attach(loop)
        await closed.wait()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 2)

    def _beat(self) -> None:
        self.pulse.beat()
        asyncio.get_running_loop().call_later(BEAT_S, self._beat)

    def _build_task(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        """Every task that a group starts, and those that they start, is known to belong to it."""
        context = options.get("context")
        number = _current.get() if context is None else context.get(_current, 0)
        return asyncio.Task(_Traced(coro, number, self.pulse) if number else coro, loop=loop, **options)

    def _on_order(self, frame: bytes) -> None:
        order = decode_order(frame)
        if isinstance(order, Cancel):
            if (task := self._tasks.get(order.number)) is not None:
                task.cancel()
            return
        token = _current.set(order.number)
        task = asyncio.get_running_loop().create_task(self._run(order))
        _current.reset(token)
        self._tasks[order.number] = task
        task.add_done_callback(lambda _: self._tasks.pop(order.number))

    async def _run(self, group: Group) -> None:
        try:
            rollouts = await self.environment.run_group(
                group.row, self._client(group.server), group.model, group.sampling_args, group.retries
            )
            answer = encode(Finished(group.number, rollouts))
        except Exception as error:
            answer = encode(Finished(group.number, error=f"{type(error).__name__}: {error}"))
        assert self._work is not None
        self._work.send(answer)

    def _client(self, server: Server) -> Any:
        if server not in self._clients:
            from prime_rl.utils.client import build_client

            self._clients[server] = build_client(server)
        return self._clients[server]

    def _on_control(self, frame: bytes) -> None:
        order = msgspec.msgpack.decode(frame, type=Rows)
        try:
            answer: Any = [dict(row) for row in self.environment.rows(order.split)]
            payload = msgspec.msgpack.encode(answer)
        except Exception as error:
            payload = msgspec.msgpack.encode(f"{type(error).__name__}: {error}")
        assert self._control is not None
        self._control.send(payload)


def quiet_libraries() -> None:
    """Environments speak through our log: no handlers and progress bars of their own."""
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")  # read when datasets is imported
    library = logging.getLogger("verifiers")  # importing verifiers gives its logger a handler of its own
    library.handlers.clear()
    library.propagate = True
    library.setLevel(logging.WARNING)


def main() -> int:
    """The process; returns its exit code."""
    work_fd, control_fd, pulse_fd, parent = map(int, sys.argv[1:5])
    die_with(parent)
    control = socket.socket(fileno=control_fd)
    try:
        order = msgspec.msgpack.decode(receive_frame(control), type=Load)
    except EOFError:
        return 0
    sys.path[:] = order.sys_path
    logging.basicConfig(level=logging.WARNING, format=f"environment {order.id}: %(message)s")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    from prime_rl.utils.client import prepare_client
    from rollouts.training.environments import load_environment

    try:
        environment = load_environment(order.id, order.args, timeout_s=order.timeout_s, score=order.score)
    except Exception as error:
        said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        send_frame(control, encode(Loaded(error=said)))
        return 0
    quiet_libraries()
    prepare_client()  # now, and not in the first group's time
    gc.freeze()  # libraries fill most of the memory: the collector need not walk over them again and again
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes the connection
    send_frame(control, encode(Loaded()))
    asyncio.run(Worker(environment, Pulse(pulse_fd)).serve(socket.socket(fileno=work_fd), control))
    return 0


if __name__ == "__main__":
    sys.exit(main())
