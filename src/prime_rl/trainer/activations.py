"""Which activations of a layer wait for the backward pass, are computed again in it, or wait in host memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from prime_rl.trainer.config import ActivationConfig, ActivationOffloadConfig

PRODUCTS = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::_grouped_mm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "mkldnn::_linear_pointwise",
)
"""What selective recomputation keeps, because it costs most of the time: matrix products and attention."""

MIN_OFFLOADED = 1 << 10
"""Elements below which a tensor is not worth a transfer."""


def recompute_layers(
    layers: Sequence[nn.Module], config: ActivationConfig, offload: ActivationOffloadConfig | None = None
) -> None:
    """Let every `freq`-th layer, from the first, keep its inputs only (full) or its matrix products too (selective).

    With `offload` these inputs wait in host memory. The layer's forward is replaced in place, so names stay.
    """
    keep = (lambda: create_selective_checkpoint_contexts(_keep_products)) if config.mode == "selective" else None
    host = HostMemory(offload.pin_memory) if offload is not None else None
    for layer in list(layers)[:: config.freq]:
        layer.forward = _recomputed(layer.forward, keep, host)


def _recomputed(forward: Callable[..., Any], keep: Callable[[], Any] | None, host: HostMemory | None) -> Any:
    options: dict[str, Any] = {} if keep is None else {"context_fn": keep}

    @functools.wraps(forward)
    def run(*args: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **named)
        with host.hooks() if host is not None else nullcontext():
            return checkpoint(forward, *args, use_reentrant=False, **options, **named)

    return run


def _keep_products(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op.name().partition(".")[0] in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


class HostMemory:
    """Moves tensors that autograd saves from the accelerator to the host, and back when the backward wants them.

    Copies run on the stream that computes, so they are in order with what makes and uses the tensors.
    """

    def __init__(self, pin_memory: bool, kinds: tuple[str, ...] = ("cuda",)) -> None:
        self.pin_memory = pin_memory
        self.kinds = kinds
        self.num_moved = 0

    def hooks(self) -> AbstractContextManager[None]:
        """While entered, what is saved goes through here."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        """To the host; small tensors and those that no gradient flows through (tables, indices) stay."""
        if tensor.device.type not in self.kinds or not tensor.requires_grad or tensor.numel() < MIN_OFFLOADED:
            return tensor
        self.num_moved += 1
        held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.pin_memory)
        return tensor.device, held.copy_(tensor.detach(), non_blocking=self.pin_memory)

    def unpack(self, packed: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        """Back to where it came from."""
        if isinstance(packed, Tensor):
            return packed
        device, held = packed
        return held.to(device, non_blocking=self.pin_memory)
