"""Batch transport over ZeroMQ, for a trainer without access to the orchestrator's files.

    trainer  DEALER  -- want step N -->  ROUTER  orchestrator      request is pending until batch N is published
                     <-- the batch ---
                     --- got step N -->

The receiver resends its request until it gets a response, so either side may restart. A batch is sent once per
connection until it is acknowledged, however often it is requested meanwhile. The sender also stores batches as files,
so published batches survive a restart and can be requested again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

import msgspec
import zmq
from loguru import logger

from prime_rl.runtime.machine import find_listen_address
from prime_rl.transport.batches import (
    LATE,
    RECEIVED,
    SCHEMA,
    FilesystemBatchSender,
    decode_batch,
    read_batch,
)
from rollouts.training.steps import step_path
from rollouts.training.types import Sample

RESEND_S = 1.0
CONNECT_POLL_S = 0.05  # between requests while no sender is connected
CLOSE_S = 2.0
BATCH, REFUSED = b"batch", b"refused"


class _Request(msgspec.Struct):
    """A receiver's message: a request for a step, or an acknowledgment."""

    schema: int
    want: int | None = None
    got: int | None = None


class ZmqBatchSender(FilesystemBatchSender):
    """Publishes batches as files and serves them at `host:port` from a background thread."""

    def __init__(self, root: Path, host: str, port: int) -> None:
        super().__init__(root)
        self.address = make_address(host, port)
        self._host, self._port = host, port
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._signal_address = f"inproc://published-{id(self)}"
        self._signal_lock = threading.Lock()
        self._signal: zmq.Socket[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._pending: dict[bytes, int] = {}  # receiver -> requested step; a receiver that reconnects is another one
        self._sent: dict[bytes, int] = {}  # receiver -> step on its way

    def open(self) -> None:
        """Listen. Raises `ValueError` when the port is taken, or the host is no address of this machine."""
        address = self.address
        with contextlib.suppress(OSError):  # ZeroMQ knows more names, such as those of network interfaces
            if not find_listen_address(strip_brackets(self._host))[1]:
                address = f"tcp://*:{self._port}"
        router = open_socket(self._context, zmq.ROUTER, address)
        router.setsockopt(zmq.LINGER, 0)
        try:
            router.bind(address)
        except zmq.ZMQError as error:
            router.close()
            cure = (
                "transport.port" if error.errno == zmq.EADDRINUSE else "transport.host to an IP address of this machine"
            )
            raise ValueError(f"transport: cannot listen at {self.address} ({error}): set {cure}") from error
        inner = self._context.socket(zmq.PULL)
        inner.bind(self._signal_address)
        self._signal = self._context.socket(zmq.PUSH)
        self._signal.connect(self._signal_address)
        self._thread = threading.Thread(target=self._serve, args=(router, inner), name="batches", daemon=True)
        self._thread.start()

    def send(self, step: int, samples: list[Sample]) -> None:
        """Publish the batch that trains version `step - 1` into version `step`."""
        super().send(step, samples)
        self._notify(b"published")

    def close(self) -> None:
        """Stop serving; idempotent."""
        self._notify(b"close")
        if self._thread is not None:
            self._thread.join(CLOSE_S)
        with self._signal_lock:
            if self._signal is not None:
                self._signal.close(0)
                self._signal = None
        self._context.destroy(0)

    def _notify(self, message: bytes) -> None:
        with self._signal_lock:  # ZeroMQ sockets are not thread-safe
            if self._signal is not None:
                self._signal.send(message)

    def _serve(self, router: zmq.Socket[bytes], signal: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(signal, zmq.POLLIN)
        with router, signal:
            while True:
                ready = dict(poller.poll())
                if signal in ready and signal.recv() == b"close":
                    return
                try:
                    if router in ready:
                        self._on_message(router, router.recv_multipart())
                    self._send_pending(router)
                except OSError as error:  # such as too many open files; the thread must outlive it
                    logger.warning(f"Cannot serve batches: {error}; receivers repeat their requests")

    def _on_message(self, router: zmq.Socket[bytes], frames: list[bytes]) -> None:
        """Record a receiver's request, or forget one that it acknowledges; reject invalid messages with a reason."""
        receiver, *body = frames
        try:
            request = msgspec.msgpack.decode(b"".join(body), type=_Request)
        except (msgspec.MsgspecError, RecursionError):
            request = _Request(schema=-1)
        if request.schema != SCHEMA:
            reason = f"request has schema {request.schema}, this version reads {SCHEMA}"
            router.send_multipart([receiver, REFUSED, reason.encode()])
        elif request.want is not None and request.want != self._sent.get(receiver):
            self._sent.pop(receiver, None)
            self._pending[receiver] = request.want
        elif request.got is not None:
            self._sent.pop(receiver, None)

    def _send_pending(self, router: zmq.Socket[bytes]) -> None:
        """Send every requested batch that is published, and mark it as received."""
        for receiver, step in list(self._pending.items()):
            if (data := read_batch(step_path(self.root, step))) is not None:
                self._sent[receiver] = self._pending.pop(receiver)
                router.send_multipart([receiver, BATCH, data])
                with contextlib.suppress(FileNotFoundError):  # it counts now: the acknowledgment may be lost
                    (step_path(self.root, step) / RECEIVED).touch()


class ZmqBatchReceiver:
    """Requests batches from a `ZmqBatchSender`, which may start later or restart."""

    def __init__(self, host: str, port: int) -> None:
        self.address = make_address(host, port)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = open_socket(self._context, zmq.DEALER, self.address)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # do not queue requests while the sender is unreachable
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        self._socket.connect(self.address)

    def receive(self, step: int, timeout_s: float | None = None) -> list[Sample]:
        """Block until the samples of `step` are published; raises `TimeoutError` after `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while deadline is None or time.monotonic() < deadline:
            left = RESEND_S if self._try_send(_Request(SCHEMA, want=step)) else CONNECT_POLL_S
            left = left if deadline is None else min(left, deadline - time.monotonic())
            until = time.monotonic() + left
            while self._socket.poll(max(0, int(1000 * (until - time.monotonic())))):
                kind, data = self._socket.recv_multipart()
                if kind == REFUSED:
                    raise ValueError(f"{self.address}: {data.decode()}: run orchestrator and trainer from one version")
                batch_step, samples = decode_batch(data)
                if batch_step == step:  # else the response to a repeated request
                    self._try_send(_Request(SCHEMA, got=step))
                    return samples
        raise TimeoutError(
            f"waited {timeout_s:g} s for the batch of step {step} from the orchestrator; {LATE} ({self.address})"
        )

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        self._context.term()

    def _try_send(self, request: _Request) -> bool:
        """Send a message; False if no sender is connected."""
        try:
            self._socket.send(msgspec.msgpack.encode(request), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True


def make_address(host: str, port: int) -> str:
    """The TCP address; localhost becomes 127.0.0.1, because ZeroMQ binds to IP addresses."""
    host = strip_brackets(host)
    name = "127.0.0.1" if host == "localhost" else f"[{host}]" if ":" in host else host
    return f"tcp://{name}:{port}"


def strip_brackets(host: str) -> str:
    """An IPv6 address without the brackets that it may have."""
    return host.removeprefix("[").removesuffix("]")


def open_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str) -> zmq.Socket[bytes]:
    """A socket for `address`, which is of IPv6 if it has brackets."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.IPV6, int("[" in address))
    return socket
