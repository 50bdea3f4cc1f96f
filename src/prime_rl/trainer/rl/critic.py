"""The critic of a step: advantages from the values before the first update, and the value loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from prime_rl.trainer.backend import Backend, WrappedLoss
from prime_rl.trainer.rl.config import CriticConfig
from rollouts.training.rl_losses import LossInputs, LossOutput, TokenStats
from rollouts.training.rl_losses.value import compute_gae, compute_value_losses, whiten

Streams = dict[str, Tensor]
"""Streams of `LossInputs` by name."""


@dataclass(frozen=True)
class CriticLoss(WrappedLoss):
    """A loss plus the value loss, which is a mean over tokens; it is 0 on reference samples."""

    config: CriticConfig

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Both losses of a micro-batch."""
        assert inputs.values is not None and inputs.old_values is not None and inputs.returns is not None
        output = self.loss(replace(inputs, values=None))
        losses, is_clipped = compute_value_losses(
            inputs.values, inputs.old_values, inputs.returns, self.config.value_clip
        )
        weights = zero_reference(inputs, inputs.loss_mask)
        total = self.config.coef * (weights * losses).sum()
        named = {
            "value_loss": losses,
            "values": inputs.values,
            "returns": inputs.returns,
            "is_value_clipped": is_clipped.to(losses.dtype),
        }
        output.stats.merge(TokenStats.measure(named, weights > 0))
        further = {**output.further, "token": output.further.get("token", 0.0) + total}
        return replace(output, further=further)


def compute_targets(
    backend: Backend, batch: Sequence[LossInputs], config: CriticConfig
) -> tuple[list[Streams], TokenStats]:
    """Advantages, returns and old values of every micro-batch, and their statistics (collective).

    The reward of a sequence is the advantage that its last sampled token has in the batch. Advantages are whitened over
    the loss tokens of the whole batch. Reference samples, which have no reward, keep advantages of 0 and do not count.
    """
    targets = [_estimate(inputs, config) for inputs in batch]
    sums = [0.0] * 5
    for inputs, streams in zip(batch, targets, strict=True):
        a, r = streams["advantages"].double(), streams["returns"].double()
        values = (torch.ones_like(a), a, a.square(), r, r.square())
        sums = [old + float(zero_reference(inputs, x).sum()) for old, x in zip(sums, values, strict=True)]
    count, *totals = backend.ranks.sum(sums if backend.mesh.is_reporting_rank else [0.0] * 5)
    if not count:
        return targets, TokenStats()
    for inputs, streams in zip(batch, targets, strict=True) if config.whiten else ():
        whitened = whiten(streams["advantages"], count, totals[0], totals[1])
        streams["advantages"] = zero_reference(inputs, whitened)
    # Advantages before whitening are returns minus values.
    unexplained, variance = (squares / count - (total / count) ** 2 for total, squares in (totals[:2], totals[2:]))
    explained = torch.tensor([variance - unexplained, max(variance, 0.0)], dtype=torch.float64)
    return targets, TokenStats(ratios={"explained_variance": explained})


def zero_reference(inputs: LossInputs, values: Float[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    """The values, and 0 for tokens of reference samples."""
    return inputs.select_reference(torch.zeros_like(values), values)


def _estimate(inputs: LossInputs, config: CriticConfig) -> Streams:
    """GAE of one micro-batch from the values before the first update."""
    assert inputs.values is not None
    values, sequence = inputs.values.tolist(), inputs.sequence.tolist()
    given = inputs.advantages.tolist()
    ends = [t + 1 == len(sequence) or sequence[t + 1] != sequence[t] for t in range(len(sequence))]
    rewards = [reward if is_end else 0.0 for reward, is_end in zip(given, ends, strict=True)]
    advantages, returns = compute_gae(rewards, values, sequence, config.gamma, config.gae_lambda)
    old = inputs.values
    own = zero_reference(inputs, old.new_tensor(advantages))
    return {"advantages": own, "returns": old.new_tensor(returns), "old_values": old}
