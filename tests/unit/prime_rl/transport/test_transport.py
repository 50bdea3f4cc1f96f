"""Both batch transports: order, blocking, restarts of either side, resuming and pruning."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from socket import AF_INET, AF_INET6, SOCK_STREAM, create_server
from types import SimpleNamespace

import anyio
import msgspec
import pytest
import zmq
from fake_engine import free_port

from prime_rl.runtime import machine
from prime_rl.transport import batches, zeromq
from prime_rl.transport.batches import SCHEMA, BatchReceiver, BatchSender
from prime_rl.transport.factory import build_receiver, build_sender
from prime_rl.transport.zeromq import ZmqBatchReceiver, ZmqBatchSender, make_address
from rollouts.training import steps
from rollouts.training.steps import publish_step
from rollouts.training.types import Sample

both = pytest.mark.parametrize("kind", ["filesystem", "zmq"])
WAIT_S = 30.0


class TransportCase:
    """Senders and receivers of one address and directory; all are closed at the end."""

    def __init__(self, kind: str, root: Path, stack: ExitStack) -> None:
        self.kind, self.root, self.port, self._stack = kind, root, free_port(), stack

    def sender(self) -> BatchSender:
        sender = build_sender(self.kind, self.root, "localhost", self.port)
        self._stack.callback(sender.close)
        sender.open()
        return sender

    def receiver(self) -> BatchReceiver:
        receiver = build_receiver(self.kind, self.root, "localhost", self.port)
        self._stack.callback(receiver.close)
        return receiver


@pytest.fixture
def transport(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TransportCase]:
    monkeypatch.setattr(zeromq, "RESEND_S", 0.2)
    with ExitStack() as stack:
        yield TransportCase(kind, tmp_path / "rollouts", stack)


def batch(step: int, size: int = 3) -> list[Sample]:
    return [Sample(prompt=f"{step}", tokens=[step, i], loss_mask=[0.0, 1.0], index=i) for i in range(size)]


def publish(sender: BatchSender, *steps: int) -> None:
    async def main() -> None:
        for step in steps:
            await sender.publish(step, batch(step))

    anyio.run(main)


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    return thread, found


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@both
def test_batches_arrive_complete_and_are_acknowledged(transport: TransportCase) -> None:
    sender, receiver = transport.sender(), transport.receiver()
    publish(sender, 1, 2)
    assert not sender.is_received(1)
    assert receiver.receive(1, WAIT_S) == batch(1)
    until(lambda: sender.is_received(1))
    assert not sender.is_received(2)
    assert receiver.receive(2, WAIT_S) == batch(2)


@both
def test_receive_blocks_until_published(transport: TransportCase) -> None:
    receiver = transport.receiver()
    thread, found = in_thread(lambda: receiver.receive(2, WAIT_S))
    time.sleep(0.3)
    sender = transport.sender()
    publish(sender, 1)
    time.sleep(0.1)
    assert not found
    publish(sender, 2)
    thread.join(WAIT_S)
    assert found == [batch(2)]


@both
def test_several_ranks_each_get_every_batch(transport: TransportCase) -> None:
    sender, receivers = transport.sender(), [transport.receiver() for _ in range(3)]
    started = [in_thread(lambda receiver=receiver: receiver.receive(1, WAIT_S)) for receiver in receivers]
    publish(sender, 1)
    for thread, found in started:
        thread.join(WAIT_S)
        assert found == [batch(1)]


@both
def test_a_restarted_trainer_receives_the_batch_again(transport: TransportCase) -> None:
    sender, first = transport.sender(), transport.receiver()
    publish(sender, 1, 2)
    assert first.receive(1, WAIT_S) == batch(1)
    assert first.receive(2, WAIT_S) == batch(2)
    first.close()
    second = transport.receiver()
    assert [second.receive(step, WAIT_S) for step in (1, 2)] == [batch(1), batch(2)]


@both
def test_a_restarted_orchestrator_serves_waiting_receivers(transport: TransportCase) -> None:
    """A receiver waits while the sender is replaced; published batches remain."""
    first, receiver = transport.sender(), transport.receiver()
    publish(first, 1)
    assert receiver.receive(1, WAIT_S) == batch(1)
    thread, found = in_thread(lambda: receiver.receive(2, WAIT_S))
    time.sleep(0.1)
    first.close()
    time.sleep(0.1)
    second = transport.sender()
    publish(second, 2)
    thread.join(WAIT_S)
    assert found == [batch(2)]
    assert transport.receiver().receive(1, WAIT_S) == batch(1)


@both
def test_receive_timeout_names_the_batch(transport: TransportCase) -> None:
    transport.sender()
    message = r"waited 0\.3 s for the batch of step 4 from the orchestrator; .*raise data\.timeout_s"
    with pytest.raises(TimeoutError, match=message):
        transport.receiver().receive(4, 0.3)


@both
def test_pruning_keeps_later_batches(transport: TransportCase) -> None:
    sender, receiver = transport.sender(), transport.receiver()
    publish(sender, 1, 2, 3)
    sender.prune(2)
    assert sorted(path.name for path in transport.root.iterdir()) == ["step_3"]
    assert receiver.receive(3, WAIT_S) == batch(3)
    with pytest.raises(TimeoutError):
        receiver.receive(2, 0.2)


@both
def test_a_batch_that_is_published_while_others_are_pruned_stays(
    transport: TransportCase, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = transport.sender()
    publish(sender, 1, 2)
    look, looks = steps.complete_steps, []

    def look_as_a_batch_arrives(root: Path, parts: tuple[str, ...] = ()) -> list[int]:
        if looks:  # between two looks at the directory
            publish_step(root, 3, lambda directory: (directory / "batch.msgpack").touch())
        looks.append(root)
        return look(root, parts)

    for module in (steps, batches):
        monkeypatch.setattr(module, "complete_steps", look_as_a_batch_arrives, raising=False)
    sender.prune(1)
    monkeypatch.undo()
    publish_step(transport.root, 4, lambda directory: None)
    assert (
        looks and steps.complete_steps(transport.root)[0] == 2 and set(steps.complete_steps(transport.root)) >= {2, 4}
    )
    assert len(looks) == 1 or 3 in steps.complete_steps(transport.root)


@both
def test_a_batch_that_is_replaced_is_unread_again(transport: TransportCase) -> None:
    sender, receiver = transport.sender(), transport.receiver()
    publish(sender, 1)
    receiver.receive(1, WAIT_S)
    until(lambda: sender.is_received(1))
    publish(sender, 1)
    assert not sender.is_received(1)


def test_a_published_batch_is_sent_immediately(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a resend interval of 60 s, only the sender's notification can end the wait."""
    monkeypatch.setattr(zeromq, "RESEND_S", 60.0)
    port = free_port()
    sender, receiver = ZmqBatchSender(tmp_path, "localhost", port), ZmqBatchReceiver("localhost", port)
    sender.open()
    thread, found = in_thread(lambda: receiver.receive(1, WAIT_S))
    until(lambda: bool(sender._pending))
    publish(sender, 1)
    thread.join(WAIT_S)
    assert found == [batch(1)]
    receiver.close()
    sender.close()


@pytest.fixture
def raw_receiver(tmp_path: Path) -> Iterator[tuple[ZmqBatchSender, zmq.Socket[bytes]]]:
    """A sender, and a socket that is connected to it and sends messages of its own."""
    sender = ZmqBatchSender(tmp_path, "localhost", free_port())
    sender.open()
    context = zmq.Context()
    with context.socket(zmq.DEALER) as socket:
        socket.connect(sender.address)
        yield sender, socket
    context.term()
    sender.close()


def ask(socket: zmq.Socket[bytes], **request: int) -> None:
    socket.send(msgspec.msgpack.encode({"schema": SCHEMA, **request}))


def num_received(socket: zmq.Socket[bytes], expected: int) -> int:
    """Number of batches that arrive: waits for `expected` ones, and a moment for more."""
    number = 0
    while socket.poll(int(1000 * WAIT_S) if number < expected else 200):
        assert socket.recv_multipart()[0] == zeromq.BATCH
        number += 1
    return number


def test_a_batch_on_its_way_is_not_sent_again(raw_receiver: tuple[ZmqBatchSender, zmq.Socket[bytes]]) -> None:
    """A receiver on a slow connection repeats its request while the batch is transferred."""
    sender, socket = raw_receiver
    publish(sender, 1, 2)
    for _ in range(3):
        ask(socket, want=1)
    assert num_received(socket, 1) == 1
    ask(socket, got=1)
    ask(socket, want=1)
    assert num_received(socket, 1) == 1, "an acknowledged batch can be requested again"
    for step in (2, 1):
        ask(socket, want=step)
    assert num_received(socket, 2) == 2, "a receiver may give up a batch and request it later"


def test_a_lost_acknowledgment_leaves_no_batch_unread(
    raw_receiver: tuple[ZmqBatchSender, zmq.Socket[bytes]],
) -> None:
    sender, socket = raw_receiver
    ask(socket, want=1)
    until(lambda: bool(sender._pending))
    assert not sender.is_received(1)
    publish(sender, 1)
    assert num_received(socket, 1) == 1
    until(lambda: sender.is_received(1))


def test_the_sender_outlives_a_failed_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [OSError(24, "Too many open files")]
    real = zeromq.read_batch

    def read(directory: Path) -> bytes | None:
        if failures:
            raise failures.pop()
        return real(directory)

    monkeypatch.setattr(zeromq, "read_batch", read)
    monkeypatch.setattr(zeromq, "RESEND_S", 0.2)
    with ExitStack() as stack:
        transport = TransportCase("zmq", tmp_path, stack)
        sender, receiver = transport.sender(), transport.receiver()
        _, found = in_thread(lambda: receiver.receive(1, 10))
        until(lambda: not failures)
        publish(sender, 1)
        until(lambda: found == [batch(1)])


def test_other_schemas_and_invalid_messages_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    sender = ZmqBatchSender(tmp_path, "localhost", port)
    sender.open()
    context = zmq.Context()
    with context.socket(zmq.DEALER) as noise:
        noise.connect(sender.address)
        for words in (b"", b"\xc1", msgspec.msgpack.encode({"schema": 9, "want": 1})):
            noise.send(words)
            assert noise.poll(int(1000 * WAIT_S)) and noise.recv_multipart()[0] == zeromq.REFUSED
    context.term()
    publish(sender, 1)
    receiver = ZmqBatchReceiver("localhost", port)
    assert receiver.receive(1, WAIT_S) == batch(1)
    send = receiver._try_send
    monkeypatch.setattr(receiver, "_try_send", lambda request: send(zeromq._Request(SCHEMA + 1, want=1)))
    with pytest.raises(ValueError, match=f"request has schema {SCHEMA + 1}, this version reads {SCHEMA}"):
        receiver.receive(1, WAIT_S)
    receiver.close()
    sender.close()


def test_batches_arrive_over_ipv6(tmp_path: Path) -> None:
    port = free_port()
    try:
        create_server(("::1", port), family=AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    sender = ZmqBatchSender(tmp_path, "::1", port)
    sender.open()
    publish(sender, 1)
    receiver = ZmqBatchReceiver("::1", port)
    assert receiver.receive(1, WAIT_S) == batch(1)
    receiver.close()
    sender.close()


def test_a_host_that_is_no_address_is_named(tmp_path: Path) -> None:
    sender = ZmqBatchSender(tmp_path, "trainer.invalid", free_port())
    with pytest.raises(ValueError, match=r"cannot listen at tcp://trainer\.invalid.*: set transport\.host to an IP"):
        sender.open()
    sender.close()


def test_a_name_of_the_loopback_address_is_reachable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian maps the name of a machine to 127.0.1.1, which other machines cannot reach."""
    found = [(AF_INET, SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(machine, "socket", SimpleNamespace(getaddrinfo=lambda *_, **__: found, SOCK_STREAM=SOCK_STREAM))
    sender = ZmqBatchSender(tmp_path, "node001", port := free_port())
    sender.open()
    publish(sender, 1)
    receiver = ZmqBatchReceiver("127.0.0.2", port)
    assert receiver.receive(1, WAIT_S) == batch(1)
    receiver.close()
    sender.close()


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    port = free_port()
    first, second = (ZmqBatchSender(tmp_path, "localhost", port) for _ in range(2))
    first.open()
    with pytest.raises(ValueError, match=rf"cannot listen at tcp://127\.0\.0\.1:{port} .*: set transport\.port"):
        second.open()
    second.close()
    first.close()


@pytest.mark.parametrize(
    ("host", "address"),
    [("localhost", "127.0.0.1"), ("node-1", "node-1"), ("::1", "[::1]"), ("[::1]", "[::1]")],
)
def test_addresses_of_hosts(host: str, address: str) -> None:
    assert make_address(host, 5555) == f"tcp://{address}:5555"
