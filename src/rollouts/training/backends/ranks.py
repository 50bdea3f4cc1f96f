"""Collectives on plain values over the ranks of a training run; no-ops for a single process."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


EXIT_PAUSE_S = 0.1
"""Of a rank at its exit: the threads of its collectives need a few milliseconds, with other ranks on the same cores."""


class OtherRankFailed(RuntimeError):
    """Another rank failed; the reason is in its log."""


def is_shard(value: Any) -> TypeIs[DTensor]:
    """Whether this is a DTensor. Checked by a method: importing the class takes a second."""
    return isinstance(value, Tensor) and hasattr(value, "full_tensor")


@dataclass(frozen=True)
class Ranks:
    """Rank `rank` of `size`; `device` is that of collectives of the default process group."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        if self.size > 1:
            _pause_at_exit()

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each value summed over the ranks, in fp64."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return [float(value) for value in total.tolist()]

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        """All-reduce all gradients in one message; a missing one counts as 0."""
        if self.size == 1:
            return
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        for parameter, part in zip(parameters, flat.split([grad.numel() for grad in grads]), strict=True):
            parameter.grad = part.view_as(parameter)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, in rank order, on the CPU; they must have the same shape."""
        if self.size == 1:
            return [tensor.cpu()]
        mine = tensor.to(self.device)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine)
        return [part.cpu() for part in parts]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """All-gather bytes of different lengths, in rank order."""
        if self.size == 1:
            return [data]
        lengths = [int(n) for n in self.gather(torch.tensor([len(data)], dtype=torch.int64))]
        width = max(1, *lengths)
        padded = torch.frombuffer(bytearray(data.ljust(width, b"\0")), dtype=torch.uint8)
        parts = self.gather(padded)
        return [part.numpy().tobytes()[:n] for part, n in zip(parts, lengths, strict=True)]

    def broadcast(self, data: bytes) -> bytes:
        """Broadcast `data` of rank 0."""
        if self.size == 1:
            return data
        length = torch.tensor([len(data)], dtype=torch.int64, device=self.device)
        dist.broadcast(length, 0)
        payload = torch.zeros(int(length), dtype=torch.uint8, device=self.device)
        if self.rank == 0 and data:
            payload = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)
        if int(length):
            dist.broadcast(payload, 0)
        return payload.cpu().numpy().tobytes()

    def run_on_rank0(self, work: Callable[[], object]) -> None:
        """Run `work` on rank 0 while the others wait; a failure is raised on all ranks."""
        self.run_on_all_ranks(work if self.rank == 0 else lambda: None)

    def run_on_all_ranks(self, work: Callable[[], object]) -> None:
        """Run `work`, which has no collectives, on every rank; a failure of one is raised on all ranks."""
        error: BaseException | None = None
        try:
            work()
        except BaseException as caught:
            error = caught
        failed = [float(error is not None and rank == self.rank) for rank in range(self.size)]
        if self.size > 1:
            failed = self.sum(failed)
        if error is not None:
            raise error
        if any(failed):
            raise OtherRankFailed(f"rank {failed.index(1.0)} failed, see its log")


@cache
def _pause_at_exit() -> None:
    """Let the threads of gloo release the tensors of their last collectives before Python is finalized.

    Releasing takes the GIL, and a thread that waits for it during finalization aborts the process
    (https://github.com/pytorch/pytorch/issues/190489). Destroying the process group does not end these threads.
    """
    atexit.register(time.sleep, EXIT_PAUSE_S)
