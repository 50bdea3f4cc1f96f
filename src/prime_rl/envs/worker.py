"""Environment worker process: isolates crashes, hangs and leaks of environment code.

    python -m prime_rl.envs.worker <work fd> <control fd> <heartbeat fd> <parent's pid>

The worker sends requests to the engines itself. Messages are msgpack over two socket pairs inherited from the parent
(`worker_pool`): `work` for groups and their rollouts, `control` for loading and rows. `Heartbeat` is shared memory with
a counter of the event loop and the group whose code is running, so that a crash or hang can be attributed.
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
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from prime_rl.runtime.framing import FrameChannel, receive_frame, send_frame
from prime_rl.runtime.process_tree import set_parent_death_signal
from prime_rl.utils.client import InferenceClient, ServerSpec, build_client
from rollouts.training.agent_integration import Rollout
from rollouts.training.environments.protocol import Environment, locate_error
from rollouts.training.row_digests import sort_set
from rollouts.training.types import as_plain

if TYPE_CHECKING:
    from rollouts.training.environments.plain import Agent

BEAT_S = 0.1
LEAVE_S = 3.0
CLEANUP_LEAVE_S = 30.0  # for an environment that frees resources, such as sandboxes
_CELLS = struct.Struct("<QQ")


class Load(msgspec.Struct, tag=True):
    """First message: the environment to load, and the import path."""

    id: str
    args: dict[str, Any]
    timeout_s: float | None
    score: bool
    sys_path: list[str]
    command: list[str] | None = None
    num_workers: int = 1
    python_path: str | None = None
    """PYTHONPATH of the parent, for programs that the environment starts; the worker's own is `sys_path`."""


class Loaded(msgspec.Struct, tag=True):
    """Response to `Load`, with an error if loading failed."""

    error: str | None = None
    builds_prompts: bool = False
    scores_groups: bool = False
    leave_s: float = LEAVE_S
    """Time to exit after the parent has disconnected."""


class GroupRequest(msgspec.Struct, tag=True):
    """Request to run one group."""

    number: int
    row: dict[str, Any]
    server: ServerSpec
    model: str
    sampling_args: list[dict[str, Any]]
    retries: int


class Cancel(msgspec.Struct, tag=True):
    """Cancel a group."""

    number: int


class Finished(msgspec.Struct, tag=True):
    """Rollouts of a group, or type and text of the error that it ended with."""

    number: int
    rollouts: list[Rollout] = []
    error: tuple[str, str] | None = None


class RowsRequest(msgspec.Struct, tag=True):
    """Request for the rows of a split."""

    split: str


class RowsReply(msgspec.Struct, tag=True):
    """Response to `RowsRequest`; `error` if the rows cannot be built or sent."""

    rows: list[dict[str, Any]] = []
    error: str | None = None


decode_request = msgspec.msgpack.Decoder(GroupRequest | Cancel).decode
decode_finished = msgspec.msgpack.Decoder(Finished).decode


def encode(message: Any, enc_hook: Callable[[Any], Any] = as_plain) -> bytes:
    """Encode a message as msgpack; `enc_hook` converts unsupported types, and lone surrogates become "?"."""
    try:
        return msgspec.msgpack.encode(message, enc_hook=enc_hook)
    except UnicodeEncodeError:
        plain = msgspec.to_builtins(message, builtin_types=(bytes,), enc_hook=enc_hook)
        return msgspec.msgpack.encode(_replace_surrogates(plain))


def encode_rows(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Encode rows as `RowsReply`: arrays and their scalars as lists and numbers, sets as lists.

    `ValueError` names the row and the key of a value that cannot be encoded.
    """
    plain = [dict(row) for row in rows]
    try:
        return encode(RowsReply(_sort_sets(plain)), _as_numbers)
    except Exception:
        for number, row in enumerate(plain):
            for key, value in row.items():
                _check_value(number, key, value)
        raise


def _sort_sets(value: Any) -> Any:
    """`value` with its sets as lists; the order of a set differs between processes."""
    if isinstance(value, set | frozenset):
        return [_sort_sets(item) for item in sort_set(value)]
    if isinstance(value, dict):
        return {key: _sort_sets(item) for key, item in value.items()}
    return [_sort_sets(item) for item in value] if isinstance(value, list | tuple) else value


def _check_value(number: int, key: Any, value: Any) -> None:
    try:
        encode({key: value}, _as_numbers)
    except Exception as error:
        raise ValueError(
            f"row {number}, key {key!r}: {error}; use text, numbers of 64 bits, lists and dicts"
        ) from error


def _as_numbers(value: Any) -> Any:
    """Numbers of an array or its scalar; any other object would be another one in the worker, so it is an error."""
    if not callable(getattr(value, "tolist", None)):
        raise TypeError(f"an object of type {type(value).__name__} cannot be sent to a worker")
    return as_plain(value)


def _replace_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_replace_surrogates(key): _replace_surrogates(item) for key, item in value.items()}
    return [_replace_surrogates(item) for item in value] if isinstance(value, list) else value


async def run_encoded(
    environment: Environment,
    number: int,
    row: dict[str, Any],
    client: InferenceClient,
    model: str,
    sampling_args: Sequence[dict[str, Any]],
    retries: int,
) -> bytes:
    """Run a group; returns its encoded `Finished`.

    Its error is an exception of the environment, or a result that is not a list of rollouts.
    """
    try:
        message = encode(Finished(number, await environment.run_group(row, client, model, sampling_args, retries)))
        decode_finished(message)  # in the parent, an error would belong to no group
        return message
    except Exception as error:
        return encode(Finished(number, error=(type(error).__name__, locate_error(error))))


class Heartbeat:
    """Shared memory with two numbers: the group whose code is running (0: none), and the event-loop counter."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, _CELLS.size)
        self._cells = memoryview(self._memory).cast("Q")

    @property
    def group(self) -> int:
        """Number of the group that is running, or was running when the process ended."""
        return int(self._cells[0])

    @group.setter
    def group(self, number: int) -> None:
        self._cells[0] = number

    @property
    def beats(self) -> int:
        """Counter of the event loop."""
        return int(self._cells[1])

    def beat(self) -> None:
        """Increment the counter."""
        self._cells[1] += 1


_current: contextvars.ContextVar[int] = contextvars.ContextVar("group", default=0)


class _Traced(Coroutine[Any, Any, Any]):
    """A coroutine of a group that sets the heartbeat's group while it runs."""

    def __init__(self, inner: Any, number: int, heartbeat: Heartbeat) -> None:
        self._inner, self._number, self._heartbeat = inner, number, heartbeat

    def send(self, value: Any) -> Any:
        self._heartbeat.group = self._number
        try:
            return self._inner.send(value)
        finally:
            self._heartbeat.group = 0

    def throw(self, *error: Any) -> Any:
        self._heartbeat.group = self._number
        try:
            return self._inner.throw(*error)
        finally:
            self._heartbeat.group = 0

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._inner.__await__()

    def __getattr__(self, name: str) -> Any:  # cr_frame and others, which anyio reads
        return getattr(self._inner, name)


class Worker:
    """Runs groups until the parent closes the connection."""

    def __init__(self, environment: Any, heartbeat: Heartbeat) -> None:
        self.environment, self.heartbeat = environment, heartbeat
        self.leave_s = CLEANUP_LEAVE_S if getattr(environment, "has_cleanup", False) else LEAVE_S
        self._clients: dict[ServerSpec, InferenceClient] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._work: FrameChannel | None = None
        self._control: FrameChannel | None = None

    async def serve(self, work: socket.socket, control: socket.socket) -> None:
        """Serve until the parent disconnects; then cancel running groups, so that the engines abort their requests."""
        loop, closed = asyncio.get_running_loop(), asyncio.Event()
        loop.set_task_factory(self._build_task)
        self._work = FrameChannel(work, self._on_work, closed.set)
        self._control = FrameChannel(control, self._on_control, closed.set)
        self._beat()
        self._work.attach(loop)
        self._control.attach(loop)
        await closed.wait()
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:  # the rest of the time is for functions registered with `atexit`
            await asyncio.wait(self._tasks.values(), timeout=2 / 3 * self.leave_s)

    def _beat(self) -> None:
        self.heartbeat.beat()
        asyncio.get_running_loop().call_later(BEAT_S, self._beat)

    def _build_task(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        """Attribute every task that a group starts, directly or indirectly, to the group."""
        context = options.get("context")
        number = _current.get() if context is None else context.get(_current, 0)
        return asyncio.Task(_Traced(coro, number, self.heartbeat) if number else coro, loop=loop, **options)

    def _on_work(self, frame: bytes) -> None:
        request = decode_request(frame)
        if isinstance(request, Cancel):
            if (task := self._tasks.get(request.number)) is not None:
                task.cancel()
            return
        token = _current.set(request.number)
        task = asyncio.get_running_loop().create_task(self._run(request))
        _current.reset(token)
        self._tasks[request.number] = task
        task.add_done_callback(lambda _: self._tasks.pop(request.number))

    async def _run(self, group: GroupRequest) -> None:
        client = self._client(group.server)
        try:
            answer = await run_encoded(
                self.environment, group.number, group.row, client, group.model, group.sampling_args, group.retries
            )
        except asyncio.CancelledError as error:  # by the parent, which drops the answer, or by a library
            answer = encode(Finished(group.number, error=(type(error).__name__, locate_error(error))))
        assert self._work is not None
        self._work.send(answer)

    def _client(self, server: ServerSpec) -> InferenceClient:
        if server not in self._clients:
            self._clients[server] = build_client(server)
        return self._clients[server]

    def _on_control(self, frame: bytes) -> None:
        request = msgspec.msgpack.decode(frame, type=RowsRequest)
        try:
            reply = encode_rows(self.environment.rows(request.split))
        except Exception as error:
            reply = encode(RowsReply(error=f"{type(error).__name__}: {error}"))
        assert self._control is not None
        self._control.send(reply)


def build_agent(command: list[str] | None, num_workers: int = 1) -> Agent | None:
    """The agent that runs `env.command` in one of the workers; None without a command.

    `ValueError` if there is no such program.
    """
    if command is None:
        return None
    from prime_rl.gateway.program import ProgramAgent, check_command

    check_command(command)
    return ProgramAgent(command, num_workers)


def quiet_libraries() -> None:
    """Route environment logs through ours: remove their handlers and progress bars."""
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")  # read when datasets is imported
    library = logging.getLogger("verifiers")  # importing verifiers gives its logger a handler of its own
    library.handlers.clear()
    library.propagate = True
    library.setLevel(logging.WARNING)


def main() -> int:
    """Run the worker process; returns its exit code."""
    work_fd, control_fd, heartbeat_fd, parent = map(int, sys.argv[1:5])
    set_parent_death_signal(parent)
    control = socket.socket(fileno=control_fd)
    try:
        request = msgspec.msgpack.decode(receive_frame(control), type=Load)
    except EOFError:
        return 0
    sys.path[:] = request.sys_path
    os.environ.pop("PYTHONPATH", None)
    if request.python_path is not None:
        os.environ["PYTHONPATH"] = request.python_path
    logging.basicConfig(level=logging.WARNING, format=f"environment {request.id}: %(message)s")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    from rollouts.training.environments import load_environment

    try:
        agent = build_agent(request.command, request.num_workers)
        environment = load_environment(
            request.id, request.args, timeout_s=request.timeout_s, score=request.score, agent=agent
        )
    except Exception as error:
        message = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        with suppress(BrokenPipeError):
            send_frame(control, encode(Loaded(error=message)))
        return 0
    quiet_libraries()
    gc.freeze()  # exclude loaded libraries from garbage collection
    # The parent handles Ctrl-C and closes the connection. SIG_IGN would be passed on to programs that this one starts.
    signal.signal(signal.SIGINT, lambda *_: None)
    worker = Worker(environment, Heartbeat(heartbeat_fd))
    builds_prompts = getattr(environment, "builds_prompts", False)
    scores_groups = getattr(environment, "scores_groups", False)
    try:
        send_frame(control, encode(Loaded(None, builds_prompts, scores_groups, worker.leave_s)))
    except BrokenPipeError:  # the parent was stopped meanwhile
        return 0
    asyncio.run(worker.serve(socket.socket(fileno=work_fd), control))
    if callable(close := getattr(environment, "close", None)):
        close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
