"""Loss aggregation: per-token losses to a sum and a count of tokens or sequences."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from rollouts.training.objectives import Normalizer
from rollouts.training.rl_losses.inputs import LossInputs

Aggregation = Literal["token", "sequence", "constant"]
_NORMALIZERS: dict[str, Normalizer] = {"token": "tokens", "sequence": "sequences", "constant": "constant"}


def normalize(
    per_token: Float[Tensor, " tokens"], inputs: LossInputs, normaliser: Normalizer, max_tokens: int | None = None
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Sum and count; their quotient over a whole step is the loss.

    tokens      sum of m x                        count of tokens, sum of m
    sequences   sum of (sum m x) / (sum m)        count of sequences with loss
    sums        sum of m x                        count of sequences with loss
    constant    sum of m x / max_tokens           count of sequences with loss
    """
    mask = inputs.loss_mask
    # Masked by `where`, not by a product with 0: masked values may be infinite.
    weighted = torch.where(mask > 0, per_token, 0.0) * mask
    if normaliser == "tokens":
        return weighted.sum(), mask.sum()
    if normaliser == "constant" and (max_tokens is None or max_tokens < 1):
        raise ValueError('normaliser "constant" divides by max_tokens: set it to the longest response you allow')
    weight = inputs.per_sequence(mask)
    count = (weight > 0).to(mask.dtype).sum()
    if normaliser == "sequences":
        return (weighted / torch.where(weight > 0, weight, 1.0)[inputs.sequence]).sum(), count
    return weighted.sum() / (max_tokens if normaliser == "constant" and max_tokens else 1), count


def aggregate_tokens(
    values: Float[Tensor, "batch seq"],
    loss_mask: Float[Tensor, "batch seq"],
    aggregation: Aggregation,
    max_tokens: int | None = None,
) -> Float[Tensor, ""]:
    """Scalar loss: mean over loss tokens, mean of sequence means, or sum / (batch max_tokens)."""
    flat = flatten_rows(values, loss_mask)
    total, count = normalize(flat.trainer_logprobs, flat, normalizer_of(aggregation), max_tokens)
    return total / (count.clamp(min=1) if aggregation == "token" else len(values))


def normalizer_of(aggregation: Aggregation) -> Normalizer:
    """The normaliser of an aggregation; `ValueError` for an unknown one."""
    if aggregation not in _NORMALIZERS:
        raise ValueError(f"aggregation {aggregation!r} is not one of {', '.join(get_args(Aggregation))}")
    return _NORMALIZERS[aggregation]


def flatten_rows(
    logprobs: Float[Tensor, "batch seq"],
    loss_mask: Float[Tensor, "batch seq"],
    inference_logprobs: Float[Tensor, "batch seq"] | None = None,
    advantages: Float[Tensor, "batch seq"] | None = None,
    reference: Float[Tensor, "batch seq"] | None = None,
    entropy: Float[Tensor, "batch seq"] | None = None,
) -> LossInputs:
    """Padded rows as the streams of one pack."""
    rows, width = loss_mask.shape
    flat = logprobs.flatten()
    return LossInputs(
        trainer_logprobs=flat,
        inference_logprobs=flat.detach() if inference_logprobs is None else inference_logprobs.flatten(),
        advantages=torch.zeros_like(flat) if advantages is None else advantages.flatten(),
        loss_mask=loss_mask.flatten(),
        sequence=torch.arange(rows, device=flat.device).repeat_interleave(width),
        teacher_logprobs=None if reference is None else reference.flatten(),
        entropy=None if entropy is None else entropy.flatten(),
        num_sequences=rows,
    )
