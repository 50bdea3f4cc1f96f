"""Expert parallelism: experts are split over ranks; tokens are dispatched to their experts and combined."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from prime_rl.trainer.models.moe import Experts
from prime_rl.trainer.parallel.collectives import all_to_all_rows
from prime_rl.trainer.parallel_dims import MeshAxisGroup


class ParallelExperts(Experts):
    """A shard of the experts.

    Ranks of `tp` have the same tokens; each computes its own experts and returns zeros for the rest, to be summed.
    Ranks of `ep` have different tokens, which are exchanged with the rank of their expert. Experts are numbered by tp
    rank, then by ep rank.
    """

    def __init__(self, part: Experts, tp: MeshAxisGroup, ep: MeshAxisGroup) -> None:
        nn.Module.__init__(self)
        self.gate_up_proj, self.down_proj = part.gate_up_proj, part.down_proj
        self.tp, self.ep = tp, ep

    def forward(self, x: Float[Tensor, "rows hidden"], counts: Int[Tensor, " experts"]) -> Float[Tensor, "rows hidden"]:
        """As `Experts`: rows sorted by expert, `counts` for all experts; zero rows for experts of other tp ranks."""
        before, own, after = (part.sum().item() for part in _split_at(counts, self.tp))
        rows = x[int(before) : int(before + own)]
        chosen = counts.chunk(self.tp.size)[self.tp.rank]
        out = self._exchange(rows, chosen) if self.ep.group is not None else super().forward(rows, chosen)
        return F.pad(out, (0, 0, int(before), int(after))) if self.tp.size > 1 else out

    def _exchange(self, rows: Tensor, counts: Tensor) -> Tensor:
        group, size = self.ep.group, self.ep.size
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(incoming, counts.contiguous(), group=group)
        send_counts, recv_counts = counts.view(size, -1).sum(1).tolist(), incoming.view(size, -1).sum(1).tolist()
        received = all_to_all_rows(rows, send_counts, recv_counts, group)
        expert = torch.arange(len(incoming) // size, device=rows.device).repeat(size).repeat_interleave(incoming)
        order = expert.argsort(stable=True)
        out = super().forward(received[order], incoming.view(size, -1).sum(0))
        back = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=rows.device))
        return all_to_all_rows(out[back], recv_counts, send_counts, group)


def _split_at(counts: Tensor, tp: MeshAxisGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Counts of the experts before this rank's, its own, and those after."""
    width = len(counts) // tp.size
    start, end = tp.rank * width, (tp.rank + 1) * width
    return counts[:start], counts[start:end], counts[end:]
