"""Losses of the training API: sums over tokens, of the trainer's log-probs and the tensors of a datum.

With log-prob l, the sampler's log-prob s (input `logprobs`), advantage A, ratio r = exp(l - s):

    cross_entropy          -sum w l
    importance_sampling    -sum r A
    ppo                    -sum min(r A, clip(r, low, high) A)                   Schulman et al. 2017, 1707.06347
    cispo                  -sum stop_gradient(clip(r, low, high)) A l            MiniMax 2025, 2506.13585
    dro                    -sum (A l - beta / 2 (l - s)^2)                       Richemond et al. 2024, 2405.19107
    gspo                   -sum min(q A, clip(q, low, high) A)                   Zheng et al. 2025, 2507.18071

where every token of a datum has the value q = exp(mean of l - s over its tokens with `sequence_ratio_mask`) and the
gradient of its own l (GSPO-token).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Inputs = Mapping[str, Tensor]
Config = Mapping[str, float]
CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
INPUTS: dict[str, tuple[str, ...]] = {
    name: ("logprobs", "advantages") for name in ("importance_sampling", "ppo", "cispo", "dro")
}
INPUTS["cross_entropy"] = ("weights",)
INPUTS["gspo"] = ("logprobs", "advantages", "sequence_ratio_mask")
"""Loss -> the tensors that it needs beside `target_tokens`, all of its shape."""

DEFAULTS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": CLIP,
    "cispo": CLIP,
    "dro": {"beta": 0.05},
    "gspo": {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
}
"""Loss -> the keys of its `loss_fn_config`, with their defaults."""


def _clip(ratio: Tensor, config: Config) -> Tensor:
    return ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])


def _ppo(logprobs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    return _clipped(torch.exp(logprobs - inputs["logprobs"]), inputs, config)


def _gspo(logprobs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    own = logprobs.detach()
    mean = (own - inputs["logprobs"])[inputs["sequence_ratio_mask"] != 0].mean()
    return _clipped(torch.exp(mean + logprobs - own), inputs, config)


def _clipped(ratio: Tensor, inputs: Inputs, config: Config) -> Tensor:
    return -torch.minimum(ratio * inputs["advantages"], _clip(ratio, config) * inputs["advantages"]).sum()


def _cispo(logprobs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    ratio = torch.exp(logprobs - inputs["logprobs"])
    return -(_clip(ratio, config).detach() * logprobs * inputs["advantages"]).sum()


def _dro(logprobs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    penalty = 0.5 * config["beta"] * (logprobs - inputs["logprobs"]) ** 2
    return -(logprobs * inputs["advantages"] - penalty).sum()


def _importance_sampling(logprobs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    return -(torch.exp(logprobs - inputs["logprobs"]) * inputs["advantages"]).sum()


def _cross_entropy(logprobs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    return -(logprobs * inputs["weights"]).sum()


LOSSES: dict[str, Callable[[Tensor, Inputs, Config], Tensor]] = {
    "cross_entropy": _cross_entropy,
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
    "gspo": _gspo,
}


def check_loss(name: str, config: Mapping[str, float | str]) -> dict[str, float]:
    """The complete configuration of a loss; `ValueError` for an unknown loss, key or value."""
    if name not in LOSSES:
        raise ValueError(f"loss_fn {name!r} is not supported by this server: use one of {', '.join(LOSSES)}")
    complete = dict(DEFAULTS[name])
    for key, value in config.items():
        if key not in complete:
            raise ValueError(f"loss_fn_config.{key} is not a key of {name}: it has {sorted(complete) or 'none'}")
        if isinstance(value, str):
            raise ValueError(f"loss_fn_config.{key} must be a number, got {value!r}")
        complete[key] = value
    return complete
