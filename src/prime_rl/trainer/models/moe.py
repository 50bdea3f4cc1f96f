"""Mixture of experts as in Qwen3-MoE: top-k routing to feed-forward experts.

Expert weights are stacked into one tensor per matrix, for grouped matrix products on a GPU; checkpoints store them
individually (`experts.3.gate_proj.weight`), see `split_experts`.
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

from rollouts.kernels.linear import Linear, linear
from rollouts.training.numerics import min_rows, pad_rows

if TYPE_CHECKING:
    from prime_rl.trainer.models.decoder_config import DecoderConfig

GATE_UP, DOWN = ".experts.gate_up_proj", ".experts.down_proj"


class Router(Linear):
    """Top-k router: selects the largest of softmax(W x)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config.hidden_size, config.num_experts, bias=False)
        self.top_k = config.num_experts_per_tok
        self.norm_topk_prob = config.norm_topk_prob

    def choose(
        self, x: Float[Tensor, "tokens hidden"]
    ) -> tuple[Float[Tensor, "tokens top_k"], Int[Tensor, "tokens top_k"]]:
        """Weights (normalized with `norm_topk_prob`) and indices of the selected experts."""
        logits = self(x)
        wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        weights, chosen = torch.topk(torch.softmax(wide, dim=-1), self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), chosen


class Experts(nn.Module):
    """Stacked experts; `gate_up_proj[e]` has the rows of the gate, then those of the up projection."""

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
        outs: list[Tensor] = []
        for expert, rows in enumerate(x.split(counts.tolist())):
            if (count := len(rows)) or (expert == 0 and not len(x)):  # without tokens, gradients must be zero, not None
                gate, up = linear(pad_rows(rows, min_rows()), self.gate_up_proj[expert]).chunk(2, dim=-1)
                outs.append(linear(F.silu(gate) * up, self.down_proj[expert])[:count])
        return torch.cat(outs)


class SparseMLP(nn.Module):
    """Sum of weight_e * expert_e(x) over the selected experts, in an order independent of other tokens.

    With gradients enabled, `load` counts the tokens per expert (only those in `counted`, if set).
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
            self._count(counts if self.counted is None else self._count_chosen(chosen, self.counted))
        outputs = self.experts(x[by_expert // self.gate.top_k], counts)
        inverse = torch.empty_like(by_expert)
        inverse[by_expert] = torch.arange(len(by_expert), device=x.device)
        parts = outputs[inverse].unflatten(0, (-1, self.gate.top_k))
        return functools.reduce(torch.add, ((parts * weights[..., None]).unbind(1)))

    def _count_chosen(
        self, chosen: Int[Tensor, "tokens top_k"], counted: Bool[Tensor, " tokens"] | None = None
    ) -> Int[Tensor, " experts"]:
        """Tokens per expert; not by `bincount` and `chosen[counted]`, for which the CPU waits for a GPU."""
        ones = torch.ones_like(chosen) if counted is None else counted.to(chosen.dtype)[:, None].expand_as(chosen)
        return chosen.new_zeros(self.gate.out_features).scatter_add_(0, chosen.flatten(), ones.flatten())

    def _count(self, counts: Int[Tensor, " experts"]) -> None:
        self.load = counts if self.load is None else self.load + counts


def pop_expert_load(model: nn.Module) -> dict[str, list[float]]:
    """Return and reset the tokens per expert since the last call, by layer name."""
    loads: dict[str, list[float]] = {}
    for name, module in model.named_modules():
        if isinstance(module, SparseMLP) and module.load is not None:
            loads[name], module.load = module.load.tolist(), None
    return loads


@contextmanager
def record_expert_load(model: nn.Module, real: Bool[Tensor, " tokens"] | None) -> Iterator[None]:
    """Count the expert load of `real` tokens only, not of padding."""
    layers = [module for module in model.modules() if isinstance(module, SparseMLP)]
    for layer in layers:
        layer.counted = real
    yield
    for layer in layers:
        layer.counted = None


def compute_imbalance(loads: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Load imbalance metrics over the layers in `loads`; empty for a model without experts.

    `router/max_violation`: max_e(load_e) / mean_e(load_e) - 1 (2408.15664); `router/unused_experts`: fraction of
    experts without tokens.
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
    """Tensors by checkpoint names; stacked matrices are split into views per expert."""
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
