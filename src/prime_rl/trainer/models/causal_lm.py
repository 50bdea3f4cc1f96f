"""The native decoder: Llama, SmolLM3, Qwen2, Qwen3 and Qwen3-MoE on flat tokens, with Hugging Face tensor names.

The forward pass takes flat tokens; attention (a training pack or a KV cache) is passed as an `AttentionBackend`.
Trainer and embedded engine share this code.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from prime_rl.trainer.models.attention import AttentionBackend, count_positions, has_kernel_bits
from prime_rl.trainer.models.decoder_config import DecoderConfig
from prime_rl.trainer.models.moe import SparseMLP, split_experts
from rollouts.kernels.cpu import name_bf16_instructions, supports_rounded_queries
from rollouts.kernels.linear import Linear
from rollouts.kernels.select import Kernels, find_kernels
from rollouts.training.rl_losses.logprobs import cap_logits
from rollouts.training.tensor_files import copy_tensor


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in at least fp32 (Zhang & Sennrich 2019)."""

    initial_weight: ClassVar[float] = 1.0

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows size"]:
        return rms_norm(x, self.weight, self.eps)


def rms_norm(
    x: Float[Tensor, "*rows size"], weight: Float[Tensor, "*heads size"], eps: float
) -> Float[Tensor, "*rows size"]:
    """Functional `RMSNorm`."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return cast(Tensor, _RMSNorm.apply(x, weight, eps))  # type: ignore[no-untyped-call]
    return _norm(x, weight, eps)[0]


def _norm(
    x: Float[Tensor, "*rows size"], weight: Float[Tensor, "*heads size"], eps: float
) -> tuple[Float[Tensor, "*rows size"], Float[Tensor, "*rows 1"]]:
    """Normalized x, and 1 / rms(x) in at least fp32."""
    if (kernels := find_kernels(x, weight)) is not None:
        return kernels.rms_norm(x, weight, eps)
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype), scale


class _RMSNorm(torch.autograd.Function):
    """`_norm` with a fused backward pass.

    y = w u, u = s x, s = 1 / rms(x):   dx = s (w dy - u mean(u w dy)),   dw = sum(u dy)
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, scale = _norm(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        if (kernels := find_kernels(grads[0], x, weight)) is not None:
            return *kernels.rms_norm_backward(grads[0], x, weight, scale), None
        unit = x.to(scale.dtype) * scale
        grad_weight = (grads[0] * unit.to(x.dtype)).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        inner = (grads[0] * weight).to(scale.dtype)
        mean = (inner * unit).mean(-1, keepdim=True)
        return inner.sub_(unit.mul_(mean)).mul_(scale).to(x.dtype), grad_weight, None


def apply_rotary_emb(
    x: Float[Tensor, "tokens heads dim"], cos: Float[Tensor, "tokens 1 dim"], sin: Float[Tensor, "tokens 1 dim"]
) -> Float[Tensor, "tokens heads dim"]:
    """Rotary position embedding in the half-split layout of Hugging Face checkpoints (RoFormer, 2104.09864)."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return cast(Tensor, _RotaryEmbedding.apply(x, cos, sin))  # type: ignore[no-untyped-call]
    return _apply_rotary(x, cos, sin)


def _apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    if (kernels := find_kernels(x, cos, sin)) is not None:
        return kernels.rotate(x, cos, sin, inverse)
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * (-sin if inverse else sin)


class _RotaryEmbedding(torch.autograd.Function):
    """Rotary embedding; the gradient is rotated by the negative angles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _apply_rotary(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _apply_rotary(grads[0], cos, sin, inverse=True), None, None


def swiglu(gate: Float[Tensor, "rows size"], up: Float[Tensor, "rows size"]) -> Float[Tensor, "rows size"]:
    """silu(gate) up (Shazeer 2020)."""
    kernels = find_kernels(gate, up)
    if kernels is None:
        return F.silu(gate) * up
    if torch.is_grad_enabled():
        return cast(Tensor, _SwiGLU.apply(gate, up, kernels))  # type: ignore[no-untyped-call]
    return kernels.swiglu(gate, up)


class _SwiGLU(torch.autograd.Function):
    """SwiGLU with kernels.   s = 1 / (1 + exp(-g)):   dg = dy u s (1 + g (1 - s)),   du = dy g s"""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kernels: Kernels) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kernels = kernels
        return kernels.swiglu(gate, up)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None]:
        return *ctx.kernels.swiglu_backward(grads[0], *ctx.saved_tensors), None


def rope_frequencies(config: DecoderConfig) -> Float[Tensor, " half_dim"]:
    """Rotary frequencies, with the RoPE scaling of the config."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    freq = 1.0 / (config.rope_theta**exponent)
    scaling = config.rope_scaling
    if scaling is None:
        return freq
    if scaling["rope_type"] == "linear":
        return freq / scaling["factor"]
    # Llama 3: scale long wavelengths by `factor`, keep short ones, interpolate in between.
    wavelength = 2 * math.pi / freq
    old, low, high = (
        scaling["original_max_position_embeddings"],
        scaling["low_freq_factor"],
        scaling["high_freq_factor"],
    )
    blend = ((old / wavelength - low) / (high - low)).clamp(0, 1)
    return freq / scaling["factor"] * (1 - blend) + freq * blend


def compute_rope_tables(
    frequencies: Float[Tensor, " half_dim"], length: int, device: torch.device
) -> tuple[Float[Tensor, "positions 1 dim"], Float[Tensor, "positions 1 dim"]]:
    """Tables of cos and sin for at least `length` positions, in fp32."""
    size = -(-length // 1024) * 1024
    angles = torch.arange(size).float()[:, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    return angles.cos().to(device), angles.sin().to(device)


class Attention(nn.Module):
    """Grouped-query self-attention, rotated except in NoPE layers; Qwen3 normalizes queries and keys per head."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        width, kv_width = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.k_proj = Linear(config.hidden_size, kv_width, bias=config.qkv_bias)
        self.v_proj = Linear(config.hidden_size, kv_width, bias=config.qkv_bias)
        self.o_proj = Linear(width, config.hidden_size, bias=config.out_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.qk_norm = config.qk_norm
        self.has_rope, self.window = layer not in config.no_rope_layers, config.find_window(layer)

    def forward(
        self,
        x: Float[Tensor, "tokens hidden"],
        cos: Float[Tensor, "tokens 1 dim"],
        sin: Float[Tensor, "tokens 1 dim"],
        attend: AttentionBackend,
    ) -> Float[Tensor, "tokens hidden"]:
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.has_rope:
            q, k = apply_rotary_emb(q, cos, sin), apply_rotary_emb(k, cos, sin)
        return self.o_proj(attend(self.layer, q, k, v, self.window).flatten(-2))


class GatedMLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens hidden"]:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward, each on the residual stream."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        sparse = config.num_experts > 0 and layer not in config.dense_layers
        self.mlp: nn.Module = SparseMLP(config) if sparse else GatedMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: Float[Tensor, "tokens hidden"], cos: Tensor, sin: Tensor, attend: AttentionBackend
    ) -> Float[Tensor, "tokens hidden"]:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers and final norm (the `model.` half of a checkpoint)."""

    def __init__(self, config: DecoderConfig, layer_class: type[nn.Module], norm_class: type[RMSNorm]) -> None:
        super().__init__()
        # An explicit weight skips random initialization, which is slow to import on the meta device.
        table = torch.zeros(config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, _weight=table)
        self.layers = nn.ModuleList(layer_class(config, i) for i in range(config.num_hidden_layers))
        self.norm = norm_class(config.hidden_size, config.rms_norm_eps)


class CausalLM(nn.Module):
    """A decoder with output head; `forward` returns hidden states, so that `logits` can be computed in chunks."""

    mixes_tokens_only_in_attend: ClassVar[bool] = True
    """Whether tokens interact only in `attend`, so that the batch composition does not matter."""
    is_exact: ClassVar[bool] = True
    """Whether the result of a token has the same bits in every batch, with exact attention on a CPU."""
    recomputes: ClassVar[bool] = False
    """Whether the model runs on whole sequences only, so that an engine cannot cache keys."""
    max_positions: int | None = None
    """Length that no sequence may exceed, as positions are rows of a learned table; None without such a table."""
    float32_names: frozenset[str] = frozenset()
    """Parts of the names of tensors that stay in float32 in a narrow model, such as biases of routers."""
    own_config: dict[str, Any] | None = None
    """Contents of `config.json` for its weights, if it is only a part of the model that it was loaded from."""
    layer_class: ClassVar[type[nn.Module]] = DecoderLayer
    norm_class: ClassVar[type[RMSNorm]] = RMSNorm
    rounds_inputs = False
    """Whether exact mode rounds the inputs of products to bf16; see `round_inputs`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, self.layer_class, self.norm_class)
        # A plain layer: losses and engine read its weight and multiply in chunks.
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self._rope: tuple[Tensor, Tensor] | None = None

    def stays_float32(self, name: str) -> bool:
        """Whether a tensor is one of `float32_names`."""
        return any(part in name for part in self.float32_names)

    def forward(
        self, input_ids: Int[Tensor, " tokens"], positions: Int[Tensor, " tokens"], attend: AttentionBackend
    ) -> Float[Tensor, "tokens hidden"]:
        x = self.model.embed_tokens(input_ids)
        length = count_positions(positions, attend)
        cos, sin = (table[positions].to(x.dtype) for table in self.rope(length, positions.device))
        for layer in self.model.layers:
            x = layer(x, cos, sin, attend)
        return self.model.norm(x)

    def rope(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Tables of cos and sin for positions below `length`, as `[positions, 1, dim]` in fp32.

        Precomputed, because vectorized and scalar cos round differently: computed per call, the result would depend on
        the number of tokens.
        """
        held = self._rope  # several threads may run the model
        if held is None or held[0].shape[0] < length or held[0].device != device:
            held = self._rope = compute_rope_tables(rope_frequencies(self.config), length, device)
        return held

    def layers(self) -> list[nn.Module]:
        """The decoder layers, the units of sharding and activation checkpointing."""
        return list(self.model.layers)

    def checkpoint_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Map parameter names to checkpoint names; returns views, not copies."""
        return split_experts(tensors)

    def parse_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Checkpoint tensors by the names that `checkpoint_tensors` gives them; experts may be stacked."""
        return split_experts(tensors)

    @torch.no_grad()
    def copy_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy `tensors`, by the names of `tensor_names`, into the parameters, except for those on the meta device."""
        for name, tensor in tensor_names(self).items():
            if not tensor.is_meta:
                copy_tensor(tensors, name, tensor)

    def logits(self, hidden: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens vocab"]:
        """Logits with the cap of the config, as in losses."""
        return cap_logits(self.lm_head(hidden), self.config.logit_cap)

    def round_inputs(self, dtype: torch.dtype) -> None:
        """Choose the arithmetic of exact mode for weights in `dtype`, which may be stored in fp32.

        With bf16 instructions (AVX512_BF16, AMX), dense models in bf16 round the inputs of products to bf16, those of
        attention included; sums and all other operations are in fp32. Engine and trainer call the same kernels, so both
        have the same bits.
        """
        is_dense = type(self) is CausalLM and not self.config.num_experts and self.config.logit_cap is None
        is_narrow = dtype == torch.bfloat16 and self.embedding().is_cpu
        dim = self.config.head_dim
        rounds = is_dense and is_narrow and supports_rounded_queries(dim) and has_kernel_bits(dim)
        layer: Any
        for layer in self.modules():
            if hasattr(type(layer), "rounds_inputs"):
                layer.rounds_inputs = rounds

    @property
    def arithmetic(self) -> str:
        """The instructions on which the bits of exact mode depend; empty: sums are in fp32, the same on many CPUs."""
        return name_bf16_instructions() if self.rounds_inputs else ""

    def embedding(self) -> Tensor:
        """The token embedding matrix; its device and dtype are those of the model, unless an engine owns that."""
        return self.model.embed_tokens.weight


def tensor_names(model: CausalLM) -> dict[str, Tensor]:
    """Checkpoint tensors by name: every parameter once (a tied head only as the embedding).

    They share memory with the parameters.
    """
    return model.checkpoint_tensors({name: p.detach() for name, p in model.named_parameters()})


@torch.no_grad()
def init_weights(model: CausalLM, seed: int) -> None:
    """Initialize every parameter as a pure function of (config, seed, name), independent of device and order.

    Matrices are normal with the config's `initializer_range`, norms the identity, biases zero.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            parameter.fill_(0.0 if name.endswith("bias") else model.norm_class.initial_weight)
            continue
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        values = torch.empty(parameter.shape, dtype=torch.float32)
        values.normal_(0.0, model.config.initializer_range, generator=generator)
        parameter.copy_(values)
