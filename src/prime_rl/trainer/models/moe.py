"""Mixture of experts as in Qwen3-MoE: a router picks a few feed-forward networks for every token.

Weights of all experts are one tensor per matrix, because a GPU multiplies them in one kernel; checkpoints list them
one by one (`experts.3.gate_proj.weight`), which `split_experts` translates.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from prime_rl.trainer.models.attention import min_rows
from rollouts.training.linear import Linear, linear

if TYPE_CHECKING:
    from prime_rl.trainer.models.causal_lm import DecoderConfig

GATE_UP, DOWN = ".experts.gate_up_proj", ".experts.down_proj"


class Router(Linear):
    """Which experts a token goes to, and how much each counts: the largest of softmax(W x)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config.hidden_size, config.num_experts, bias=False)
        self.top_k = config.num_experts_per_tok
        self.normalise = config.norm_topk_prob

    def choose(
        self, x: Float[Tensor, "tokens hidden"]
    ) -> tuple[Float[Tensor, "tokens top_k"], Int[Tensor, "tokens top_k"]]:
        """Weights (which sum to 1 if the checkpoint was trained so) and indices of the chosen experts."""
        logits = self(x)
        wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        weights, chosen = torch.topk(torch.softmax(wide, dim=-1), self.top_k, dim=-1)
        if self.normalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), chosen


class Experts(nn.Module):
    """The feed-forward networks; `gate_up_proj[e]` holds the gate's rows, then the up projection's."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        experts, inner, hidden = config.num_experts, config.moe_intermediate_size, config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, inner))

    def forward(self, x: Float[Tensor, "rows hidden"], counts: Int[Tensor, " experts"]) -> Float[Tensor, "rows hidden"]:
        """The first counts[0] rows through expert 0, the next counts[1] through expert 1, and so on."""
        if x.is_cuda and x.dtype == torch.bfloat16 and len(x):
            ends = counts.cumsum(0).to(torch.int32)
            gate, up = F.grouped_mm(x, self.gate_up_proj.transpose(1, 2), offs=ends).chunk(2, dim=-1)
            return F.grouped_mm(F.silu(gate) * up, self.down_proj.transpose(1, 2), offs=ends)
        fewest = min_rows()
        outs: list[Tensor] = []
        for expert, rows in enumerate(x.split(counts.tolist())):
            if (count := len(rows)) or (expert == 0 and not len(x)):  # without any token gradients are zero, not none
                # An expert that few tokens chose gets rows of zeros besides: see attention.min_rows.
                enough = F.pad(rows, (0, 0, 0, max(fewest - count, 0)))
                gate, up = linear(enough, self.gate_up_proj[expert]).chunk(2, dim=-1)
                outs.append(linear(F.silu(gate) * up, self.down_proj[expert])[:count])
        return torch.cat(outs)


class SparseMLP(nn.Module):
    """sum over a token's chosen experts of weight_e * expert_e(x), in an order that does not depend on other tokens.

    `load` counts, where gradients will be asked for, how many tokens (of `counted`: unset, all) each expert was given.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        self.load: Int[Tensor, " experts"] | None = None
        self.counted: Bool[Tensor, " tokens"] | None = None

    def forward(self, x: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens hidden"]:
        weights, chosen = self.gate.choose(x)
        by_expert = chosen.flatten().argsort(stable=True)
        counts = self._count_chosen(chosen)
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:  # not recomputed in a backward pass
            self._count(counts if self.counted is None else self._count_chosen(chosen[self.counted]))
        changed = self.experts(x[by_expert // self.gate.top_k], counts)
        back = torch.empty_like(by_expert)
        back[by_expert] = torch.arange(len(by_expert), device=x.device)
        parts = changed[back].unflatten(0, (-1, self.gate.top_k))
        return functools.reduce(torch.add, ((parts * weights[..., None]).unbind(1)))

    def _count_chosen(self, chosen: Int[Tensor, "tokens top_k"]) -> Int[Tensor, " experts"]:
        return torch.bincount(chosen.flatten(), minlength=self.gate.out_features)

    def _count(self, counts: Int[Tensor, " experts"]) -> None:
        self.load = counts if self.load is None else self.load + counts


def take_expert_load(model: nn.Module) -> dict[str, list[float]]:
    """How many tokens each expert was given since the last call, by the name of its layer."""
    found: dict[str, list[float]] = {}
    for name, module in model.named_modules():
        if isinstance(module, SparseMLP) and module.load is not None:
            found[name], module.load = module.load.tolist(), None
    return found


@contextmanager
def counting(model: nn.Module, real: Bool[Tensor, " tokens"] | None) -> Iterator[None]:
    """Meanwhile count the load of these tokens only; the others keep ranks in step."""
    layers = [module for module in model.modules() if isinstance(module, SparseMLP)]
    for layer in layers:
        layer.counted = real
    yield
    for layer in layers:
        layer.counted = None


def compute_imbalance(loads: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """How unevenly experts are used, over the layers that `loads` names; empty for a model without experts.

    `router/max_violation`: max_e(load_e) / mean_e(load_e) - 1, how far the fullest expert is above an even share
    (2408.15664); `router/unused_experts`: share of the experts that no token chose.
    """
    if not loads:
        return {}
    violation = [max(load) * len(load) / sum(load) - 1 for load in loads.values()]
    unused = [sum(count == 0 for count in load) / len(load) for load in loads.values()]
    return {
        "router/max_violation/mean": sum(violation) / len(violation),
        "router/max_violation/max": max(violation),
        "router/unused_experts/mean": sum(unused) / len(unused),
        "router/unused_experts/max": max(unused),
    }


def split_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by their names in checkpoints: of every stacked matrix, views of each expert's own."""
    split: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(GATE_UP):
            for e, both in enumerate(tensor):
                prefix = f"{name.removesuffix('gate_up_proj')}{e}"
                split[f"{prefix}.gate_proj.weight"], split[f"{prefix}.up_proj.weight"] = both.chunk(2)
        elif name.endswith(DOWN):
            split |= {f"{name.removesuffix('down_proj')}{e}.down_proj.weight": one for e, one in enumerate(tensor)}
        else:
            split[name] = tensor
    return split
