"""Log-softmax as the sampler computes it, for everything that is compared with sampled log-probs."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from rollouts.kernels import cpu


def log_softmax(logits: Float[Tensor, "*rows vocab"]) -> Float[Tensor, "*rows vocab"]:
    """`torch.log_softmax` over the vocabulary, with a gradient; in fp32 on a CPU with the bits of `cpu.sample`."""
    if cpu.runs_here(logits):
        return _LogSoftmax.apply(logits) if logits.requires_grad else cpu.log_softmax(logits)  # type: ignore[no-untyped-call]
    return torch.log_softmax(logits, dim=-1)


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        out = cpu.log_softmax(logits)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Tensor:
        (out,) = ctx.saved_tensors
        return torch._log_softmax_backward_data(grads[0], out, -1, out.dtype)
