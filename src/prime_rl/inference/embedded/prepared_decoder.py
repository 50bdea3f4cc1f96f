"""The decoder's forward pass with weights prepared for inference: the same results with fewer, faster operations.

QKV and gate/up projections are fused, and oneDNN weights are prepacked. Fused and packed products are bitwise equal to
separate ones, and all other operations compute the same as `causal_lm` row by row, so exact mode stays exact (tested
bitwise). MoE layers and adapters fall back to the model's own modules.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from prime_rl.inference.embedded.adapters import LoraRouting, RowChanges
from prime_rl.inference.embedded.attention import find_prefill_kernels
from prime_rl.inference.embedded.fused_decode import FusedDecoder, LayerWeights, Rope
from prime_rl.inference.embedded.kv_cache import BLOCK
from prime_rl.runtime.machine import return_freed_memory
from prime_rl.trainer.models.attention import AttentionBackend, has_kernel_bits
from prime_rl.trainer.models.causal_lm import (
    CausalLM,
    DecoderLayer,
    GatedMLP,
    RMSNorm,
    rms_norm,
    swiglu,
    tensor_names,
)
from rollouts.kernels import cpu as cpu_kernels
from rollouts.kernels import native
from rollouts.kernels.cpu import arithmetic_dtype
from rollouts.kernels.linear import multiply_wide, widens
from rollouts.kernels.onednn import pack_weight, packed_linear, uses_onednn
from rollouts.kernels.select import find_kernels, gpu_kernels
from rollouts.training.numerics import ONEDNN_MIN_ROWS, min_rows, repeat_last
from rollouts.training.rl_losses.logprobs import cap_logits
from rollouts.training.tensor_files import copy_tensor


class PackedLinear:
    """One or several linear layers with the same input as one product."""

    def __init__(
        self, names: list[str], layers: list[nn.Linear], exact: bool, dtype: torch.dtype, paired: bool = False
    ) -> None:
        ends = list(itertools.accumulate(layer.out_features for layer in layers))
        self.parts = list(zip(names, [0, *ends], ends, strict=False))
        self._layers, self._exact, self._dtype, self._paired = layers, exact, dtype, paired
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self.kernel: cpu_kernels.PackedWeight | None = None
        self.is_released = False
        """Whether the layers' weights exist in the kernel's layout only."""
        self.refresh({})

    def refresh(self, new: Mapping[str, Tensor], scratch: Tensor | None = None) -> None:
        """Repack the weights after an update, in the same memory except for weights that oneDNN packs.

        Those that the layers lack are taken from `new`; this needs `scratch_size` elements of the kernel's dtype.
        """
        biases = [layer.bias for layer in self._layers if layer.bias is not None]
        self.bias = concat(biases, self.bias) if biases else None
        if self.kernel is not None:
            self.kernel.update(self._join(new, scratch) if self.is_released else self._concat().to(self.kernel.dtype))
            return
        weight = self._concat()
        if has_kernel(weight, self._exact):
            quantized = self._dtype == torch.int8
            rounded = weight if quantized else weight.to(self._dtype)
            self.kernel = cpu_kernels.PackedWeight(
                rounded, paired=self._paired, rounded=not self._exact, quantized=quantized
            )
        self.packed = pack_weight(weight) if self.kernel is None and uses_onednn(weight) else None
        self.weight = weight if self.kernel is None and self.packed is None else None

    @property
    def weight_names(self) -> list[str]:
        """Names of the layers' weights."""
        return [f"{name}.weight" for name, _, _ in self.parts]

    def release(self, dtype: torch.dtype) -> None:
        """Drop the layers' weights if a kernel holds the same numbers (`unpack`); if it has quantized them, keep them
        in `dtype`."""
        if self.kernel is None:
            return
        quantized = self._dtype == torch.int8
        for layer in self._layers:
            kept = layer.weight.to(dtype) if quantized else torch.empty_like(layer.weight, device="meta")
            layer.weight = nn.Parameter(kept, requires_grad=False)
        self.is_released = not quantized

    def unpack(self) -> dict[str, Tensor]:
        """The layers' weights by name, from the kernel's layout."""
        assert self.kernel is not None
        whole = self.kernel.unpack()
        ends = [(start, end) for _, start, end in self.parts]
        return {name: whole[start:end] for name, (start, end) in zip(self.weight_names, ends, strict=True)}

    def _concat(self) -> Tensor:
        return concat([layer.weight for layer in self._layers], self.weight)

    @property
    def scratch_size(self) -> int:
        """Elements that `refresh` needs."""
        return self.kernel.outputs * self.kernel.inputs if self.kernel is not None and self.is_released else 0

    def _join(self, new: Mapping[str, Tensor], scratch: Tensor | None) -> Tensor:
        """As `_concat`, of weights in `new`, which may be mapped from a file, in the kernel's dtype."""
        assert self.kernel is not None and scratch is not None
        if len(self.parts) == 1 and new[self.weight_names[0]].dtype == self.kernel.dtype:
            return new[self.weight_names[0]]
        joined = scratch[: self.scratch_size].view(self.kernel.outputs, self.kernel.inputs)
        for name, (_, start, end) in zip(self.weight_names, self.parts, strict=True):
            copy_tensor(new, name, joined[start:end])
        return joined

    def __call__(
        self, x: Float[Tensor, "rows inputs"], changes: RowChanges | None, splits: bool = False
    ) -> Float[Tensor, "*parts rows outputs"]:
        """The product; with `splits` it may be in parts in fp32, for `add_norm`."""
        if splits and changes is None and self._is_wide(x) and (kernels := gpu_kernels()) is not None:
            assert self.weight is not None
            if kernels.supports_split(x, self.weight):
                return kernels.multiply_split(x, self.weight)
        if self.kernel is not None:
            y = self.kernel(x, self.bias)
        elif self.packed is not None:
            y = packed_linear(x, self.packed, self.bias)
        elif len(x) == 1 and self._is_wide(x) and (kernels := gpu_kernels()) is not None:
            y = kernels.multiply_row(x, self.weight)
        else:
            y = F.linear(x, cast(Tensor, self.weight), self.bias)
        if changes is not None:
            changes.change(self.parts, x, y)
        return y

    def _is_wide(self, x: Tensor) -> bool:
        """Whether sums may be in fp32 and in any order."""
        return not self._exact and self.bias is None and widens(x)


def concat(tensors: Sequence[Tensor], out: Tensor | None) -> Tensor:
    """Concatenate tensors, into `out` if given; a single tensor is returned as is."""
    parts = [tensor.detach() for tensor in tensors]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if out is None else torch.cat(parts, out=out)


def has_kernel(weight: Tensor, exact: bool) -> bool:
    """Whether the CPU kernels support this weight: faster than oneDNN for few rows, bitwise equal in exact mode."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or native.library() is None:
        return False
    return not exact or cpu_kernels.find_block(weight.shape[1]) is not None


def min_forward_rows(weight: Tensor) -> int:
    """Minimum rows of a forward pass for results bitwise equal to the trainer's."""
    return ONEDNN_MIN_ROWS if uses_onednn(weight) else min_rows()


class PreparedLayer:
    """One decoder layer with prepared weights."""

    def __init__(self, layer: DecoderLayer, exact: bool, dtype: torch.dtype) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        name = f"model.layers.{attention.layer}"
        self.index, self.head_dim = attention.layer, attention.head_dim
        self.fuse = fuses_norms(attention.q_proj.weight, exact)
        self.qkv = PackedLinear(
            [f"{name}.self_attn.{kind}_proj" for kind in "qkv"],
            [attention.q_proj, attention.k_proj, attention.v_proj],
            exact,
            dtype,
        )
        self.out = PackedLinear([f"{name}.self_attn.o_proj"], [attention.o_proj], exact, dtype)
        heads, kv_heads = (p.out_features // self.head_dim for p in (attention.q_proj, attention.k_proj))
        self.splits, self.has_rope = (heads, kv_heads), attention.has_rope
        self.qk_weight: Tensor | None = None
        self.qk_norms = (attention.q_norm, attention.k_norm) if attention.qk_norm else ()
        self.qk_eps = self.qk_norms[0].eps if self.qk_norms else 0.0
        self.norms = (layer.input_layernorm, layer.post_attention_layernorm)
        self.mlp: nn.Module | None = None if type(mlp) is GatedMLP else mlp
        if type(mlp) is GatedMLP:
            joined = [f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"]
            self.gate_up = PackedLinear(joined, [mlp.gate_proj, mlp.up_proj], exact, dtype, paired=True)
            self.down = PackedLinear([f"{name}.mlp.down_proj"], [mlp.down_proj], exact, dtype)
        self._join_norms()

    @property
    def products(self) -> list[PackedLinear]:
        """The layer's packed products."""
        return [self.qkv, self.out, self.gate_up, self.down] if self.mlp is None else [self.qkv, self.out]

    def refresh(self, new: Mapping[str, Tensor], scratch: Tensor) -> None:
        """Repack the weights after an update."""
        for product in self.products:
            product.refresh(new, scratch)
        self._join_norms()

    def _join_norms(self) -> None:
        """Concatenate the query and key norm weights for all heads."""
        if self.qk_norms:
            sizes = zip(self.qk_norms, self.splits, strict=True)
            self.qk_weight = concat([norm.weight.expand(heads, -1) for norm, heads in sizes], self.qk_weight)

    def __call__(
        self,
        x: Float[Tensor, "rows hidden"],
        normed: Float[Tensor, "rows hidden"],
        cos: Tensor,
        sin: Tensor,
        attend: AttentionBackend,
        changes: RowChanges | None,
    ) -> tuple[Float[Tensor, "rows hidden"], Float[Tensor, "rows hidden"]]:
        """Return the residual stream after attention and the feed-forward output; `normed` is `x`, normalized."""
        qkv = self.qkv(normed, changes).view(x.shape[0], -1, self.head_dim)
        attended = attend(self.index, *self._apply_rotary(qkv, cos, sin)).flatten(-2)
        x, normed = add_norm(self.out(attended, changes, splits=True), x, self.norms[1], self.fuse)
        if self.mlp is not None:
            with route(changes):
                return x, cast(Tensor, self.mlp(normed))
        if changes is None and (kernel := self.gate_up.kernel) is not None:
            return x, self.down(kernel(normed, self.gate_up.bias, gated=True), None)
        return x, self.down(swiglu(*self.gate_up(normed, changes).chunk(2, dim=1)), changes, splits=True)

    def _apply_rotary(
        self, qkv: Float[Tensor, "rows heads dim"], cos: Tensor, sin: Tensor
    ) -> tuple[Float[Tensor, "rows heads dim"], Float[Tensor, "rows kv_heads dim"], Float[Tensor, "rows kv_heads dim"]]:
        """Queries and keys, normalized and rotated if the layer does so, and values."""
        heads, kv_heads = self.splits
        qk, v = qkv.split_with_sizes((heads + kv_heads, kv_heads), 1)
        if self.fuse and find_kernels(qk, cos, sin) is not None and (kernels := gpu_kernels()) is not None:
            kernels.norm_and_rotate_(qk, self.qk_weight, self.qk_eps, *((cos, sin) if self.has_rope else (None, None)))
            q, k = qk.split_with_sizes((heads, kv_heads), 1)
            return q, k, v
        if self.qk_weight is not None:
            if self.fuse:
                qk = F.rms_norm(qk, (self.head_dim,), None, self.qk_eps) * self.qk_weight
            else:
                qk = rms_norm(qk, self.qk_weight, self.qk_eps)
        if self.has_rope:
            qk = apply_rotary(qk, cos, sin)
        q, k = qk.split_with_sizes((heads, kv_heads), 1)
        return q, k, v


def route(changes: RowChanges | None) -> AbstractContextManager[None]:
    """Context in which the model's own modules apply the changes."""
    return changes.routed() if isinstance(changes, LoraRouting) else nullcontext()


def add_norm(
    branch: Float[Tensor, "*parts rows size"], x: Float[Tensor, "rows size"], norm: RMSNorm, fuse: bool
) -> tuple[Float[Tensor, "rows size"], Float[Tensor, "rows size"]]:
    """Add a branch, or its parts, to the residual stream, in the memory of either; returns the sum and its norm."""
    if branch.dim() > x.dim():
        return x, gpu_kernels().rms_norm(x, norm.weight, norm.eps, added=branch)[0]
    if (kernels := find_kernels(branch, x, norm.weight, narrow=False)) is not None:
        return branch, kernels.rms_norm(branch, norm.weight, norm.eps, added=x)[0]
    x = branch.add_(x)
    return x, normalize(x, norm, fuse)


def fuses_norms(weight: Tensor, exact: bool) -> bool:
    """Whether to use torch's fused RMSNorm kernel: on a GPU in fast mode, since it rounds bf16 once, not twice."""
    return not exact and not weight.is_cpu


def normalize(x: Float[Tensor, "rows size"], norm: RMSNorm, fuse: bool) -> Float[Tensor, "rows size"]:
    """Apply the norm; without kernels in fp32 on a CPU by `F.rms_norm`, which performs the same operations."""
    if (fuse and find_kernels(x, norm.weight) is None) or (
        native.library() is None and x.dtype == torch.float32 and x.is_cpu
    ):
        return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.eps)
    return cast(Tensor, norm(x))


def apply_rotary(
    x: Float[Tensor, "rows heads dim"], cos: Float[Tensor, "rows 1 dim"], sin: Float[Tensor, "rows 1 dim"]
) -> Float[Tensor, "rows heads dim"]:
    """RoPE as `causal_lm.apply_rotary_emb`, with the sign in the table (`signed_sin`) instead of in a copy."""
    if (kernels := find_kernels(x, cos, sin, narrow=False)) is not None:
        return kernels.rotate(x, cos, sin)
    left, right = x.chunk(2, dim=-1)
    return (x * cos).add_(torch.cat((right, left), dim=-1).mul_(sin))


def signed_sin(sin: Float[Tensor, "length 1 dim"]) -> Float[Tensor, "length 1 dim"]:
    """Negate the first half: (-right) * sin equals right * (-sin) exactly."""
    left, right = sin.chunk(2, dim=-1)
    return torch.cat((-left, right), dim=-1)


def build_fused(
    model: CausalLM, layers: Sequence[PreparedLayer], head: PackedLinear, rope: Rope, dtype: torch.dtype, exact: bool
) -> FusedDecoder | None:
    """Build the fused decode step, with embedding and cache in `dtype`; None if the kernel does not support it.

    With `exact`, neither for heads whose attention has other bits in the kernel than in the trainer.
    """
    held: list[LayerWeights] = []
    for layer in layers:
        products = layer.products
        kernels = [product.kernel for product in products if product.kernel is not None]
        if len(kernels) < 4:
            return None
        norms = (layer.norms[0].weight, layer.qk_weight, layer.norms[1].weight)
        held.append(LayerWeights(norms, kernels, [product.bias for product in products], layer.has_rope))
    dim = model.config.head_dim
    takes = BLOCK == native.KEYS and (has_kernel_bits(dim) if exact else cpu_kernels.supports_head_dim(dim))
    if head.kernel is None or model.config.logit_cap is not None or not takes:
        return None
    if any(kernel.format != head.kernel.format for layer in held for kernel in layer.products):
        return None
    return FusedDecoder(model, held, head.kernel, rope, dtype)


class HeldTensors(Mapping[str, Tensor]):
    """Tensors of a model; a weight that only a kernel holds is unpacked when it is looked up."""

    def __init__(self, tensors: Mapping[str, Tensor], products: Sequence[PackedLinear]) -> None:
        self._tensors = tensors
        self._packed = {name: product for product in products if product.is_released for name in product.weight_names}
        self._last: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._packed:
            return self._tensors[name]
        if name not in self._last:
            self._last = self._packed[name].unpack()
        return self._last[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:  # the inherited one would unpack
        return name in self._tensors


class PreparedDecoder:
    """A model prepared for inference; call `refresh` after every weight update.

    Weights are rounded to `dtype`, the storage dtype of the kernels, and may be stored in a wider one; those of
    products to `weight_dtype` (int8: quantized) if it is given. With `owns_model`, the model loses the weights that
    kernels hold, and its embedding is rounded to `dtype`: it is of no use to others any more.
    """

    def __init__(
        self,
        model: CausalLM,
        exact: bool,
        dtype: torch.dtype,
        weight_dtype: torch.dtype | None = None,
        owns_model: bool = False,
    ) -> None:
        self.model, self.dtype = model, dtype
        self.device = model.embedding().device
        self.arithmetic = arithmetic_dtype(dtype, self.device)
        # Other model classes run their own forward pass.
        self.uses_model_forward = type(model) is not CausalLM
        releases = owns_model and not self.uses_model_forward
        if releases:  # its layers are converted one by one
            for module in (model.model.embed_tokens, model.model.norm, model.lm_head):
                module.to(self.arithmetic)
        else:
            model.to(self.arithmetic)
        model.round_inputs(dtype)
        self._exact = exact
        exact_sums = exact and not model.rounds_inputs  # rounded products have an order of sums of their own
        weight = model.embedding()
        self.min_rows = min_forward_rows(weight) if exact or weight.is_cpu else 1
        self.fuse = fuses_norms(weight, exact)
        self.prefill_kernels: Any = None
        """Kernels with which chunks of prompts are computed by FlashAttention; None: with their scores in memory."""
        if self.fuse and not model.recomputes:
            self.prefill_kernels = find_prefill_kernels(model.config, dtype, self.device)
        self._rope: dict[torch.dtype, tuple[Tensor, Tensor]] = {}
        self.fused: FusedDecoder | None = None
        self.layers: list[PreparedLayer] = []
        self._addresses: list[int] = []
        weight_dtype = weight_dtype or dtype
        self.head = PackedLinear(["lm_head"], [model.lm_head], exact_sums, weight_dtype)
        if self.uses_model_forward:
            return
        for layer in model.model.layers:
            layer.to(self.arithmetic)
            self.layers.append(PreparedLayer(cast(DecoderLayer, layer), exact_sums, weight_dtype))
            if releases:
                for product in self.layers[-1].products:
                    product.release(dtype)
                return_freed_memory()  # now, so that loading does not need the memory of two copies
        if releases and self.head.kernel is not None:
            self._release_ends(self.head)
        self.next_norms = [*(layer.norms[0] for layer in self.layers[1:]), model.model.norm]
        self._build_fused(self.head)

    @property
    def is_static(self) -> bool:
        """Whether a step's operations are data-independent: no custom model code, no MoE."""
        return not self.uses_model_forward and all(layer.mlp is None for layer in self.layers)

    def refresh(self, new: Mapping[str, Tensor]) -> None:
        """Repack the weights after an update; those that the model lacks are taken from `new`.

        Weights packed by neither oneDNN nor a kernel keep their memory.
        """
        size = max(product.scratch_size for product in self._products)
        scratch = torch.empty(size, dtype=self.dtype)  # one for all, since fresh memory costs page faults
        for layer in self.layers:
            layer.refresh(new, scratch)
        self.head.refresh(new, scratch)
        if self.layers:
            self._build_fused(self.head)

    def tensors(self) -> Mapping[str, Tensor]:
        """The model's tensors by the names of its checkpoint."""
        return HeldTensors(tensor_names(self.model), self._products)

    @property
    def _products(self) -> list[PackedLinear]:
        return [*(product for layer in self.layers for product in layer.products), self.head]

    def addresses(self, length: int) -> list[int]:
        """Addresses of all tensors that a step reads, for positions below `length`, except the cache."""
        return [*self._addresses, *(table.data_ptr() for table in self.rope(length, self.arithmetic))]

    def _release_ends(self, head: PackedLinear) -> None:
        """Keep the embedding in `dtype`, and an untied head in the kernel's layout."""
        table = nn.Parameter(self.model.embedding().to(self.dtype), requires_grad=False)
        self.model.model.embed_tokens.weight = table
        if self.model.config.tie_word_embeddings:
            self.model.lm_head.weight = table
        else:
            head.release(self.dtype)

    def _build_fused(self, head: PackedLinear) -> None:
        self.fused = build_fused(self.model, self.layers, head, self.rope, self.dtype, self._exact)
        joined = [t for layer in self.layers for p in layer.products for t in (p.weight, p.bias)]
        joined += [layer.qk_weight for layer in self.layers]
        self._addresses = [t.data_ptr() for t in (*self.model.parameters(), *joined) if t is not None]

    def __call__(
        self,
        tokens: Int[Tensor, " rows"],
        positions: Int[Tensor, " rows"],
        attend: AttentionBackend,
        length: int,
        changes: RowChanges | None = None,
    ) -> Float[Tensor, "rows hidden"]:
        """Compute hidden states of `tokens`; all `positions` are below `length`."""
        if self.uses_model_forward:
            with route(changes):
                return cast(Tensor, self.model(tokens, positions, attend))
        x = F.embedding(tokens, self.model.model.embed_tokens.weight).to(self.arithmetic)
        cos, sin = (table[positions] for table in self.rope(length, x.dtype))
        normed = normalize(x, self.layers[0].norms[0], self.fuse)
        for layer, norm in zip(self.layers, self.next_norms, strict=True):
            x, added = layer(x, normed, cos, sin, attend, changes)
            x, normed = add_norm(added, x, norm, self.fuse)
        return normed

    def logits(
        self,
        hidden: Float[Tensor, "rows hidden"],
        changes: RowChanges | None = None,
        out: Float[Tensor, "rows vocab"] | None = None,
    ) -> Float[Tensor, "rows vocab"]:
        """Compute next-token logits, in `out` if it is given; pads to the minimum number of rows."""
        rows = hidden.shape[0]
        hidden = repeat_last(hidden, self.min_rows)
        if self._has_wide_logits and (changes is None or not changes.changes_module("lm_head")):
            logits = multiply_wide(hidden, cast(Tensor, self.head.weight), out if rows == len(hidden) else None)
        else:
            logits = self.head(hidden, None)
        if changes is not None:
            changes.change([("lm_head", 0, logits.shape[1])], hidden, logits)
        logits = cap_logits(logits, self.model.config.logit_cap)
        return logits[:rows] if out is None or logits is out else out.copy_(logits[:rows])

    @property
    def logits_dtype(self) -> torch.dtype:
        """Data type of the logits without adapters."""
        return torch.float32 if self._has_wide_logits else self.arithmetic

    @property
    def _has_wide_logits(self) -> bool:
        return self.head.bias is None and widens(self.model.embedding())

    def rope(self, length: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Tables of cos and signed sin for positions below `length`."""
        held = self._rope.get(dtype)
        if held is None or held[0].shape[0] < length:
            cos, sin = self.model.rope(length, self.device)
            held = self._rope[dtype] = (cos.to(dtype), signed_sin(sin.to(dtype)))
        return held
