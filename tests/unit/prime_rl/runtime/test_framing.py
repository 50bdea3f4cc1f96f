"""Length-prefixed messages between two processes of a run."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator

import pytest

from prime_rl.runtime.framing import FrameChannel, receive_frame, send_frame

DEADLINE_S = 20
LARGE = bytes(range(256)) * 20_000  # more than a socket buffers


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.001)


def test_messages_arrive_whole_and_the_end_once(pair: tuple[socket.socket, socket.socket]) -> None:
    frames: list[bytes] = []
    ends: list[int] = []

    async def main() -> None:
        channel = FrameChannel(pair[0], frames.append, lambda: ends.append(1))
        channel.attach(asyncio.get_running_loop())
        await asyncio.to_thread(lambda: [send_frame(pair[1], part) for part in (b"", b"a", LARGE)])
        await until(lambda: len(frames) == 3)
        channel.send(LARGE)
        channel.send(b"b")
        assert await asyncio.to_thread(lambda: [receive_frame(pair[1]) for _ in range(2)]) == [LARGE, b"b"]
        pair[1].close()
        await until(lambda: ends)

    asyncio.run(main())
    assert frames == [b"", b"a", LARGE] and ends == [1]


def test_half_a_message_is_continued_in_the_next_loop(pair: tuple[socket.socket, socket.socket]) -> None:
    frames: list[bytes] = []
    channel = FrameChannel(pair[0], frames.append, lambda: None)

    async def use(data: bytes, num_frames: int) -> None:
        channel.attach(asyncio.get_running_loop())
        pair[1].sendall(data)
        await until(lambda: len(frames) == num_frames)
        await asyncio.sleep(0.01)

    wire = (4).to_bytes(8, "little") + b"abcd"
    asyncio.run(use(wire + wire[:10], 1))
    asyncio.run(use(wire[10:], 2))
    assert frames == [b"abcd", b"abcd"]
    channel.close()


def test_a_closed_connection_is_an_end_of_file(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[1].sendall((4).to_bytes(8, "little") + b"ab")
    pair[1].close()
    with pytest.raises(EOFError, match="closed the connection"):
        receive_frame(pair[0])
