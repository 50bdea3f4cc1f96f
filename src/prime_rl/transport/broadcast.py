"""Weights over process groups: a trainer that offers versions, and receivers that fetch them tensor by tensor.

    trainer  offer(N) --> broadcasts/step_N: manifest, canary, address --> orchestrator
                                                                               | /init_broadcaster, /update_weights
    trainer  <-- a connection: version N, please --------------------------- server
             --- the manifest; over a group of two every tensor -----------> verified, swapped in

A group consists of the trainer and one receiver and lives for one transfer. So nobody's absence is anybody else's
concern, there is no membership to agree on, and whoever joins asks like all others; the price is that the trainer's
link carries a version once per receiver.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
from loguru import logger

from prime_rl.transport.canary import Canary, write_canary
from prime_rl.transport.weights import Manifest, build_manifest, verify_tensors, write_manifest
from prime_rl.utils.frames import receive_frame, send_frame
from rollouts.training.steps import publish_step

if TYPE_CHECKING:
    from torch import Tensor, device

SCHEMA = 1
BROADCAST_FILE, TAKEN_FILE = "broadcast.json", "TAKEN"
CONNECT_S = 10.0
DONE = b"done"
Kind = Literal["gloo", "nccl"]
T = TypeVar("T")


class BroadcastFailed(ConnectionError):
    """The other side was not reached, fell silent or left in the middle: asking again may help."""


class Broadcast(msgspec.Struct, frozen=True):
    """Where a version is to be had: the trainer that offers it."""

    schema: int
    type: Kind
    host: str
    port: int
    timeout: float
    """Seconds that a transfer may stand still."""


class _Ask(msgspec.Struct, frozen=True):
    """What a receiver wants."""

    schema: int
    step: int
    type: Kind
    receiver: str


class _Reply(msgspec.Struct, frozen=True):
    """What comes before the tensors: what they are, of an adapter what PEFT says about it; or why there are none."""

    schema: int
    manifest: Manifest | None = None
    adapter_config: dict[str, Any] | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Received:
    """A version that arrived as it was offered: every tensor has the digest of its manifest."""

    manifest: Manifest
    tensors: dict[str, Tensor]
    adapter_config: dict[str, Any] | None


def announce(root: Path, manifest: Manifest, broadcast: Broadcast, canary: Canary) -> Path:
    """Publish `root/step_N`: what version N is and where to ask for it."""

    def write(directory: Path) -> None:
        (directory / BROADCAST_FILE).write_bytes(msgspec.json.encode(broadcast))
        write_canary(directory, canary)
        write_manifest(directory, manifest)

    return publish_step(Path(root), manifest.step, write)


def read_broadcast(directory: Path) -> Broadcast:
    """Where an announced version is to be had. `ValueError` when that cannot be read."""
    path = Path(directory) / BROADCAST_FILE
    return _decode(path.read_bytes(), Broadcast, str(path), msgspec.json.decode)


def acknowledge(directory: Path) -> None:
    """Tell the trainer that every engine holds an announced version; other directories are left alone."""
    with contextlib.suppress(FileNotFoundError):  # pruned meanwhile
        if (Path(directory) / BROADCAST_FILE).is_file():
            (Path(directory) / TAKEN_FILE).touch()


def is_taken(directory: Path) -> bool:
    """Whether that was told."""
    return (Path(directory) / TAKEN_FILE).exists()


class Broadcaster:
    """The trainer's end: holds versions in memory, and sends them to whoever asks from threads of its own.

    Training goes on meanwhile; a receiver that dies costs its own thread some time and nobody else. At most `max_held`
    versions are held.
    """

    def __init__(
        self, kind: Kind, host: str, port: int, timeout_s: float, device: device, *, max_held: int = 2
    ) -> None:
        if kind == "nccl" and device.type != "cuda":
            raise ValueError(
                f'weight_broadcast.type = "nccl" but the trainer computes on {device.type}: use "gloo", which '
                "needs no GPU"
            )
        self._kind, self._host, self._port, self._timeout_s, self._device = kind, host, port, timeout_s, device
        self._max_held = max_held
        self._held: dict[int, tuple[bytes, list[Tensor]]] = {}
        self._listener: socket.socket | None = None

    @property
    def address(self) -> Broadcast:
        """What receivers must know."""
        return Broadcast(SCHEMA, self._kind, self._host, self._port, self._timeout_s)

    def open(self) -> None:
        """Listen at the address alone. `ValueError` when it is taken, or not one of this machine's."""
        try:
            family, *_, (address, *_) = socket.getaddrinfo(self._host, None, type=socket.SOCK_STREAM)[0]
            if ipaddress.ip_address(address).is_loopback and self._host not in ("localhost", address):
                address = ""  # a machine that knows its own name as 127.0.1.1, as Debian's do
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
        """Hold a copy of `tensors` for whoever asks for version `step`; what it is, tensor by tensor."""
        copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
        manifest = build_manifest(step, copies)
        reply = _Reply(SCHEMA, manifest, None if adapter_config is None else dict(adapter_config))
        self._held[step] = (msgspec.msgpack.encode(reply), [copies[name] for name in manifest.tensors])
        for old in sorted(self._held)[: -self._max_held]:
            del self._held[old]
        return manifest

    def forget_before(self, step: int) -> None:
        """Nobody will ask for versions before this one."""
        for old in [held for held in self._held if held < step]:
            del self._held[old]

    def close(self) -> None:
        """Hear nobody any more; transfers that are under way are left to end by themselves."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closing alone does not
            self._listener.close()
            self._listener = None

    def _listen(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """One transfer, in a thread of its own."""
        with connection:
            connection.settimeout(self._timeout_s)
            try:
                who, letter = connection.getpeername()[0], receive_frame(connection)
            except (OSError, EOFError):
                return  # it has looked whether somebody listens here
            try:
                ask = _decode(letter, _Ask, "the request")
                who = f"{ask.receiver} ({who})"
                self._send(ask, connection)
            except (RuntimeError, ValueError, OSError, EOFError) as error:
                logger.warning(f"weights were not sent to {who}: {_first_line(error)}")

    def _send(self, ask: _Ask, connection: socket.socket) -> None:
        from prime_rl.transport.pair import Pair

        held = self._held.get(ask.step)
        problem = None
        if ask.type != self._kind:
            problem = f"the trainer sends over {self._kind}, not {ask.type}: give both one weight_broadcast.type"
        elif held is None:
            steps = ", ".join(map(str, sorted(self._held))) or "none"
            problem = f"the trainer does not hold version {ask.step} any more, or not yet; it holds {steps}"
        if problem is not None or held is None:
            send_frame(connection, msgspec.msgpack.encode(_Reply(SCHEMA, problem=problem)))
            return
        reply, tensors = held
        send_frame(connection, reply)
        pair = Pair(connection, 0, self._kind, self._device, self._timeout_s)
        for tensor in tensors:
            pair.pass_on(tensor)
        receive_frame(connection)  # the group must not end while something is on its way


def check_broadcast(broadcast: Broadcast) -> None:
    """Raise `BroadcastFailed` unless somebody listens there."""
    with _connect(broadcast, "does not answer"):
        return


def receive_weights(broadcast: Broadcast, step: int, receiver: str, device: device) -> Received:
    """Fetch a version from a trainer. Blocks: call it beside what must go on.

    Raises `BroadcastFailed` when the trainer is not there, falls silent or leaves; `ValueError` when it does not hold
    the version, or a tensor arrives otherwise than it was sent.
    """
    import torch

    from prime_rl.transport.pair import Pair

    with _connect(broadcast, f"did not send version {step}") as connection:
        connection.settimeout(broadcast.timeout)
        send_frame(connection, msgspec.msgpack.encode(_Ask(SCHEMA, step, broadcast.type, receiver)))
        reply = _decode(receive_frame(connection), _Reply, "what the trainer answers")
        if reply.manifest is None or reply.manifest.step != step:
            raise ValueError(reply.problem or f"asked for version {step}, the trainer answered with another one")
        pair = Pair(connection, 1, broadcast.type, device, broadcast.timeout)
        tensors = {}
        for name, entry in reply.manifest.tensors.items():
            tensors[name] = torch.empty(entry.shape, dtype=_find_dtype(entry.dtype))
            pair.pass_on(tensors[name])
        send_frame(connection, DONE)
    verify_tensors(tensors, reply.manifest)
    return Received(reply.manifest, tensors, reply.adapter_config)


@contextmanager
def _connect(broadcast: Broadcast, what: str) -> Iterator[socket.socket]:
    """A connection to the trainer; what sockets and groups raise meanwhile becomes `BroadcastFailed`."""
    place, limit = (broadcast.host, broadcast.port), min(broadcast.timeout, CONNECT_S)
    try:
        with socket.create_connection(place, timeout=limit) as connection:
            yield connection
    except (RuntimeError, OSError, EOFError) as error:
        raise BroadcastFailed(f"the trainer at {place[0]}:{place[1]} {what}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _find_dtype(name: str) -> Any:
    import torch

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of a tensor")
    return found


def _decode(data: bytes, kind: type[T], what: str, decode: Any = msgspec.msgpack.decode) -> T:
    try:
        found = decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{what} cannot be read: {error}") from error
    if found.schema != SCHEMA:
        raise ValueError(f"{what} has schema {found.schema}, this version reads {SCHEMA}")
    return found
