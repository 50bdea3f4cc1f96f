"""Loss aggregation: per-token losses to a sum and a count of tokens or sequences."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from rollouts.training.objectives import LossAggregation
from rollouts.training.rl_losses.inputs import LossInputs

Aggregation = Literal["token", "sequence", "constant"]
_LOSS_AGGREGATIONS: dict[str, LossAggregation] = {
    "token": "token-mean",
    "sequence": "seq-mean-token-mean",
    "constant": "constant",
}


def normalize(
    per_token: Float[Tensor, " tokens"],
    inputs: LossInputs,
    loss_aggregation: LossAggregation,
    max_tokens: int | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Sum and count; their quotient over a whole step is the loss.

    token-mean           sum of m x                        count of tokens, sum of m
    seq-mean-token-mean  sum of w (sum m x) / (sum m)      count of sequences, sum of w
    seq-mean-token-sum   sum of m x                        the same
    constant             sum of m x / max_tokens           the same

    w, the weight of a sequence, is the maximum of its mask m: 1, or `reference_weight`; 0 without loss tokens.
    """
    mask = inputs.loss_mask
    # Masked by `where`, not by a product with 0: masked values may be infinite.
    weighted = torch.where(mask > 0, per_token, 0.0) * mask
    if loss_aggregation == "token-mean":
        return weighted.sum(), mask.sum()
    if loss_aggregation == "constant" and (max_tokens is None or max_tokens < 1):
        raise ValueError('loss_aggregation "constant" divides by max_tokens: set it to the longest response you allow')
    weight = inputs.per_sequence(mask, "amax").clamp(min=0)
    count = weight.sum()
    if loss_aggregation == "seq-mean-token-mean":
        divisor = torch.where(weight > 0, inputs.per_sequence(mask) / weight, 1.0)
        return (weighted / divisor[inputs.sequence]).sum(), count
    return weighted.sum() / (max_tokens if loss_aggregation == "constant" and max_tokens else 1), count


def aggregate_tokens(
    values: Float[Tensor, "batch seq"],
    loss_mask: Float[Tensor, "batch seq"],
    aggregation: Aggregation,
    max_tokens: int | None = None,
) -> Float[Tensor, ""]:
    """Scalar loss: mean over loss tokens, mean of sequence means, or sum / (batch max_tokens)."""
    flat = flatten_rows(values, loss_mask)
    total, count = normalize(flat.trainer_logprobs, flat, loss_aggregation_of(aggregation), max_tokens)
    return total / (as_divisor(count) if aggregation == "token" else len(values))


def as_divisor(count: Float[Tensor, ""]) -> Float[Tensor, ""]:
    """The count, which weights of tokens may make less than 1; 1 instead of 0, for a loss of 0 without loss tokens."""
    return torch.where(count > 0, count, 1.0)


def loss_aggregation_of(aggregation: Aggregation) -> LossAggregation:
    """The objective's name of an aggregation; `ValueError` for an unknown one."""
    if aggregation not in _LOSS_AGGREGATIONS:
        raise ValueError(f"aggregation {aggregation!r} is not one of {', '.join(get_args(Aggregation))}")
    return _LOSS_AGGREGATIONS[aggregation]


def flatten_rows(
    logprobs: Float[Tensor, "batch seq"],
    loss_mask: Float[Tensor, "batch seq"],
    inference_logprobs: Float[Tensor, "batch seq"] | None = None,
    advantages: Float[Tensor, "batch seq"] | None = None,
    reference: Float[Tensor, "batch seq"] | None = None,
    entropy: Float[Tensor, "batch seq"] | None = None,
) -> LossInputs:
    """Padded rows as the streams of one pack; the mask may be of integers or bools."""
    rows, width = loss_mask.shape
    flat = logprobs.flatten()
    return LossInputs(
        trainer_logprobs=flat,
        inference_logprobs=flat.detach() if inference_logprobs is None else inference_logprobs.flatten(),
        advantages=torch.zeros_like(flat) if advantages is None else advantages.flatten(),
        loss_mask=loss_mask.flatten().to(torch.promote_types(loss_mask.dtype, torch.float32)),
        sequence=torch.arange(rows, device=flat.device).repeat_interleave(width),
        teacher_logprobs=None if reference is None else reference.flatten(),
        entropy=None if entropy is None else entropy.flatten(),
        num_sequences=rows,
    )
