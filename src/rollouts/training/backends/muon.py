"""Muon (orthogonalized momentum) for matrices and AdamW for all other parameters, as one optimizer.

Keller Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon); Liu et al. 2025 (2502.16982) for the scale of the
update. With sharded parameters each rank gathers a matrix's update, orthogonalizes it and keeps its own shard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rollouts.training.backends.ranks import is_shard

NOT_MATRICES = ("embed_tokens", "wte", "lm_head")
"""Usual names of embeddings and head: 2-D, but each row is the vector of one token."""

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
EPS = 1e-7


def orthogonalize(matrix: Float[Tensor, "*stack rows columns"]) -> Float[Tensor, "*stack rows columns"]:
    """Approximate U V^T of U S V^T, by five Newton-Schulz steps X <- aX + (b G + c G^2) X with G = X X^T.

    In bfloat16 on a GPU (except for float64), in the input dtype on a CPU. Singular values of the result are roughly
    between 0.5 and 1.5. Batched over leading dimensions.
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
    """Factor on the learning rate for matrices of this shape.

    match_rms_adamw: 0.2 sqrt(max(rows, columns)), which matches the RMS of AdamW's updates (2502.16982, eq. 4).
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
        """B <- mu B + (1 - mu) g; W <- (1 - lr wd) W - lr scale orthogonalize(B, or Nesterov's look-ahead)."""
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
                p.add_(_apply_to_full(update, orthogonalize).to(p.dtype), alpha=-group["lr"] * scale)


def _apply_to_full(update: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `change` to the full matrix and shard the result like `update` (a DTensor, or a plain tensor)."""
    if not is_shard(update):
        return change(update)
    from torch.distributed.tensor import Replicate

    whole = update.redistribute(placements=[Replicate()] * update.device_mesh.ndim)
    changed = torch.empty_like(whole)  # `DTensor.from_local` would move offloaded shards to the mesh's device
    assert is_shard(changed)
    changed.to_local().copy_(change(whole.to_local()))
    return changed.redistribute(placements=update.placements)


class JoinedOptimizer(torch.optim.Optimizer):
    """Several optimizers as one, with the parameter groups of all in order."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = list(parts)
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Make all parts share the groups and state of this optimizer."""
        groups = iter(self.param_groups)
        for part in self._parts:
            part.param_groups, part.state = [next(groups) for _ in part.param_groups], self.state

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step all parts."""
        for part in self._parts:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore groups and state of all parts."""
        super().load_state_dict(state_dict)
        self._share()


class Muon(JoinedOptimizer):
    """Muon for the matrices among `parameters`, AdamW for embeddings, head, norms and biases.

    `embeddings`: names of embeddings and head, see `find_embeddings`; without them the usual names are recognized.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        *,
        muon: dict[str, Any],
        adamw: dict[str, Any],
        embeddings: Collection[str] = (),
    ) -> None:
        chosen = {name for name, p in parameters.items() if is_matrix(name, p) and name not in embeddings}
        matrices = [p for name, p in parameters.items() if name in chosen]
        rest = [p for name, p in parameters.items() if name not in chosen]
        parts: list[torch.optim.Optimizer] = []
        if matrices:
            parts.append(MatrixMuon(matrices, muon))
        if rest:
            parts.append(torch.optim.AdamW(rest, fused=True, **adamw))
        super().__init__(parts)


def find_embeddings(model: nn.Module, head: nn.Module | None) -> set[str]:
    """Names of the parameters of all embeddings (of tokens and of positions) and of the output `head`, if any."""
    modules = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    found = {id(p) for module in (*modules, *([head] if head is not None else [])) for p in module.parameters()}
    return {name for name, p in model.named_parameters() if id(p) in found}


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon updates this parameter, judged by its shape and name.

    Biases of experts, norms per head and Mamba's `A_log` have several dimensions, but are vectors.
    """
    *modules, own = name.split(".")
    is_vector = own.endswith("bias") or own == "A_log" or (bool(modules) and modules[-1].endswith("norm"))
    return parameter.ndim >= 2 and not is_vector and not any(part in NOT_MATRICES for part in (*modules, own))
