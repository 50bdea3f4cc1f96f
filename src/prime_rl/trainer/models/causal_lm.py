"""The native decoder: Llama, Qwen2, Qwen3 and Qwen3-MoE over flat tokens, with Hugging Face names for every tensor.

A forward pass sees one flat row of tokens; how they attend (a training pack, a serving cache) is passed in as an
`Attend`. Trainer and embedded engine run this very code: what is served is what is trained.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from prime_rl.trainer.models.attention import Attend
from prime_rl.trainer.models.moe import SparseMLP, split_experts
from rollouts.training import native
from rollouts.training.linear import Linear

MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe", "nanochat")


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder, read from a Hugging Face `config.json`."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    initializer_range: float
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    dense_layers: frozenset[int] = frozenset()
    """Layers of a mixture of experts that have a plain feed-forward network."""
    logit_cap: float | None = None
    """Logits are c tanh(logits / c)."""

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> DecoderConfig:
        """Read a `config.json`; `ValueError` names what this decoder does not implement."""
        kind = config.get("model_type")
        if kind not in MODEL_TYPES:
            raise ValueError(
                f"model_type {kind!r} has no implementation of our own, only {', '.join(MODEL_TYPES)} have"
            )
        activation = "relu2" if kind == "nanochat" else "silu"
        if config.get("hidden_act", activation) != activation:
            raise ValueError(f"hidden_act {config['hidden_act']!r} is not supported, only {activation!r}")
        if config.get("use_sliding_window"):
            raise ValueError("use_sliding_window is not supported")
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type not in ("default", "llama3", "linear"):
            raise ValueError(f"rope type {rope_type!r} is not supported, only default, linear and llama3")
        heads = config["num_attention_heads"]
        bias = bool(config.get("attention_bias", False))
        return cls(
            model_type=kind,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_hidden_layers=config["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            rope_scaling=None if rope_type == "default" else dict(rope, rope_type=rope_type),
            max_position_embeddings=config.get("max_position_embeddings", 32768),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=kind == "qwen2" or bias,
            out_bias=kind != "qwen2" and bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=kind in ("qwen3", "qwen3_moe"),
            initializer_range=config.get("initializer_range", 0.02),
            logit_cap=config.get("final_logit_softcapping"),
            **(_read_experts(config) if kind == "qwen3_moe" else {}),
        )


def _read_experts(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of a mixture of experts; those that old files leave out have the defaults of transformers."""
    num_experts = config.get("num_experts") or config.get("num_local_experts") or 128
    every = config.get("decoder_sparse_step", 1)
    plain = set(config.get("mlp_only_layers") or ())
    dense = {i for i in range(config["num_hidden_layers"]) if i in plain or (i + 1) % every}
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": config.get("num_experts_per_tok", 8),
        "moe_intermediate_size": config.get("moe_intermediate_size", 768),
        "norm_topk_prob": bool(config.get("norm_topk_prob", False)),
        "dense_layers": frozenset(dense),
    }


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in fp32 at least (Zhang & Sennrich 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows size"]:
        return rms_norm(x, self.weight, self.eps)


def rms_norm(
    x: Float[Tensor, "*rows size"], weight: Float[Tensor, "*heads size"], eps: float
) -> Float[Tensor, "*rows size"]:
    """As `RMSNorm`."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return cast(Tensor, _RMSNorm.apply(x, weight, eps))  # type: ignore[no-untyped-call]
    return _norm(x, weight, eps)[0]


def _norm(
    x: Float[Tensor, "*rows size"], weight: Float[Tensor, "*heads size"], eps: float
) -> tuple[Float[Tensor, "*rows size"], Float[Tensor, "*rows 1"]]:
    """The norm, and 1 / rms(x) in fp32 at least."""
    if native.runs_here(x, weight):
        return native.rms_norm(x, weight, eps)
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype), scale


class _RMSNorm(torch.autograd.Function):
    """The same forwards; backwards in fewer passes over memory than one operation after the other needs.

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
        if native.runs_here(grads[0], x, weight):
            return *native.rms_norm_backward(grads[0], x, weight, scale), None
        unit = x.to(scale.dtype) * scale
        to_weight = (grads[0] * unit.to(x.dtype)).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        inner = (grads[0] * weight).to(scale.dtype)
        mean = (inner * unit).mean(-1, keepdim=True)
        return inner.sub_(unit.mul_(mean)).mul_(scale).to(x.dtype), to_weight, None


def rotate(
    x: Float[Tensor, "tokens heads dim"], cos: Float[Tensor, "tokens 1 dim"], sin: Float[Tensor, "tokens 1 dim"]
) -> Float[Tensor, "tokens heads dim"]:
    """Rotary position embedding in the half-split layout of Hugging Face checkpoints (RoFormer, 2104.09864)."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return cast(Tensor, _Rotation.apply(x, cos, sin))  # type: ignore[no-untyped-call]
    return _rotate(x, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, back: bool = False) -> Tensor:
    if native.runs_here(x, cos, sin):
        return native.rotate(x, cos, sin, back)
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * (-sin if back else sin)


class _Rotation(torch.autograd.Function):
    """A rotation, whose gradient is turned back: both halves of a head have the same angles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, sin, back=True), None, None


def swiglu(gate: Float[Tensor, "rows size"], up: Float[Tensor, "rows size"]) -> Float[Tensor, "rows size"]:
    """silu(gate) up (Shazeer 2020)."""
    if not native.runs_here(gate, up):
        return F.silu(gate) * up
    if torch.is_grad_enabled():
        return cast(Tensor, _SwiGLU.apply(gate, up))  # type: ignore[no-untyped-call]
    return native.swiglu(gate, up)


class _SwiGLU(torch.autograd.Function):
    """The same by kernels.   s = 1 / (1 + exp(-g)):   dg = dy u s (1 + g (1 - s)),   du = dy g s"""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return native.swiglu(gate, up)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:
        return native.swiglu_backward(grads[0], *ctx.saved_tensors)


def rope_frequencies(config: DecoderConfig) -> Float[Tensor, " half_dim"]:
    """Angular frequency of every rotary pair, after the scaling the checkpoint asks for."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    freq = 1.0 / (config.rope_theta**exponent)
    scaling = config.rope_scaling
    if scaling is None:
        return freq
    if scaling["rope_type"] == "linear":
        return freq / scaling["factor"]
    # Llama 3: long wavelengths are stretched by `factor`, short ones kept, those between are blended.
    wavelength = 2 * math.pi / freq
    old, low, high = (
        scaling["original_max_position_embeddings"],
        scaling["low_freq_factor"],
        scaling["high_freq_factor"],
    )
    blend = ((old / wavelength - low) / (high - low)).clamp(0, 1)
    return freq / scaling["factor"] * (1 - blend) + freq * blend


class Attention(nn.Module):
    """Grouped-query self-attention with rotary positions; Qwen3 normalises queries and keys per head."""

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

    def forward(
        self,
        x: Float[Tensor, "tokens hidden"],
        cos: Float[Tensor, "tokens 1 dim"],
        sin: Float[Tensor, "tokens 1 dim"],
        attend: Attend,
    ) -> Float[Tensor, "tokens hidden"]:
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        out = attend(self.layer, rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.o_proj(out.flatten(-2))


class MLP(nn.Module):
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
        self.mlp: nn.Module = SparseMLP(config) if sparse else MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: Float[Tensor, "tokens hidden"],
        cos: Float[Tensor, "tokens 1 dim"],
        sin: Float[Tensor, "tokens 1 dim"],
        attend: Attend,
    ) -> Float[Tensor, "tokens hidden"]:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers and final norm (the `model.` half of a checkpoint)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        # An explicit weight skips Embedding's own random filling, which on the meta device imports half a compiler.
        table = torch.empty(config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, _weight=table)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class CausalLM(nn.Module):
    """A decoder and its output head; `logits` is apart from `forward` so that it can be computed in chunks."""

    meets_in_attend: ClassVar[bool] = True
    """Tokens see each other in `attend` alone: which others are computed beside them makes no difference."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        # Losses and engine multiply by its weight themselves, in chunks, so it stays a plain layer.
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self._rope: tuple[Tensor, Tensor] | None = None

    def forward(
        self, input_ids: Int[Tensor, " tokens"], positions: Int[Tensor, " tokens"], attend: Attend
    ) -> Float[Tensor, "tokens hidden"]:
        x = self.model.embed_tokens(input_ids)
        cos, sin = (table[positions].to(x.dtype) for table in self.rope(int(positions.max()) + 1, positions.device))
        for layer in self.model.layers:
            x = layer(x, cos, sin, attend)
        return self.model.norm(x)

    def rope(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Tables of cos and sin for positions below `length`, as `[positions, 1, dim]` in fp32.

        A table, because the vectorised cos rounds differently from the scalar one that finishes a row: computed per
        call, the angle of a token would depend on how many tokens came with it.
        """
        if self._rope is None or self._rope[0].shape[0] < length or self._rope[0].device != device:
            size = -(-length // 1024) * 1024
            angles = torch.arange(size).float()[:, None] * rope_frequencies(self.config)
            angles = torch.cat((angles, angles), dim=-1)[:, None, :]
            self._rope = (angles.cos().to(device), angles.sin().to(device))
        return self._rope

    def layers(self) -> list[nn.Module]:
        """The blocks that follow each other, each of which can be sharded or recomputed by itself."""
        return list(self.model.layers)

    def checkpoint_tensors(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by the parameters' names, under the names that checkpoints give them; views, not copies."""
        return split_experts(held)

    def logits(self, hidden: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens vocab"]:
        return self.lm_head(hidden)

    def embedding(self) -> Tensor:
        """The table of token vectors, which tells device and number format of the model."""
        return self.model.embed_tokens.weight


def tensor_names(model: CausalLM) -> dict[str, Tensor]:
    """The tensors a checkpoint holds: every parameter once (a tied head is stored as the embedding only).

    They are the parameters' own memory: writing to them changes the model.
    """
    return model.checkpoint_tensors({name: p.detach() for name, p in model.named_parameters()})


@torch.no_grad()
def init_weights(model: CausalLM, seed: int) -> None:
    """Fill every parameter as a pure function of (config, seed, name), whatever the device or the order.

    Matrices are normal with the config's `initializer_range`, norms one, biases zero.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        values = torch.empty(parameter.shape, dtype=torch.float32)
        values.normal_(0.0, model.config.initializer_range, generator=generator)
        parameter.copy_(values)
