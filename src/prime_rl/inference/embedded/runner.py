"""The decoder's forward pass with its weights laid out for inference: the same numbers by fewer, faster operations.

Queries, keys and values come from one product, gate and up from another, and oneDNN gets its weights in the layout it
likes. Joined and packed products have the bits of single ones, and everything else here computes row by row what
`causal_lm` writes down, so exact mode stays exact; the tests compare every bit. What this room does not know (experts,
adapters) runs through the model's own modules.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from prime_rl.trainer.models.attention import Attend, min_rows
from prime_rl.trainer.models.causal_lm import MLP, CausalLM, DecoderLayer, RMSNorm
from rollouts.training.linear import MIN_ROWS as ONEDNN_ROWS
from rollouts.training.linear import pack_weight, packed_linear, uses_onednn


class Changes(Protocol):
    """What adapters add to a product's output, in place; `parts` are (module, first column, end)."""

    def change(self, parts: Sequence[tuple[str, int, int]], x: Tensor, y: Tensor) -> None: ...

    def routed(self) -> AbstractContextManager[None]:
        """Within it the model's own modules are changed too."""


FEW_OPERATIONS = 2**20
"""Below so many multiplications oneDNN's call costs more than its arithmetic: 50 us against 10 of `F.linear`."""


class Product:
    """One or several linear layers of the same input as one product.

    What is small goes through `F.linear` where its other bits do not matter, that is in fast mode.
    """

    def __init__(self, names: list[str], layers: list[nn.Linear], exact: bool) -> None:
        ends = list(itertools.accumulate(layer.out_features for layer in layers))
        self.parts = list(zip(names, [0, *ends], ends, strict=False))
        weights = [layer.weight.detach() for layer in layers]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        self.bias = torch.cat(biases) if biases else None
        self.packed = pack_weight(weight) if can_pack(weight) else None
        self.most_rows = 0 if exact or weight.dtype != torch.float32 else FEW_OPERATIONS // weight.numel()
        self.weight = weight if self.packed is None or self.most_rows else None
        if self.weight is not None and len(layers) > 1:  # held once, joined: the layers look into it
            for layer, (_, start, end) in zip(layers, self.parts, strict=True):
                layer.weight.data = weight[start:end]

    def __call__(self, x: Float[Tensor, "rows inputs"], changes: Changes | None) -> Float[Tensor, "rows outputs"]:
        if self.packed is None or (self.weight is not None and x.shape[0] <= self.most_rows):
            y = F.linear(x, cast(Tensor, self.weight), self.bias)
        else:
            y = packed_linear(x, self.packed, self.bias)
        if changes is not None:
            changes.change(self.parts, x, y)
        return y


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN takes this weight; in bf16 a bias would be rounded at another place than in the trainer."""
    return uses_onednn(weight) or (
        weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and torch.backends.mkldnn.is_available()
    )


def min_forward_rows(weight: Tensor) -> int:
    """Fewest rows of a forward pass for which every row has the bits it has in the trainer."""
    return ONEDNN_ROWS if can_pack(weight) else min_rows()


class Layer:
    """One decoder layer, prepared."""

    def __init__(self, layer: DecoderLayer, exact: bool) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        name = f"model.layers.{attention.layer}"
        self.index, self.head_dim = attention.layer, attention.head_dim
        self.qkv = Product(
            [f"{name}.self_attn.{kind}_proj" for kind in "qkv"],
            [attention.q_proj, attention.k_proj, attention.v_proj],
            exact,
        )
        self.out = Product([f"{name}.self_attn.o_proj"], [attention.o_proj], exact)
        heads, kv_heads = (p.out_features // self.head_dim for p in (attention.q_proj, attention.k_proj))
        self.splits = (heads, kv_heads)
        self.qk_weight: Tensor | None = None
        if attention.qk_norm:
            sizes = ((attention.q_norm, heads), (attention.k_norm, kv_heads))
            self.qk_weight = torch.cat([norm.weight.detach().expand(n, -1) for norm, n in sizes])
            self.qk_eps = attention.q_norm.eps
        self.norms = (layer.input_layernorm, layer.post_attention_layernorm)
        self.mlp: nn.Module | None = None if type(mlp) is MLP else mlp
        if type(mlp) is MLP:
            joined = [f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"]
            self.gate_up = Product(joined, [mlp.gate_proj, mlp.up_proj], exact)
            self.down = Product([f"{name}.mlp.down_proj"], [mlp.down_proj], exact)

    def __call__(
        self, x: Float[Tensor, "rows hidden"], cos: Tensor, sin: Tensor, attend: Attend, changes: Changes | None
    ) -> Float[Tensor, "rows hidden"]:
        heads, kv_heads = self.splits
        qkv = self.qkv(normalise(x, self.norms[0]), changes).view(x.shape[0], -1, self.head_dim)
        qk, v = qkv.split_with_sizes((heads + kv_heads, kv_heads), 1)
        if self.qk_weight is not None:
            narrow = qk.dtype != torch.float32
            wide = qk.float() if narrow else qk
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.qk_eps)
            qk = self.qk_weight * (wide.to(qk.dtype) if narrow else wide)
        q, k = turn(qk, cos, sin).split_with_sizes((heads, kv_heads), 1)
        attended = attend(self.index, q, k, v)
        x = self.out(attended.flatten(-2), changes).add_(x)
        normed = normalise(x, self.norms[1])
        if self.mlp is not None:
            with nullcontext() if changes is None else changes.routed():
                return x + cast(Tensor, self.mlp(normed))
        gate, up = self.gate_up(normed, changes).chunk(2, dim=1)
        return self.down(F.silu(gate).mul_(up), changes).add_(x)


def normalise(x: Float[Tensor, "rows size"], norm: RMSNorm) -> Float[Tensor, "rows size"]:
    """The norm; in fp32 by torch's own composition, which performs the same operations."""
    if x.dtype == torch.float32 and x.device.type == "cpu":
        return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.eps)
    return cast(Tensor, norm(x))


def turn(
    x: Float[Tensor, "rows heads dim"], cos: Float[Tensor, "rows 1 dim"], sin: Float[Tensor, "rows 1 dim"]
) -> Float[Tensor, "rows heads dim"]:
    """`causal_lm.rotate`, with the sign in the table (`signed_sin`) instead of in a copy."""
    left, right = x.chunk(2, dim=-1)
    return (x * cos).add_(torch.cat((right, left), dim=-1).mul_(sin))


def signed_sin(sin: Float[Tensor, "length 1 dim"]) -> Float[Tensor, "length 1 dim"]:
    """The first half negated: (-right) * sin and right * (-sin) are the same number."""
    left, right = sin.chunk(2, dim=-1)
    return torch.cat((-left, right), dim=-1)


class Runner:
    """A model as the engine runs it; `refresh` after every change of its weights."""

    def __init__(self, model: CausalLM, exact: bool) -> None:
        self.model, self.exact = model, exact
        weight = model.embedding()
        # What this room does not know how to lay out runs as the model writes it down.
        self.own = type(model) is not CausalLM
        self.min_rows = min_forward_rows(weight)
        self._rope: tuple[Tensor, Tensor] | None = None
        self.refresh()

    def refresh(self) -> None:
        """Lay the model's weights out anew."""
        if self.own:
            self.layers, self.head = [], None
            return
        self.layers = [Layer(cast(DecoderLayer, layer), self.exact) for layer in self.model.model.layers]
        self.head = Product(["lm_head"], [self.model.lm_head], self.exact)

    def __call__(
        self,
        tokens: Int[Tensor, " rows"],
        positions: Int[Tensor, " rows"],
        attend: Attend,
        length: int,
        changes: Changes | None = None,
    ) -> Float[Tensor, "rows hidden"]:
        """Hidden states of `tokens`; all `positions` are below `length`."""
        if self.own:
            with nullcontext() if changes is None else changes.routed():
                return cast(Tensor, self.model(tokens, positions, attend))
        x = F.embedding(tokens, self.model.model.embed_tokens.weight)
        cos, sin = (table[positions] for table in self._tables(length, x))
        for layer in self.layers:
            x = layer(x, cos, sin, attend, changes)
        return normalise(x, self.model.model.norm)

    def logits(
        self, hidden: Float[Tensor, "rows hidden"], changes: Changes | None = None
    ) -> Float[Tensor, "rows vocab"]:
        """Scores of the next token; rows are repeated where a product needs more of them."""
        rows = hidden.shape[0]
        if rows < self.min_rows:
            hidden = torch.cat((hidden, hidden[-1:].expand(self.min_rows - rows, -1)))
        logits = self.model.logits(hidden) if self.head is None else self.head(hidden, None)
        if changes is not None:
            changes.change([("lm_head", 0, logits.shape[1])], hidden, logits)
        return logits[:rows]

    def _tables(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        if self._rope is None or self._rope[0].shape[0] < length:
            cos, sin = self.model.rope(length, like.device)
            self._rope = (cos.to(like.dtype), signed_sin(sin.to(like.dtype)))
        return self._rope
