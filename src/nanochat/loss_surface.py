"""Loss surface around a model's parameters, along two filter-normalized random directions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


@torch.no_grad()
def compute_loss_surface(
    model: nn.Module, loss: Callable[[], float], *, size: int = 9, radius: float = 0.5, seed: int = 0
) -> dict[str, Any]:
    """`loss[i][j]` at parameters + alpha[i] * d1 + beta[j] * d2, for `size` values from -radius to radius each.

    The directions are normal, each row of a matrix scaled to the norm of the model's row (filter normalization,
    1712.09913), so that pictures of different models compare. `here` is the loss where the model stands; it stands
    there again afterwards, to the bit. Takes size^2 + 1 calls of `loss`.
    """
    if size < 3 or size % 2 == 0:
        raise ValueError(f"size {size} must be odd and at least 3: the middle is where the model stands")
    parameters = [p for p in model.parameters() if p.ndim >= 2]
    kept = [p.clone() for p in parameters]
    generator = torch.Generator().manual_seed(seed)
    first, second = ([_direction(p, generator) for p in parameters] for _ in range(2))
    ticks = [radius * (2 * i / (size - 1) - 1) for i in range(size)]
    try:
        here = loss()
        rows = []
        for alpha in ticks:
            row = []
            for beta in ticks:
                for p, origin, d1, d2 in zip(parameters, kept, first, second, strict=True):
                    p.copy_(origin + alpha * d1 + beta * d2)
                row.append(loss())
            rows.append(row)
    finally:
        for p, origin in zip(parameters, kept, strict=True):
            p.copy_(origin)
    return {"alpha": ticks, "beta": ticks, "loss": rows, "here": here}


def _direction(parameter: Tensor, generator: torch.Generator) -> Tensor:
    """Normal direction with the row norms of `parameter`; drawn on the CPU, so equal on every device."""
    noise = torch.randn(parameter.shape, generator=generator).to(parameter)
    flat, own = noise.flatten(1), parameter.flatten(1)
    scaled = flat * (own.norm(dim=1, keepdim=True) / flat.norm(dim=1, keepdim=True).clamp_min(1e-12))
    return scaled.view_as(parameter)
