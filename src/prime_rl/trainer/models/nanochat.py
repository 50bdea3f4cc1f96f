"""Adapter from nanochat's GPT to the interface of the native decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from jaxtyping import Float, Int
from torch import Tensor, nn

from nanochat.gpt import GPT, LOGIT_CAP, ROPE_BASE, GPTConfig
from nanochat.hf_format import to_hf
from prime_rl.trainer.models.attention import AttentionBackend
from prime_rl.trainer.models.causal_lm import CausalLM
from prime_rl.trainer.models.decoder_config import DecoderConfig
from rollouts.kernels.linear import Linear


class NanochatLM(CausalLM):
    """nanochat's GPT; parameters have nanochat names, checkpoint files Hugging Face names."""

    gpt: GPT

    def __init__(self, config: DecoderConfig) -> None:
        nn.Module.__init__(self)
        self.config = config
        gpt = GPT(to_gpt_config(config), Linear)
        self.transformer, self.lm_head = gpt.transformer, gpt.lm_head
        hidden: dict[str, Any] = self.__dict__  # bypass module registration, which would name tensors twice
        hidden["gpt"] = gpt

    def forward(
        self, input_ids: Int[Tensor, " tokens"], positions: Int[Tensor, " tokens"], attend: AttentionBackend
    ) -> Float[Tensor, "tokens hidden"]:
        return self.gpt.hidden(input_ids, positions, attend)

    def layers(self) -> list[nn.Module]:
        """The transformer blocks."""
        return self.gpt.blocks()

    def embedding(self) -> Tensor:
        """The token embedding matrix."""
        return cast(Tensor, self.transformer["wte"].weight)

    def checkpoint_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Map parameter names to checkpoint names."""
        return to_hf(tensors)


def to_gpt_config(config: DecoderConfig) -> GPTConfig:
    """Convert to nanochat's config; `ValueError` for unsupported options."""
    fixed = (config.rope_theta, config.rope_scaling, config.logit_cap, config.intermediate_size)
    if fixed != (ROPE_BASE, None, LOGIT_CAP, 4 * config.hidden_size):
        raise ValueError(
            "rope_parameters, final_logit_softcapping or intermediate_size differ from the original nanochat, "
            "the only supported version"
        )
    return GPTConfig(
        config.max_position_embeddings,
        config.vocab_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.hidden_size,
    )
