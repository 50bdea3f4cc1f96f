"""A process group of two that meets over a connection which they already have, apart from any group of their own."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed
from torch import Tensor

from prime_rl.utils.frames import receive_frame, send_frame

dist: Any = torch.distributed
"""Its declarations lack half of what it has."""
PIECE_BYTES = 64 << 20  # of one message: the time limit is one on standing still


class Link(dist.Store):  # type: ignore[misc]
    """What two members of a group tell each other before it stands: each value that one sets goes to the other."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        self._connection, self._told = connection, dict[str, bytes]()

    def set(self, key: str, value: bytes) -> None:
        """Tell the other."""
        self._told[key] = bytes(value)
        send_frame(self._connection, msgspec.msgpack.encode((key, bytes(value))))

    def get(self, key: str) -> bytes:
        """What one of both has told, or will. Raises `OSError` or `EOFError` when the other falls silent or leaves."""
        while key not in self._told:
            name, value = msgspec.msgpack.decode(receive_frame(self._connection), type=tuple[str, bytes])
            self._told[name] = value
        return self._told[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return once all of them were told; the connection has a time limit of its own."""
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of them were told."""
        return all(key in self._told for key in keys)


class Pair:
    """The group: rank 0 sends, rank 1 receives. `kind` is gloo, or nccl between the GPUs `device` of both."""

    def __init__(self, connection: socket.socket, rank: int, kind: str, device: torch.device, timeout_s: float) -> None:
        self._rank, self._limit = rank, timedelta(seconds=timeout_s)
        self._device = device if kind == "nccl" else None
        link = Link(connection)
        if kind == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._limit
            self._group = dist.ProcessGroupNCCL(link, rank, 2, options)
        else:
            options = dist.ProcessGroupGloo._Options()
            options._timeout = self._limit
            own_address = connection.getsockname()[0]  # not what the host's name stands for, which may be loopback
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address)]
            self._group = dist.ProcessGroupGloo(link, rank, 2, options)

    def pass_on(self, tensor: Tensor) -> None:
        """Bring the bytes of rank 0's tensor into rank 1's, which has its shape and dtype and is contiguous too.

        Raises `RuntimeError` when the other leaves, or nothing moves for as long as the time limit says.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        flat = tensor.reshape(-1).view(torch.uint8)
        for piece in flat.split(PIECE_BYTES) if flat.numel() else ():
            staged = piece if self._device is None else piece.to(self._device)
            self._group.broadcast([staged], options).wait(self._limit)
            if staged is not piece and self._rank == 1:
                piece.copy_(staged)
