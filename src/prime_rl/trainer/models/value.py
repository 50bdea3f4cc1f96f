"""A critic: a value for every token, from the hidden states of the policy or of a backbone of its own."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Literal, TypeVar

from jaxtyping import Float, Int
from torch import Tensor, nn

from prime_rl.trainer.models.attention import AttentionBackend
from prime_rl.trainer.models.causal_lm import CausalLM

T = TypeVar("T")
Backbone = Literal["own", "shared", "detached"]
VALUE = "value"
"""Attribute of the policy model that holds its critic: parameters below it are trained and saved, never published."""


class ValueModel(nn.Module):
    """A linear head that starts at 0, on `backbone` or on the policy's hidden states; `detach` stops its gradient."""

    def __init__(self, hidden_size: int, backbone: CausalLM | None, *, detach: bool) -> None:
        super().__init__()
        self.head = nn.Linear(hidden_size, 1)
        self.backbone, self.detach = backbone, detach
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)

    def hidden_states(
        self,
        policy_hidden: Float[Tensor, "tokens hidden"],
        input_ids: Int[Tensor, " tokens"],
        positions: Int[Tensor, " tokens"],
        attend: AttentionBackend,
    ) -> Float[Tensor, "tokens hidden"]:
        """Inputs of the head for a pack and the policy's hidden states of it."""
        if self.backbone is not None:
            hidden: Tensor = self.backbone(input_ids, positions, attend)
            return hidden
        return policy_hidden.detach() if self.detach else policy_hidden

    def forward(self, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, " rows"]:
        values: Tensor = self.head(hidden).squeeze(-1)
        return values if values.dtype.itemsize >= 4 else values.float()


def add_critic(model: CausalLM, backbone: Backbone) -> ValueModel:
    """Attach a critic to `model`; with `backbone` "own" it starts as a copy of the model, without its output head."""
    own = None
    if backbone == "own":
        own = copy.deepcopy(model)
        if "lm_head" in own._modules:
            own._modules["lm_head"] = nn.Identity()  # the head of values replaces it
    like = next(model.parameters())
    critic = ValueModel(model.config.hidden_size, own, detach=backbone == "detached").to(like.device, like.dtype)
    model.add_module(VALUE, critic)
    return critic


def without_critic(named: Mapping[str, T]) -> dict[str, T]:
    """The entries of the policy itself, from parameters or modules by name."""
    return {name: item for name, item in named.items() if name != VALUE and not name.startswith(f"{VALUE}.")}
