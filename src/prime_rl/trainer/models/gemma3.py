"""Gemma 3 (text): the native decoder with sliding-window layers, four norms per layer and scaled embeddings."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from prime_rl.trainer.models.attention import AttentionBackend, count_positions
from prime_rl.trainer.models.causal_lm import (
    Attention,
    CausalLM,
    GatedMLP,
    RMSNorm,
    compute_rope_tables,
    rms_norm,
    rope_frequencies,
)
from prime_rl.trainer.models.decoder_config import DecoderConfig


class OffsetRMSNorm(RMSNorm):
    """x / rms(x) * (1 + weight) * scale, rounded to the data type of x once, at the end."""

    initial_weight: ClassVar[float] = 0.0

    def __init__(self, size: int, eps: float, scale: float = 1.0) -> None:
        super().__init__(size, eps)
        self.scale = scale

    def forward(self, x: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows size"]:
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        return rms_norm(wide, (1.0 + self.weight.to(wide.dtype)) * self.scale, self.eps).to(x.dtype)


class Gemma3MLP(GatedMLP):
    """Feed-forward with the tanh approximation of GELU as gate.

    Batch-invariant if the intermediate size is a multiple of 32, as in all published models: other sizes leave
    elements that `F.gelu` computes outside of vector instructions, with another rounding.
    """

    def forward(self, x: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens hidden"]:
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class Gemma3Layer(nn.Module):
    """Attention and feed-forward, each with a norm before and after, on the residual stream."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.self_attn.q_norm = OffsetRMSNorm(config.head_dim, config.rms_norm_eps, config.query_scale)
        self.self_attn.k_norm = OffsetRMSNorm(config.head_dim, config.rms_norm_eps)
        self.mlp = Gemma3MLP(config)
        self.input_layernorm = OffsetRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = OffsetRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_feedforward_layernorm = OffsetRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = OffsetRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: Float[Tensor, "tokens hidden"], cos: Tensor, sin: Tensor, attend: AttentionBackend
    ) -> Float[Tensor, "tokens hidden"]:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), cos, sin, attend))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Gemma3LM(CausalLM):
    """Gemma 3; the embedded engine runs its forward pass as it is, without fused kernels and CUDA graphs."""

    layer_class: ClassVar[type[nn.Module]] = Gemma3Layer
    norm_class: ClassVar[type[RMSNorm]] = OffsetRMSNorm

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self._local_rope: tuple[Tensor, Tensor] | None = None

    def forward(
        self, input_ids: Int[Tensor, " tokens"], positions: Int[Tensor, " tokens"], attend: AttentionBackend
    ) -> Float[Tensor, "tokens hidden"]:
        x = self.model.embed_tokens(input_ids)
        x = x * torch.tensor(self.config.hidden_size**0.5).to(x.dtype).item()  # rounded, as in training of Gemma
        length, device = count_positions(positions, attend), positions.device
        tables = (self.rope(length, device), self.local_rope(length, device))
        whole, local = ([table[positions].to(x.dtype) for table in pair] for pair in tables)
        for number, layer in enumerate(self.model.layers):
            x = layer(x, *(local if number in self.config.sliding_layers else whole), attend)
        return self.model.norm(x)

    def local_rope(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """As `rope`, for layers with a sliding window."""
        held = self._local_rope  # several threads may run the model
        if held is None or held[0].shape[0] < length or held[0].device != device:
            local = replace(self.config, rope_theta=self.config.local_rope_theta, rope_scaling=None)
            held = self._local_rope = compute_rope_tables(rope_frequencies(local), length, device)
        return held
