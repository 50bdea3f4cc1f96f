"""The nanochat GPT of October 2025, compatible with published checkpoints of that time.

Pre-norm blocks of rotary attention and relu^2 feed-forward without biases, parameterless RMSNorm, queries and keys
normalized after the rotation, separate embedding and head, logits capped softly at 15. How tokens attend is passed in
(`NanochatAttention`), so that training, the caching engine and servers of flat token rows all run this very code.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from rollouts.training.model_config import check_model_config
from rollouts.training.rl_losses.logprobs import cap_logits

LOGIT_CAP = 15.0
ROPE_BASE = 10000.0
HEAD_DIM = 128
ROPE_DTYPE = torch.bfloat16
"""Dtype of the rotary tables of published models."""


class NanochatAttention(Protocol):
    """Attention over tokens and past; leading dimensions are those of the tokens."""

    def __call__(
        self,
        layer: int,
        q: Float[Tensor, "*tokens heads dim"],
        k: Float[Tensor, "*tokens kv_heads dim"],
        v: Float[Tensor, "*tokens kv_heads dim"],
    ) -> Float[Tensor, "*tokens heads dim"]: ...


class Cache(Protocol):
    """KV cache: positions of the next tokens and their attention to earlier ones."""

    def positions(self, num_tokens: int) -> Int[Tensor, "#batch tokens"]: ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...

    def advance(self, num_tokens: int) -> None: ...


@dataclass(frozen=True)
class GPTConfig:
    """Model configuration, with the field names of checkpoints."""

    sequence_len: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 6
    n_kv_head: int = 6
    n_embd: int = 768

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head or self.n_head % self.n_kv_head:
            raise ValueError(
                f"n_embd {self.n_embd} must be a multiple of n_head {self.n_head}, that of n_kv_head {self.n_kv_head}"
            )

    @classmethod
    def of_depth(cls, depth: int, vocab_size: int = 65536, sequence_len: int = 2048) -> GPTConfig:
        """Configuration by depth, the family's only size parameter: width 64 per layer, head size 128."""
        width = 64 * depth
        heads = max(1, math.ceil(width / HEAD_DIM))
        return cls(sequence_len, vocab_size, depth, heads, heads, width)

    @classmethod
    def from_meta(cls, model_config: dict[str, Any]) -> GPTConfig:
        """From a checkpoint's `model_config`; `ValueError` for later architectures."""
        if unknown := sorted(set(model_config) - set(cls.__dataclass_fields__)):
            raise ValueError(
                f"model_config has {', '.join(unknown)}, so the checkpoint is of a later nanochat: only the seed-era "
                "architecture (2025) is implemented"
            )
        check_model_config(model_config, "model_config")
        return cls(**model_config)

    def to_meta(self) -> dict[str, int]:
        """The inverse of `from_meta`."""
        return asdict(self)

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head


def norm(x: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows size"]:
    """x / rms(x), without parameters."""
    return F.rms_norm(x, (x.size(-1),))


def rotate(
    x: Float[Tensor, "*tokens heads dim"], cos: Float[Tensor, "*tokens 1 half"], sin: Float[Tensor, "*tokens 1 half"]
) -> Float[Tensor, "*tokens heads dim"]:
    """Rotary position embedding over the two halves of a head, by the negative angle (RoFormer, 2104.09864)."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos + right * sin, right * cos - left * sin), dim=-1).to(x.dtype)


class CausalSelfAttention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, config: GPTConfig, layer: int, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        kv_width = config.n_kv_head * config.head_dim
        self.c_q = linear(config.n_embd, config.n_embd, bias=False)
        self.c_k = linear(config.n_embd, kv_width, bias=False)
        self.c_v = linear(config.n_embd, kv_width, bias=False)
        self.c_proj = linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x: Float[Tensor, "*tokens width"], cos: Tensor, sin: Tensor, attend: NanochatAttention) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)) for layer in (self.c_q, self.c_k, self.c_v))
        y = attend(self.layer, norm(rotate(q, cos, sin)), norm(rotate(k, cos, sin)), v)
        return self.c_proj(y.flatten(-2))


class MLP(nn.Module):
    """Feed-forward with relu(x)^2 (Primer, 2109.08668)."""

    def __init__(self, config: GPTConfig, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.c_fc = linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.c_proj = linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x: Float[Tensor, "*tokens width"]) -> Float[Tensor, "*tokens width"]:
        return self.c_proj(F.relu(self.c_fc(x)).square())


class Block(nn.Module):
    """Attention and feed-forward, each on the residual stream."""

    def __init__(self, config: GPTConfig, layer: int, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.attn = CausalSelfAttention(config, layer, linear)
        self.mlp = MLP(config, linear)

    def forward(self, x: Float[Tensor, "*tokens width"], cos: Tensor, sin: Tensor, attend: NanochatAttention) -> Tensor:
        x = x + self.attn(norm(x), cos, sin, attend)
        return x + self.mlp(norm(x))


class GPT(nn.Module):
    """The model; `transformer.wte`, `transformer.h.N.{attn,mlp}` and `lm_head` are the names in checkpoints.

    `linear` makes the layers of the blocks; another class may compute the same products in another way.
    """

    def __init__(self, config: GPTConfig, linear: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                # Zeros skip the embedding's own initialization, which `init_weights` replaces.
                "wte": nn.Embedding(
                    config.vocab_size, config.n_embd, _weight=torch.zeros(config.vocab_size, config.n_embd)
                ),
                "h": nn.ModuleList(Block(config, layer, linear) for layer in range(config.n_layer)),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self._rope: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def init_weights(self, seed: int = 0) -> None:
        """Matrices N(0, min(1, sqrt(out/in)) / sqrt(in)), projections back to the stream and head 0, embedding N(0, 1).

        With zero projections every block begins as the identity, and the first logits are 0.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            rows, columns = parameter.shape
            if name == "lm_head.weight" or name.endswith("c_proj.weight"):
                parameter.zero_()
                continue
            std = 1.0 if "wte" in name else min(1.0, math.sqrt(rows / columns)) / math.sqrt(columns)
            parameter.copy_(torch.empty(rows, columns).normal_(0.0, std, generator=generator))

    def forward(
        self,
        idx: Int[Tensor, "batch tokens"],
        targets: Int[Tensor, "batch tokens"] | None = None,
        kv_cache: Cache | None = None,
        loss_reduction: str = "mean",
    ) -> Tensor:
        """Logits in float32 [batch, tokens, vocab]; with `targets` (-1: none) their cross-entropy instead.

        `loss_reduction` "none" gives one loss per token, flat, 0 where there is no target. `ValueError` for more than
        `max_length` tokens.
        """
        num_tokens = idx.shape[1]
        if kv_cache is None:
            if num_tokens > self.max_length:
                raise ValueError(f"a sequence has {num_tokens} tokens, the model reads at most {self.max_length}")
            x = self.hidden(idx, torch.arange(num_tokens, device=idx.device), causal_attention)
        else:
            x = self.hidden(idx, kv_cache.positions(num_tokens), kv_cache.attend)
            kv_cache.advance(num_tokens)
        logits = self.logits(x)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction=loss_reduction)

    def hidden(
        self, idx: Int[Tensor, "*tokens"], positions: Int[Tensor, "*tokens"], attend: NanochatAttention
    ) -> Float[Tensor, "*tokens width"]:
        """Final hidden states of tokens at `positions`, with attention `attend`."""
        cos, sin = (table[positions] for table in self.rope(idx.device))
        x = norm(self.transformer["wte"](idx))
        for block in self.blocks():
            x = block(x, cos, sin, attend)
        return norm(x)

    @property
    def max_length(self) -> int:
        """Maximum tokens of a sequence: as far as the rotary tables reach."""
        return 10 * self.config.sequence_len

    def blocks(self) -> list[nn.Module]:
        """The layers, in order."""
        return list(self.transformer["h"].children())

    def logits(self, x: Float[Tensor, "*tokens width"]) -> Float[Tensor, "*tokens vocab"]:
        """15 tanh(W x / 15), in float32 at least."""
        return cap_logits(self.lm_head(x), LOGIT_CAP)

    def rope(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Tables of cos and sin, [max_length, 1, head_dim / 2] in float32, rounded as the published ones."""
        if self._rope is None or self._rope[0].device != device:
            self._rope = build_rope(self.max_length, self.config.head_dim, device)
        return self._rope

    def get_device(self) -> torch.device:
        """Device of the parameters."""
        return self.lm_head.weight.device

    def estimate_flops(self) -> int:
        """Per token, forward and backward: 6 per parameter but those of the embedding, and 12 per attended entry."""
        c = self.config
        num_parameters = sum(p.numel() for name, p in self.named_parameters() if "wte" not in name)
        return 6 * num_parameters + 12 * c.n_layer * c.n_embd * c.sequence_len


def build_rope(length: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of position / 10000^(2i / head_dim) as [length, 1, head_dim / 2]."""
    frequency = ROPE_BASE ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequency)[:, None, :]
    return angles.cos().to(ROPE_DTYPE).float().to(device), angles.sin().to(ROPE_DTYPE).float().to(device)


def causal_attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention in each row of [batch, tokens, heads, dim]."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return y.transpose(1, 2)
