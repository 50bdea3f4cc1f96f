"""Workarounds for vLLM bugs, with the affected version.

vLLM 0.32 on a CPU keeps packed copies of weights that its reload does not update (the output layer of models with tied
embeddings): `unpack` reads such a copy for comparison, and `repack` rebuilds it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

PROBE_ROWS = 1024


def unpack(module: Any) -> Tensor:
    """Read a packed weight by multiplying with the identity; exact, since every sum has one term."""
    weight = module.weight
    width = getattr(module, "input_size_per_partition", None) or getattr(module, "input_size", None) or weight.shape[1]
    dtype = weight.dtype
    parts = []
    for start in range(0, width, PROBE_ROWS):
        rows = min(PROBE_ROWS, width - start)
        probe = torch.zeros(rows, width, dtype=dtype)
        probe[torch.arange(rows), start + torch.arange(rows)] = 1
        parts.append(module.cpu_linear(probe, weight, None))
    return torch.cat(parts).T


def repack(model: nn.Module) -> None:
    """Make vLLM rebuild its packed weight copies."""
    modules: list[Any] = list(model.modules())
    for module in modules:
        method = getattr(module, "quant_method", None)
        if hasattr(module, "cpu_linear") and module.weight.numel() and method is not None:
            method.process_weights_after_loading(module)
