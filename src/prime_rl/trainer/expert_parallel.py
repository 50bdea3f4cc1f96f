"""Expert parallelism: experts live on different ranks, and tokens travel to the experts they chose and back."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from prime_rl.trainer.collectives import exchange_rows
from prime_rl.trainer.models.moe import Experts
from prime_rl.trainer.parallel_dims import Team


class PartExperts(Experts):
    """Some of the experts; the others are on other ranks.

    Ranks of `tp` pass the same tokens, and each answers for its own experts with zeros for the rest, to be added up.
    Ranks of `ep` pass tokens of their own, which travel to the rank that has the expert and back. Experts are numbered
    by tp rank, then by ep rank.
    """

    def __init__(self, part: Experts, tp: Team, ep: Team) -> None:
        nn.Module.__init__(self)
        self.gate_up_proj, self.down_proj = part.gate_up_proj, part.down_proj
        self.tp, self.ep = tp, ep

    def forward(self, x: Float[Tensor, "rows hidden"], counts: Int[Tensor, " experts"]) -> Float[Tensor, "rows hidden"]:
        """As `Experts`: rows sorted by expert, `counts` of all experts; zeros for rows of other tp ranks' experts."""
        before, own, after = (part.sum().item() for part in _split_at(counts, self.tp))
        rows = x[int(before) : int(before + own)]
        chosen = counts.chunk(self.tp.size)[self.tp.rank]
        out = self._exchange(rows, chosen) if self.ep.group is not None else super().forward(rows, chosen)
        return F.pad(out, (0, 0, int(before), int(after))) if self.tp.size > 1 else out

    def _exchange(self, rows: Tensor, counts: Tensor) -> Tensor:
        group, size = self.ep.group, self.ep.size
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts.contiguous(), group=group)
        sent, got = counts.view(size, -1).sum(1).tolist(), coming.view(size, -1).sum(1).tolist()
        arrived = exchange_rows(rows, sent, got, group)
        expert = torch.arange(len(coming) // size, device=rows.device).repeat(size).repeat_interleave(coming)
        order = expert.argsort(stable=True)
        out = super().forward(arrived[order], coming.view(size, -1).sum(0))
        back = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=rows.device))
        return exchange_rows(out[back], got, sent, group)


def _split_at(counts: Tensor, tp: Team) -> tuple[Tensor, Tensor, Tensor]:
    """Counts of the experts before this rank's, its own, and those after."""
    width = len(counts) // tp.size
    start, end = tp.rank * width, (tp.rank + 1) * width
    return counts[:start], counts[start:end], counts[end:]
