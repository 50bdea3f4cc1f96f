"""Batches over a socket, for a trainer that does not see the orchestrator's files.

    trainer  DEALER  -- want step N -->  ROUTER  orchestrator      held until batch N is published
                     <-- the batch ---
                     --- got step N -->

The receiver asks, and asks again while it hears nothing, so either side may be lost and started anew. The sender keeps
batches as files too: what was published survives it, and a trainer that restarts can ask for a batch once more.
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

import msgspec
import zmq

from prime_rl.transport.batches import (
    RECEIVED,
    SCHEMA,
    FilesystemBatchSender,
    decode_batch,
    read_batch,
)
from rollouts.training.steps import step_path
from rollouts.training.types import Sample

ASK_AGAIN_S = 1.0
KNOCK_S = 0.05  # between questions while nobody is connected
CLOSE_S = 2.0
BATCH, REFUSED = b"batch", b"refused"


class _Request(msgspec.Struct):
    """What a receiver says: that it wants a step, or that it has it."""

    schema: int
    want: int | None = None
    got: int | None = None


class ZmqBatchSender(FilesystemBatchSender):
    """Publishes batches as files and hands them to whoever asks at `host:port`, from a thread of its own."""

    def __init__(self, root: Path, host: str, port: int) -> None:
        super().__init__(root)
        self.address = make_address(host, port)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._bell_address = f"inproc://published-{id(self)}"
        self._bell_lock = threading.Lock()
        self._bell: zmq.Socket[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._waiting: dict[bytes, int] = {}  # receiver -> step it wants

    def open(self) -> None:
        """Listen. Raises `ValueError` when the address is taken."""
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        try:
            router.bind(self.address)
        except zmq.ZMQError as error:
            router.close()
            raise ValueError(f"transport: cannot listen at {self.address} ({error}): set transport.port") from error
        inner = self._context.socket(zmq.PULL)
        inner.bind(self._bell_address)
        self._bell = self._context.socket(zmq.PUSH)
        self._bell.connect(self._bell_address)
        self._thread = threading.Thread(target=self._serve, args=(router, inner), name="batches", daemon=True)
        self._thread.start()

    def send(self, step: int, samples: list[Sample]) -> None:
        """Publish the batch that trains version `step - 1` into version `step`."""
        super().send(step, samples)
        self._ring(b"published")

    def close(self) -> None:
        """Stop listening; closing twice is no mistake."""
        self._ring(b"close")
        if self._thread is not None:
            self._thread.join(CLOSE_S)
        with self._bell_lock:
            if self._bell is not None:
                self._bell.close(0)
                self._bell = None
        self._context.destroy(0)

    def _ring(self, word: bytes) -> None:
        with self._bell_lock:  # a socket is for one thread at a time
            if self._bell is not None:
                self._bell.send(word)

    def _serve(self, router: zmq.Socket[bytes], bell: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(bell, zmq.POLLIN)
        with router, bell:
            while True:
                ready = dict(poller.poll())
                if bell in ready and bell.recv() == b"close":
                    return
                if router in ready:
                    self._hear(router, router.recv_multipart())
                self._answer(router)

    def _hear(self, router: zmq.Socket[bytes], frames: list[bytes]) -> None:
        """Note what a receiver said; what is no request of ours is refused with a reason."""
        receiver, *body = frames
        try:
            request = msgspec.msgpack.decode(b"".join(body), type=_Request)
        except msgspec.MsgspecError:
            request = _Request(schema=-1)
        if request.schema != SCHEMA:
            reason = f"request has schema {request.schema}, this version reads {SCHEMA}"
            router.send_multipart([receiver, REFUSED, reason.encode()])
        elif request.want is not None:
            self._waiting[receiver] = request.want
        elif request.got is not None:
            with contextlib.suppress(FileNotFoundError):
                (step_path(self.root, request.got) / RECEIVED).touch()

    def _answer(self, router: zmq.Socket[bytes]) -> None:
        """Send every batch that is wanted and published."""
        for receiver, step in list(self._waiting.items()):
            if (data := read_batch(step_path(self.root, step))) is not None:
                del self._waiting[receiver]
                router.send_multipart([receiver, BATCH, data])


class ZmqBatchReceiver:
    """Asks a `ZmqBatchSender` for batches, whether it is there yet or there again."""

    def __init__(self, host: str, port: int) -> None:
        self.address = make_address(host, port)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, int(CLOSE_S * 1000))  # what was received is still said
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # no questions pile up for a sender that is away
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        self._socket.connect(self.address)

    def receive(self, step: int, timeout_s: float | None = None) -> list[Sample]:
        """The samples of `step`; blocks until they are published, raises `TimeoutError` after `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while deadline is None or time.monotonic() < deadline:
            left = ASK_AGAIN_S if self._say(_Request(SCHEMA, want=step)) else KNOCK_S
            left = left if deadline is None else min(left, deadline - time.monotonic())
            until = time.monotonic() + left
            while self._socket.poll(max(0, int(1000 * (until - time.monotonic())))):
                kind, data = self._socket.recv_multipart()
                if kind == REFUSED:
                    raise ValueError(f"{self.address}: {data.decode()}: run orchestrator and trainer from one version")
                found, samples = decode_batch(data)
                if found == step:  # else an answer to a question that was asked twice
                    self._say(_Request(SCHEMA, got=step))
                    return samples
        raise TimeoutError(
            f"waited {timeout_s:g} s for the batch of step {step} from the orchestrator ({self.address})"
        )

    def close(self) -> None:
        """Nothing more will be received."""
        self._socket.close()
        self._context.term()

    def _say(self, request: _Request) -> bool:
        """Send a request; False while nobody is connected."""
        try:
            self._socket.send(msgspec.msgpack.encode(request), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True


def make_address(host: str, port: int) -> str:
    """The TCP address; a name such as localhost becomes a number, because sockets bind to those."""
    return f"tcp://{'127.0.0.1' if host == 'localhost' else host}:{port}"
