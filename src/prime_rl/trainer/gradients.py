"""What the gradient of a step needs beyond the backward pass where ranks hold different parts of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from prime_rl.trainer.parallel_dims import Mesh
from prime_rl.trainer.shards import Holders, local_part
from prime_rl.trainer.tensor_parallel import is_partial
from rollouts.training.backends.ranks import Ranks


@dataclass(frozen=True)
class Gradients:
    """The gradients of the parameters that are stepped, over all ranks of a mesh."""

    parameters: Mapping[str, Tensor]
    holders: Holders
    mesh: Mesh
    ranks: Ranks

    @torch.no_grad()
    def complete(self) -> None:
        """Add up what several ranks have found for a parameter that they hold alike."""
        if self.mesh.tp.size > 1:
            self._sum([name for name in self.parameters if is_partial(name)], self.mesh.tp.group)
        if self.mesh.ends is not None:
            self._sum([name for name in self.parameters if self._is_at_both_ends(name)], self.mesh.ends)

    def _is_at_both_ends(self, name: str) -> bool:
        """Whether another stage holds this too: a tied embedding, which is read at the first and the last."""
        stride = self.ranks.size // self.mesh.pp.size
        box = self.holders.own[name]
        return len({rank // stride for rank in self.holders.by_name[name][box]}) > 1

    def _sum(self, names: Sequence[str], group: dist.ProcessGroup | None) -> None:
        found = [self.parameters[name].grad for name in names]
        sum_tensors([local_part(gradient) for gradient in found if gradient is not None], group)

    @torch.no_grad()
    def compute_norm(self, _: Sequence[Tensor]) -> Tensor:
        """Norm of the whole gradient: every element counts once, however many ranks hold it."""
        held = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        total = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        if held:
            norms = torch.stack(torch._foreach_norm([local_part(g) for g in held.values()])).double()
            copies = torch.tensor([self.holders.copies(name) for name in held], device=norms.device)
            total += (norms.square() / copies).sum().to(total.device)
        if self.ranks.size > 1:
            dist.all_reduce(total)
        return total.sqrt()


def sum_tensors(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Add up tensors over the ranks of `group`, in place and in one message per format."""
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        parts = [tensor for tensor in tensors if tensor.dtype == dtype]
        joined = torch.cat([part.flatten() for part in parts])
        dist.all_reduce(joined, group=group)
        for part, total in zip(parts, joined.split([part.numel() for part in parts]), strict=True):
            part.copy_(total.view_as(part))
