"""Copies from the host to a device."""

from __future__ import annotations

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy to a device. To a GPU through pinned memory: of other memory, a copy waits for what the GPU computes."""
    if torch.device(device).type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
