"""Activation checkpointing and offloading: store, recompute or move activations to host memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from prime_rl.trainer.model_config import ActivationConfig, ActivationOffloadConfig

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
    "torch_attn::_varlen_attn",
    "mkldnn::_linear_pointwise",
    "rollouts::multiply_rounded",
)
"""Operations whose outputs selective checkpointing stores, the expensive ones: matrix products and attention."""

MIN_OFFLOADED = 1 << 10
"""Minimum number of elements for which offloading a tensor pays off."""

_observers: list[Callable[[Tensor], Any]] = []
"""Called for stored tensors that the hooks of autograd do not show, see `observe_stored`."""


@contextmanager
def observe_stored(observe: Callable[[Tensor], Any]) -> Iterator[None]:
    """Call `observe` for every tensor that a forward pass in this context stores on its device for the backward pass.

    Selective checkpointing keeps its tensors without hooks, and offloading replaces the hooks: both report here.
    """

    def pack(tensor: Tensor) -> Tensor:
        observe(tensor)
        return tensor

    _observers.append(observe)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
    finally:
        _observers.remove(observe)


def _report(stored: Any) -> None:
    if _observers and not torch.compiler.is_compiling():  # tensors of compiled code are shown by the hooks
        for tensor in tree_leaves(stored):
            if isinstance(tensor, Tensor):
                for observe in _observers:
                    observe(tensor)


def recompute_layers(
    layers: Sequence[nn.Module], config: ActivationConfig, offload: ActivationOffloadConfig | None = None
) -> None:
    """Checkpoint every `freq`-th layer: store its inputs only (full) or also its matrix products (selective).

    With `offload` the inputs are moved to host memory, the products are not. The layer's forward is replaced in place,
    so parameter names do not change.
    """
    context_fn = (lambda: create_selective_checkpoint_contexts(_save_products)) if config.mode == "selective" else None
    host = ActivationOffload(offload.pin_memory) if offload is not None else None
    for layer in list(layers)[:: config.freq]:
        layer.forward = _checkpoint_forward(layer.forward, context_fn, host)


def _checkpoint_forward(
    forward: Callable[..., Any], context_fn: Callable[[], Any] | None, host: ActivationOffload | None
) -> Any:
    options: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}

    @functools.wraps(forward)
    def run(*args: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **named)
        with host.hooks() if host is not None else nullcontext():
            return checkpoint(forward, *args, use_reentrant=False, **options, **named)

    return run


def _save_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if op.name().partition(".")[0] not in PRODUCTS:
        return CheckpointPolicy.PREFER_RECOMPUTE
    _report(context.op_output)
    return CheckpointPolicy.MUST_SAVE


class ActivationOffload:
    """Offloads tensors saved by autograd from the accelerator to the host, and restores them in the backward pass.

    Copies run on the compute stream, so they are ordered with the producers and consumers of the tensors.
    """

    def __init__(self, pin_memory: bool, kinds: tuple[str, ...] = ("cuda",)) -> None:
        self.pin_memory = pin_memory
        self.kinds = kinds
        self.num_moved = 0

    def hooks(self) -> AbstractContextManager[None]:
        """Context in which saved tensors are offloaded."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        """Copy to the host; small tensors and tensors without gradient (tables, indices) stay on the device."""
        if tensor.device.type not in self.kinds or not tensor.requires_grad or tensor.numel() < MIN_OFFLOADED:
            _report(tensor)
            return tensor
        self.num_moved += 1
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.pin_memory)
        return tensor.device, host.copy_(tensor.detach(), non_blocking=self.pin_memory)

    def unpack(self, packed: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        """Copy back to the original device."""
        if isinstance(packed, Tensor):
            return packed
        device, host = packed
        return host.to(device, non_blocking=self.pin_memory)
