"""Muon: momentum whose update is made orthogonal, for matrices; AdamW for everything else, as one optimizer.

Keller Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon); Liu et al. 2025 (2502.16982) for the scale of the
update. Where ranks hold shards, each gathers a matrix's update, makes it orthogonal and keeps its own part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rollouts.training.backends.adamw import AdamW

NOT_MATRICES = ("embed_tokens", "wte", "lm_head")
"""Matrices by shape only: a row is a token's own vector, which steps by itself."""

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
EPS = 1e-7


def orthogonalise(matrix: Float[Tensor, "*stack rows columns"]) -> Float[Tensor, "*stack rows columns"]:
    """Nearly U V^T of U S V^T, by five Newton-Schulz steps X <- aX + (b G + c G^2) X with G = X X^T: in bfloat16 on a
    GPU, in the matrix's own format on a CPU, where that is faster and ranks round alike; float64 stays float64.

    The singular values come out between 0.5 and 1.5 or so. Of a stack, each matrix by itself.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.shape[-2] > matrix.shape[-1]
    is_narrowed = matrix.is_cuda and matrix.dtype != torch.float64
    x = matrix.to(torch.bfloat16) if is_narrowed else matrix
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x


def compute_update_scale(shape: torch.Size, adjust_lr: str) -> float:
    """What the learning rate is multiplied with for matrices of this shape.

    match_rms_adamw: 0.2 sqrt(max(rows, columns)), so that an update is as large as AdamW's (2502.16982, eq. 4).
    original: sqrt(max(1, rows / columns)).
    """
    rows, columns = shape[-2:]
    if adjust_lr == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


class MatrixMuon(torch.optim.Optimizer):
    """Muon over matrices and stacks of matrices."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """B <- mu B + (1 - mu) g; W <- (1 - lr wd) W - lr scale orthogonalise(B, or Nesterov's look-ahead)."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                velocity = state["momentum_buffer"]
                velocity.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(velocity, group["momentum"]) if group["nesterov"] else velocity
                p.mul_(1 - group["lr"] * group["weight_decay"])
                scale = compute_update_scale(p.shape, group["adjust_lr"])
                p.add_(_whole(update, orthogonalise).to(p.dtype), alpha=-group["lr"] * scale)


def _whole(update: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """`change` of the whole matrix, cut as `update` is; shards are DTensors, known by their methods."""
    gather: Callable[[], Tensor] | None = getattr(update, "full_tensor", None)
    if gather is None:
        return change(update)
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(update, DTensor)
    mesh = update.device_mesh
    changed = DTensor.from_local(change(gather()), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return changed.redistribute(placements=update.placements)


class JoinedOptimizer(torch.optim.Optimizer):
    """Several optimizers stepped together; what is saved and scheduled is one, with the groups of all in order."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = list(parts)
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """All parts work on the groups and the state of this one."""
        groups = iter(self.param_groups)
        for part in self._parts:
            part.param_groups, part.state = [next(groups) for _ in part.param_groups], self.state

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of every part."""
        for part in self._parts:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        super().load_state_dict(state_dict)
        self._share()


class Muon(JoinedOptimizer):
    """Muon for the matrices among `parameters`, AdamW for embeddings, head, norms and biases, stepped together."""

    def __init__(self, parameters: Mapping[str, Tensor], *, muon: dict[str, Any], adamw: dict[str, Any]) -> None:
        matrices = [p for name, p in parameters.items() if is_matrix(name, p)]
        rest = [p for name, p in parameters.items() if not is_matrix(name, p)]
        parts: list[torch.optim.Optimizer] = []
        if matrices:
            parts.append(MatrixMuon(matrices, muon))
        if rest:
            parts.append(AdamW(rest, fused=True, **adamw))
        super().__init__(parts)


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon steps this parameter."""
    return parameter.ndim >= 2 and not any(part in NOT_MATRICES for part in name.split("."))
