"""Weight transport over process groups: the trainer offers versions, and receivers fetch them tensor by tensor.

    trainer  offer(N) --> broadcasts/step_N: manifest, canary, address --> orchestrator
                                                                               | /init_broadcaster, /update_weights
    trainer  <-- a connection: request of version N ------------------------ server
             --- the manifest; over a group of two every tensor -----------> verified, swapped in

A group consists of the trainer and one receiver and exists for one transfer. Receivers are thus independent, there is
no membership protocol, and new servers need no special handling; the cost is one transfer per receiver over the
trainer's link.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
from loguru import logger

from prime_rl.runtime.framing import receive_frame, send_frame
from prime_rl.runtime.machine import find_listen_address
from prime_rl.transport.canary import Canary, write_canary
from prime_rl.transport.weights import verify_tensors
from rollouts.training.manifests import Manifest, build_manifest, find_dtype, write_manifest
from rollouts.training.steps import publish_step

if TYPE_CHECKING:
    from torch import Tensor, device

SCHEMA = 1
BROADCAST_FILE, TAKEN_FILE = "broadcast.json", "TAKEN"
CONNECT_S = 10.0
RETRY_S = 0.1  # after a connection that could not be accepted
DONE = b"done"
Kind = Literal["gloo", "nccl"]
T = TypeVar("T")


class BroadcastFailed(ConnectionError):
    """The peer is unreachable, timed out or disconnected; a retry may succeed."""


class Broadcast(msgspec.Struct, frozen=True):
    """Address of the trainer that offers a version."""

    schema: int
    type: Kind
    host: str
    port: int
    timeout: float
    """Maximum seconds without progress."""


class _WeightRequest(msgspec.Struct, frozen=True):
    """A receiver's request."""

    schema: int
    step: int
    type: Kind
    receiver: str


class _Reply(msgspec.Struct, frozen=True):
    """Header before the tensors: manifest and PEFT config of an adapter; or the reason for a rejection."""

    schema: int
    manifest: Manifest | None = None
    adapter_config: dict[str, Any] | None = None
    problem: str | None = None


@dataclass(frozen=True)
class ReceivedWeights:
    """A verified version: every tensor matches the digest in its manifest."""

    manifest: Manifest
    tensors: dict[str, Tensor]
    adapter_config: dict[str, Any] | None


def announce(root: Path, manifest: Manifest, broadcast: Broadcast, canary: Canary) -> Path:
    """Publish `root/step_N`: manifest and canary of version N, and the trainer's address."""

    def write(directory: Path) -> None:
        (directory / BROADCAST_FILE).write_bytes(msgspec.json.encode(broadcast))
        write_canary(directory, canary)
        write_manifest(directory, manifest)

    return publish_step(Path(root), manifest.step, write)


def read_broadcast(directory: Path) -> Broadcast:
    """Read the address of an announced version; raises `ValueError` if it is invalid."""
    path = Path(directory) / BROADCAST_FILE
    return _decode(path.read_bytes(), Broadcast, str(path), msgspec.json.decode)


def is_announcement(directory: Path) -> bool:
    """Whether the directory announces a version, rather than holding its files."""
    return (Path(directory) / BROADCAST_FILE).is_file()


def acknowledge(directory: Path) -> None:
    """Mark an announced version as received by every engine; no-op for other directories."""
    with contextlib.suppress(FileNotFoundError):  # pruned meanwhile
        if is_announcement(directory):
            (Path(directory) / TAKEN_FILE).touch()


def is_taken(directory: Path) -> bool:
    """Whether `acknowledge` was called for the version."""
    return (Path(directory) / TAKEN_FILE).exists()


class WeightSender:
    """The trainer's end: stores up to `max_versions` versions in memory and sends them from background threads.

    Training continues meanwhile; a failed receiver affects only its own thread.
    """

    def __init__(
        self, kind: Kind, host: str, port: int, timeout_s: float, device: device, *, max_versions: int = 2
    ) -> None:
        if kind == "nccl" and device.type != "cuda":
            raise ValueError(
                f'weight_broadcast.type = "nccl" but the trainer computes on {device.type}: use "gloo", which '
                "needs no GPU"
            )
        self._kind, self._host, self._port, self._timeout_s, self._device = kind, host, port, timeout_s, device
        self._max_versions = max_versions
        self._versions: dict[int, tuple[bytes, list[Tensor]]] = {}
        self._listener: socket.socket | None = None

    @property
    def address(self) -> Broadcast:
        """The address for receivers."""
        return Broadcast(SCHEMA, self._kind, self._host, self._port, self._timeout_s)

    def open(self) -> None:
        """Listen on the configured address only; raises `ValueError` if it is in use or not local."""
        try:
            family, address = find_listen_address(self._host)
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, self._port))
            listener.listen()
        except OSError as error:
            raise ValueError(
                f"weight_broadcast: cannot listen at {self._host}:{self._port} ({error}): set weight_broadcast.host to "
                "an address of the trainer's machine, and weight_broadcast.port to a free one"
            ) from error
        self._listener, self._port = listener, listener.getsockname()[1]
        threading.Thread(target=self._listen, args=(listener,), daemon=True).start()

    def offer(self, step: int, tensors: Mapping[str, Tensor], adapter_config: Mapping[str, Any] | None) -> Manifest:
        """Store a CPU copy of `tensors` as version `step`; returns its manifest."""
        copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
        manifest = build_manifest(step, copies)
        reply = _Reply(SCHEMA, manifest, None if adapter_config is None else dict(adapter_config))
        self._versions[step] = (msgspec.msgpack.encode(reply), [copies[name] for name in manifest.tensors])
        for old in sorted(self._versions)[: -self._max_versions]:
            del self._versions[old]
        return manifest

    def forget_before(self, step: int) -> None:
        """Drop versions before this one."""
        for old in [version for version in self._versions if version < step]:
            del self._versions[old]

    def close(self) -> None:
        """Stop listening; running transfers complete."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closing alone does not
            listener.close()

    def _listen(self, listener: socket.socket) -> None:
        while self._listener is listener:
            try:
                connection, _ = listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            except (OSError, RuntimeError) as error:  # closed, or too many open files or threads
                if self._listener is listener:
                    logger.warning(f"Cannot accept requests for weights: {error}; trying again")
                    time.sleep(RETRY_S)

    def _serve(self, connection: socket.socket) -> None:
        """Serve one transfer in its own thread."""
        with connection:
            connection.settimeout(self._timeout_s)
            try:
                peer, data = connection.getpeername()[0], receive_frame(connection)
            except (OSError, EOFError):
                return  # a connectivity check (`check_broadcast`)
            try:
                request = _decode(data, _WeightRequest, "the request")
                peer = f"{request.receiver} ({peer})"
                self._send(request, connection)
            except (RuntimeError, ValueError, OSError, EOFError) as error:
                logger.warning(f"Failed to send weights to {peer}: {_first_line(error)}")

    def _send(self, request: _WeightRequest, connection: socket.socket) -> None:
        from prime_rl.transport.point_to_point import ProcessGroupPair

        version = self._versions.get(request.step)
        problem = None
        if request.type != self._kind:
            problem = f"the trainer sends over {self._kind}, not {request.type}: set the same weight_broadcast.type"
        elif version is None:
            steps = ", ".join(map(str, sorted(self._versions))) or "none"
            problem = f"version {request.step} is not available from the trainer; it has {steps}"
        if problem is not None or version is None:
            send_frame(connection, msgspec.msgpack.encode(_Reply(SCHEMA, problem=problem)))
            return
        reply, tensors = version
        send_frame(connection, reply)
        pair = ProcessGroupPair(connection, 0, self._kind, self._device, self._timeout_s)
        for tensor in tensors:
            pair.broadcast(tensor)
        receive_frame(connection)  # keep the group alive until everything has arrived


def check_broadcast(broadcast: Broadcast) -> None:
    """Raise `BroadcastFailed` unless the trainer accepts connections."""
    with _connect(broadcast, "does not answer"):
        return


def receive_weights(broadcast: Broadcast, step: int, receiver: str, device: device) -> ReceivedWeights:
    """Fetch a version from the trainer (blocking: call it in a thread).

    Raises `BroadcastFailed` if the trainer is unreachable, times out or disconnects; `ValueError` if it does not have
    the version or a tensor fails verification.
    """
    import torch

    from prime_rl.transport.point_to_point import ProcessGroupPair

    with _connect(broadcast, f"did not send version {step}") as connection:
        connection.settimeout(broadcast.timeout)
        send_frame(connection, msgspec.msgpack.encode(_WeightRequest(SCHEMA, step, broadcast.type, receiver)))
        reply = _decode(receive_frame(connection), _Reply, "the trainer's response")
        if reply.manifest is None or reply.manifest.step != step:
            raise ValueError(reply.problem or f"requested version {step}, the trainer sent another one")
        pair = ProcessGroupPair(connection, 1, broadcast.type, device, broadcast.timeout)
        tensors = {}
        for name, entry in reply.manifest.tensors.items():
            tensors[name] = torch.empty(entry.shape, dtype=find_dtype(entry.dtype))
            pair.broadcast(tensors[name])
        send_frame(connection, DONE)
    verify_tensors(tensors, reply.manifest)
    return ReceivedWeights(reply.manifest, tensors, reply.adapter_config)


@contextmanager
def _connect(broadcast: Broadcast, what: str) -> Iterator[socket.socket]:
    """Connect to the trainer; errors of sockets and process groups become `BroadcastFailed`."""
    address, limit = (broadcast.host, broadcast.port), min(broadcast.timeout, CONNECT_S)
    try:
        with socket.create_connection(address, timeout=limit) as connection:
            yield connection
    except (RuntimeError, OSError, EOFError) as error:
        raise BroadcastFailed(f"the trainer at {address[0]}:{address[1]} {what}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _decode(data: bytes, kind: type[T], what: str, decode: Any = msgspec.msgpack.decode) -> T:
    try:
        message = decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"{what} cannot be read: {error}") from error
    if message.schema != SCHEMA:
        raise ValueError(f"{what} has schema {message.schema}, this version reads {SCHEMA}")
    return message
