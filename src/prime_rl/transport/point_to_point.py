"""A process group of two ranks with rendezvous over an existing connection, independent of other process groups."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed
from torch import Tensor

from prime_rl.runtime.framing import receive_frame, send_frame

dist: Any = torch.distributed
"""Untyped: the type stubs are incomplete."""
PIECE_BYTES = 64 << 20  # of one message: the time limit applies to each piece, not to a whole tensor


class SocketStore(dist.Store):  # type: ignore[misc]
    """Rendezvous store over a socket: every value that one side sets is sent to the other."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        self._connection, self._entries = connection, dict[str, bytes]()

    def set(self, key: str, value: bytes) -> None:
        """Store a value and send it to the peer."""
        self._entries[key] = bytes(value)
        send_frame(self._connection, msgspec.msgpack.encode((key, bytes(value))))

    def get(self, key: str) -> bytes:
        """Block until the key is set by either side; raises `OSError` or `EOFError` if the peer times out or leaves."""
        while key not in self._entries:
            name, value = msgspec.msgpack.decode(receive_frame(self._connection), type=tuple[str, bytes])
            self._entries[name] = value
        return self._entries[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Block until all keys are set; the connection's own timeout applies."""
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set."""
        return all(key in self._entries for key in keys)


class ProcessGroupPair:
    """Process group of a sender (rank 0) and a receiver (rank 1) over gloo, or nccl between the GPUs `device`."""

    def __init__(self, connection: socket.socket, rank: int, kind: str, device: torch.device, timeout_s: float) -> None:
        self._rank, self._limit = rank, timedelta(seconds=timeout_s)
        self._device = device if kind == "nccl" else None
        store = SocketStore(connection)
        if kind == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._limit
            self._group = dist.ProcessGroupNCCL(store, rank, 2, options)
        else:
            options = dist.ProcessGroupGloo._Options()
            options._timeout = self._limit
            own_address = connection.getsockname()[0]  # the host name may resolve to loopback
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address)]
            self._group = dist.ProcessGroupGloo(store, rank, 2, options)

    def broadcast(self, tensor: Tensor) -> None:
        """Copy rank 0's tensor into rank 1's, which has the same shape and dtype; both are contiguous.

        Raises `RuntimeError` if the peer disconnects or a piece exceeds the time limit.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        flat = tensor.reshape(-1).view(torch.uint8)
        for piece in flat.split(PIECE_BYTES) if flat.numel() else ():
            staged = piece if self._device is None else piece.to(self._device)
            self._group.broadcast([staged], options).wait(self._limit)
            if staged is not piece and self._rank == 1:
                piece.copy_(staged)
