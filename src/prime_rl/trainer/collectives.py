"""Collectives that gradients flow through."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def copy_to_all(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """What every rank of the group has alike; its gradient is the sum of theirs."""
    out: Tensor = _Copy.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def sum_over(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sum over ranks, of which all then make the same; its gradient is that of every summand."""
    out: Tensor = _Sum.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def join_rows(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The rows of all ranks, of which all then make the same; each has the gradient of its own."""
    out: Tensor = _Join.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def exchange_rows(rows: Tensor, sent: list[int], got: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """Rows to the ranks of a group, `sent[r]` to rank r and `got[r]` from it; gradients take the way back."""
    out: Tensor = _Exchange.apply(rows, sent, got, group)  # type: ignore[no-untyped-call]
    return out


def _summed(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    # A copy, because recomputation keeps what a product returned and wants to find it unchanged.
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _summed(grads[0], ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.start, ctx.rows = dist.get_rank(group) * len(x), len(x)
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][ctx.start : ctx.start + ctx.rows], None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], got: list[int], group: dist.ProcessGroup | None) -> Tensor:
        ctx.sent, ctx.got, ctx.group = sent, got, group
        return _exchanged(rows, sent, got, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grads[0], ctx.got, ctx.sent, ctx.group), None, None, None


def _exchanged(rows: Tensor, sent: list[int], got: list[int], group: dist.ProcessGroup | None) -> Tensor:
    out = rows.new_empty(sum(got), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), got, sent, group=group)
    return out
