"""nanochat's GPT behind the face of the native decoder: trained and served here by the code of its own family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from jaxtyping import Float, Int
from torch import Tensor, nn

from nanochat.gpt import GPT, LOGIT_CAP, ROPE_BASE, GPTConfig
from nanochat.hf_format import to_hf
from prime_rl.trainer.models.attention import Attend
from prime_rl.trainer.models.causal_lm import CausalLM, DecoderConfig
from rollouts.training.linear import Linear


class NanochatLM(CausalLM):
    """Parameters have the names of nanochat's checkpoints; files have those of Hugging Face."""

    gpt: GPT

    def __init__(self, config: DecoderConfig) -> None:
        nn.Module.__init__(self)
        self.config = config
        gpt = GPT(to_gpt_config(config), Linear)
        self.transformer, self.lm_head = gpt.transformer, gpt.lm_head
        hidden: dict[str, Any] = self.__dict__  # past torch's registry, or every tensor would have two names
        hidden["gpt"] = gpt

    def forward(
        self, input_ids: Int[Tensor, " tokens"], positions: Int[Tensor, " tokens"], attend: Attend
    ) -> Float[Tensor, "tokens hidden"]:
        return self.gpt.hidden(input_ids, positions, attend)

    def logits(self, hidden: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens vocab"]:
        return self.gpt.logits(hidden)

    def layers(self) -> list[nn.Module]:
        """The blocks."""
        return self.gpt.blocks()

    def embedding(self) -> Tensor:
        """The table of token vectors."""
        return cast(Tensor, self.transformer["wte"].weight)

    def checkpoint_tensors(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors under the names of files."""
        return to_hf(held)


def to_gpt_config(config: DecoderConfig) -> GPTConfig:
    """The same shape in nanochat's words; `ValueError` for what its architecture does not have."""
    theirs = (config.rope_theta, config.rope_scaling, config.logit_cap, config.intermediate_size)
    if theirs != (ROPE_BASE, None, LOGIT_CAP, 4 * config.hidden_size):
        raise ValueError(
            "rope_parameters, final_logit_softcapping or intermediate_size are not those of the seed-era nanochat, "
            "which is the one that is implemented"
        )
    return GPTConfig(
        config.max_position_embeddings,
        config.vocab_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.hidden_size,
    )
