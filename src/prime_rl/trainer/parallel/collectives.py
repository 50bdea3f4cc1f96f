"""Differentiable collectives."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def copy_to_group(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Identity; the gradient is all-reduced (sum)."""
    out: Tensor = _Copy.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def all_reduce_sum(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """All-reduce (sum); the gradient is passed through (identical on all ranks)."""
    out: Tensor = _Reduce.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def all_gather_rows(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """All-gather of rows; the gradient is this rank's slice (identical computation on all ranks)."""
    out: Tensor = _AllGather.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def all_to_all_rows(
    rows: Tensor, send_counts: list[int], recv_counts: list[int], group: dist.ProcessGroup | None
) -> Tensor:
    """All-to-all of rows: `send_counts[r]` to rank r, `recv_counts[r]` from it; gradients take the reverse path."""
    out: Tensor = _AllToAll.apply(rows, send_counts, recv_counts, group)  # type: ignore[no-untyped-call]
    return out


def _all_reduce(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    # Copy: selective checkpointing stores the output of the product and requires it unmodified.
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
        return _all_reduce(grads[0], ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.start, ctx.rows = dist.get_rank(group) * len(x), len(x)
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][ctx.start : ctx.start + ctx.rows], None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, send_counts: list[int], recv_counts: list[int], group: dist.ProcessGroup | None
    ) -> Tensor:
        ctx.send_counts, ctx.recv_counts, ctx.group = send_counts, recv_counts, group
        return _all_to_all(rows, send_counts, recv_counts, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grads[0], ctx.recv_counts, ctx.send_counts, ctx.group), None, None, None


def _all_to_all(
    rows: Tensor, send_counts: list[int], recv_counts: list[int], group: dist.ProcessGroup | None
) -> Tensor:
    out = rows.new_empty(sum(recv_counts), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), recv_counts, send_counts, group=group)
    return out
