"""Gradient reductions beyond FSDP: replicated parameters under tp and pp, and the global norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from prime_rl.trainer.parallel.tensor_parallel import is_partial
from prime_rl.trainer.parallel_dims import Mesh
from prime_rl.trainer.sharded_checkpoint import ShardMap, local_part
from rollouts.training.backends.ranks import Ranks


@dataclass(frozen=True)
class Gradients:
    """Gradients of the optimizer's parameters over all ranks of a mesh."""

    parameters: Mapping[str, Tensor]
    shard_map: ShardMap
    mesh: Mesh
    ranks: Ranks

    @torch.no_grad()
    def complete(self) -> None:
        """Sum partial gradients of replicated parameters."""
        if self.mesh.tp.size > 1:
            self._sum([name for name in self.parameters if is_partial(name)], self.mesh.tp.group)
        if self.mesh.ends is not None:
            self._sum([name for name in self.parameters if self._is_at_both_ends(name)], self.mesh.ends)

    def _is_at_both_ends(self, name: str) -> bool:
        """Whether another stage has this parameter too: a tied embedding, used by the first and the last stage."""
        stride = self.ranks.size // self.mesh.pp.size
        box = self.shard_map.local[name]
        return len({rank // stride for rank in self.shard_map.by_name[name][box]}) > 1

    def _sum(self, names: Sequence[str], group: dist.ProcessGroup | None) -> None:
        gradients = [self.parameters[name].grad for name in names]
        sum_tensors([local_part(gradient) for gradient in gradients if gradient is not None], group)

    @torch.no_grad()
    def compute_norm(self, _: Sequence[Tensor]) -> Tensor:
        """Global gradient norm; replicated elements count once."""
        gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        total = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        if gradients:
            norms = torch.stack(torch._foreach_norm([local_part(g) for g in gradients.values()])).double()
            copies = torch.tensor([self.shard_map.copies(name) for name in gradients], device=norms.device)
            total += (norms.square() / copies).sum().to(total.device)
        if self.ranks.size > 1:
            dist.all_reduce(total)
        return total.sqrt()


def sum_tensors(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """All-reduce tensors over `group` in place, in one message per data type."""
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        parts = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([part.flatten() for part in parts])
        dist.all_reduce(flat, group=group)
        for part, total in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
            part.copy_(total.view_as(part))
