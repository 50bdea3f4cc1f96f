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

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn

from prime_rl.inference.embedded.cache import BLOCK
from prime_rl.inference.embedded.fused import FusedDecoder, FusedPlan, LayerWeights
from prime_rl.trainer.models.attention import Attend, min_rows
from prime_rl.trainer.models.causal_lm import MLP, CausalLM, DecoderLayer, RMSNorm, rms_norm, swiglu
from rollouts.training import native
from rollouts.training.linear import MIN_ROWS as ONEDNN_ROWS
from rollouts.training.linear import pack_weight, packed_linear, uses_onednn


class Changes(Protocol):
    """What adapters add to a product's output, in place; `parts` are (module, first column, end)."""

    def change(self, parts: Sequence[tuple[str, int, int]], x: Tensor, y: Tensor) -> None: ...

    def routed(self) -> AbstractContextManager[None]:
        """Within it the model's own modules are changed too."""


class Product:
    """One or several linear layers of the same input as one product."""

    def __init__(self, names: list[str], layers: list[nn.Linear], exact: bool, dtype: torch.dtype) -> None:
        ends = list(itertools.accumulate(layer.out_features for layer in layers))
        self.parts = list(zip(names, [0, *ends], ends, strict=False))
        weights = [layer.weight.detach() for layer in layers]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        self.bias = torch.cat(biases) if biases else None
        self.kernel = native.PackedWeight(weight.to(dtype)) if has_kernel(weight, exact) else None
        self.packed = pack_weight(weight) if self.kernel is None and can_pack(weight) else None
        self.weight = weight if self.kernel is None and self.packed is None else None

    def __call__(self, x: Float[Tensor, "rows inputs"], changes: Changes | None) -> Float[Tensor, "rows outputs"]:
        if self.kernel is not None:
            y = self.kernel(x, self.bias)
        elif self.packed is not None:
            y = packed_linear(x, self.packed, self.bias)
        else:
            y = F.linear(x, cast(Tensor, self.weight), self.bias)
        if changes is not None:
            changes.change(self.parts, x, y)
        return y


def has_kernel(weight: Tensor, exact: bool) -> bool:
    """Whether `native` multiplies with this weight: faster than oneDNN for few rows, in exact mode with equal bits."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or native.library() is None:
        return False
    return not exact or native.find_block(weight.shape[1]) is not None


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

    def __init__(self, layer: DecoderLayer, exact: bool, dtype: torch.dtype) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        name = f"model.layers.{attention.layer}"
        self.index, self.head_dim = attention.layer, attention.head_dim
        self.qkv = Product(
            [f"{name}.self_attn.{kind}_proj" for kind in "qkv"],
            [attention.q_proj, attention.k_proj, attention.v_proj],
            exact,
            dtype,
        )
        self.out = Product([f"{name}.self_attn.o_proj"], [attention.o_proj], exact, dtype)
        heads, kv_heads = (p.out_features // self.head_dim for p in (attention.q_proj, attention.k_proj))
        self.splits = (heads, kv_heads)
        self.qk_weight: Tensor | None = None
        self.qk_eps = 0.0
        if attention.qk_norm:
            sizes = ((attention.q_norm, heads), (attention.k_norm, kv_heads))
            self.qk_weight = torch.cat([norm.weight.detach().expand(n, -1) for norm, n in sizes])
            self.qk_eps = attention.q_norm.eps
        self.norms = (layer.input_layernorm, layer.post_attention_layernorm)
        self.mlp: nn.Module | None = None if type(mlp) is MLP else mlp
        if type(mlp) is MLP:
            joined = [f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"]
            self.gate_up = Product(joined, [mlp.gate_proj, mlp.up_proj], exact, dtype)
            self.down = Product([f"{name}.mlp.down_proj"], [mlp.down_proj], exact, dtype)

    def __call__(
        self,
        x: Float[Tensor, "rows hidden"],
        normed: Float[Tensor, "rows hidden"],
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        changes: Changes | None,
    ) -> tuple[Float[Tensor, "rows hidden"], Float[Tensor, "rows hidden"]]:
        """The residual stream after attention, and what the feed-forward adds to it; `normed` is `x`, normalised."""
        qkv = self.qkv(normed, changes).view(x.shape[0], -1, self.head_dim)
        attended = attend(self.index, *self._turn(qkv, cos, sin)).flatten(-2)
        x, normed = add_norm(self.out(attended, changes), x, self.norms[1])
        if self.mlp is not None:
            with nullcontext() if changes is None else changes.routed():
                return x, cast(Tensor, self.mlp(normed))
        return x, self.down(swiglu(*self.gate_up(normed, changes).chunk(2, dim=1)), changes)

    def _turn(
        self, qkv: Float[Tensor, "rows heads dim"], cos: Tensor, sin: Tensor
    ) -> tuple[Float[Tensor, "rows heads dim"], Float[Tensor, "rows kv_heads dim"], Float[Tensor, "rows kv_heads dim"]]:
        """Queries and keys, normalised and turned, and values."""
        heads, kv_heads = self.splits
        qk, v = qkv.split_with_sizes((heads + kv_heads, kv_heads), 1)
        if self.qk_weight is not None:
            qk = rms_norm(qk, self.qk_weight, self.qk_eps)
        q, k = turn(qk, cos, sin).split_with_sizes((heads, kv_heads), 1)
        return q, k, v


def add_norm(
    branch: Float[Tensor, "rows size"], x: Float[Tensor, "rows size"], norm: RMSNorm
) -> tuple[Float[Tensor, "rows size"], Float[Tensor, "rows size"]]:
    """The residual stream with what a branch adds, in the branch's memory, and its norm."""
    if native.runs_here(branch, x, norm.weight):
        return branch, native.rms_norm(branch, norm.weight, norm.eps, added=x)[0]
    x = branch.add_(x)
    return x, normalise(x, norm)


def normalise(x: Float[Tensor, "rows size"], norm: RMSNorm) -> Float[Tensor, "rows size"]:
    """The norm; without kernels in fp32 by torch's own composition, which performs the same operations."""
    if native.library() is None and x.dtype == torch.float32 and x.is_cpu:
        return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.eps)
    return cast(Tensor, norm(x))


def turn(
    x: Float[Tensor, "rows heads dim"], cos: Float[Tensor, "rows 1 dim"], sin: Float[Tensor, "rows 1 dim"]
) -> Float[Tensor, "rows heads dim"]:
    """`causal_lm.rotate`, with the sign in the table (`signed_sin`) instead of in a copy."""
    if native.runs_here(x, cos, sin):
        return native.rotate(x, cos, sin)
    left, right = x.chunk(2, dim=-1)
    return (x * cos).add_(torch.cat((right, left), dim=-1).mul_(sin))


def signed_sin(sin: Float[Tensor, "length 1 dim"]) -> Float[Tensor, "length 1 dim"]:
    """The first half negated: (-right) * sin and right * (-sin) are the same number."""
    left, right = sin.chunk(2, dim=-1)
    return torch.cat((-left, right), dim=-1)


def build_fused(model: CausalLM, layers: Sequence[Layer], head: Product) -> FusedDecoder | None:
    """A step of decoding as one kernel, where there is one for all that this model consists of."""
    held: list[LayerWeights] = []
    for layer in layers:
        products = [layer.qkv, layer.out, layer.gate_up, layer.down] if layer.mlp is None else []
        kernels = [product.kernel for product in products if product.kernel is not None]
        if len(kernels) < 4:
            return None
        norms = (layer.norms[0].weight, layer.qk_weight, layer.norms[1].weight)
        held.append(LayerWeights(norms, kernels, [product.bias for product in products]))
    takes = BLOCK == native.KEYS and native.takes_heads(model.config.head_dim)
    if head.kernel is None or model.config.logit_cap is not None or not takes:
        return None
    return FusedDecoder(model, held, head.kernel)


class Runner:
    """A model as the engine runs it; `refresh` after every change of its weights.

    These are rounded to `dtype`, in which kernels keep them, and may be held in a wider format.
    """

    def __init__(self, model: CausalLM, exact: bool, dtype: torch.dtype) -> None:
        self.model, self.exact, self.dtype = model, exact, dtype
        weight = model.embedding()
        # What this room does not know how to lay out runs as the model writes it down.
        self.own = type(model) is not CausalLM
        self.min_rows = min_forward_rows(weight)
        self._rope: dict[torch.dtype, tuple[Tensor, Tensor]] = {}
        self.fused: FusedDecoder | None = None
        self.refresh()

    def refresh(self) -> None:
        """Lay the model's weights out anew."""
        if self.own:
            self.layers, self.next_norms, self.head = [], [], None
            return
        self.layers = [Layer(cast(DecoderLayer, layer), self.exact, self.dtype) for layer in self.model.model.layers]
        self.next_norms = [*(layer.norms[0] for layer in self.layers[1:]), self.model.model.norm]
        self.head = Product(["lm_head"], [self.model.lm_head], self.exact, self.dtype)
        self.fused = build_fused(self.model, self.layers, self.head)

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
        cos, sin = (table[positions] for table in self._tables(length, x.dtype, x.device))
        normed = normalise(x, self.layers[0].norms[0])
        for layer, norm in zip(self.layers, self.next_norms, strict=True):
            x, added = layer(x, normed, cos, sin, attend, changes)
            x, normed = add_norm(added, x, norm)
        return normed

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

    def decode(
        self, plan: FusedPlan, tokens: Int[Tensor, " rows"], positions: NDArray[np.int64]
    ) -> Float[Tensor, "rows vocab"]:
        """Scores of the token after each of `tokens`, by one kernel."""
        assert self.fused is not None
        return self.fused(
            plan, tokens, positions, *self._tables(int(positions.max()) + 1, torch.float32, tokens.device)
        )

    def _tables(self, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        held = self._rope.get(dtype)
        if held is None or held[0].shape[0] < length:
            cos, sin = self.model.rope(length, device)
            held = self._rope[dtype] = (cos.to(dtype), signed_sin(sin.to(dtype)))
        return held
