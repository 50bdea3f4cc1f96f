"""Off-policy diagnostics of a step: importance ratios by staleness, and mismatch of log-probs by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from prime_rl.trainer.backend import WrappedLoss
from rollouts.training.rl_losses import LossInputs, LossOutput, TokenStats, compute_kl
from rollouts.training.types import Sample

MAX_STALENESS = 4
"""Tokens of this staleness and above are measured together."""

POSITIONS = (0, 16, 128, 1024)
"""First positions of the parts of a response, in loss tokens, whose mismatch is measured separately."""


@dataclass(frozen=True)
class TokenOrigin:
    """Of each loss token of a micro-batch: its staleness in versions (-1: unknown), and its place among the loss tokens
    of its sample."""

    staleness: Int[Tensor, " tokens"]
    position: Int[Tensor, " tokens"]


@dataclass(frozen=True)
class MeasuredLoss(WrappedLoss):
    """A loss with off-policy diagnostics of a batch that trains version `step - 1`."""

    samples: Sequence[Sample]
    step: int

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Loss and statistics of a micro-batch."""
        output = self.loss(inputs)
        origin = find_origin([self.samples[i] for i in inputs.sample_ids], self.step)
        output.stats.merge(measure_off_policy(inputs, origin))
        return output


@torch.no_grad()
def measure_off_policy(inputs: LossInputs, origin: TokenOrigin) -> TokenStats:
    """Ratios of trainer to sampler by staleness, mismatch by position, and where it begins in each sequence."""
    streams = inputs.sanitized()
    gap = streams.trainer_logprobs.detach() - streams.inference_logprobs
    staleness, position = (x.to(gap.device) for x in (origin.staleness, origin.position))
    ratio, mismatch, stats = gap.clamp(max=20).exp(), compute_kl(-gap), TokenStats()
    # What there is, is read from the origin, on the CPU: a GPU would have to finish the micro-batch first.
    for age in origin.staleness.unique().tolist():
        if age >= 0:
            name = f"importance_ratio/staleness_{age}{'_or_more' if age == MAX_STALENESS else ''}"
            stats.merge(TokenStats.measure({name: ratio}, staleness == age))
    num_places = int(origin.position.max()) + 1 if len(origin.position) else 0
    for first, after in zip(POSITIONS, (*POSITIONS[1:], None), strict=True):
        inside = (position >= first) if after is None else (position >= first) & (position < after)
        if first < num_places:  # a sample with later places has these, too
            stats.merge(TokenStats.measure({f"mismatch_kl/from_token_{first}": mismatch}, inside))
    unequal = torch.where(gap != 0, position.to(gap.dtype), torch.inf)
    first_places = streams.per_sequence(unequal, "amin")
    stats.merge(TokenStats.measure({"first_mismatch": first_places}, first_places.isfinite()))
    return stats


def find_origin(samples: Sequence[Sample], step: int) -> TokenOrigin:
    """The origin of the loss tokens of samples, in a batch that trains version `step - 1`."""
    parts = [_find_origin_of_one(sample, step - 1) for sample in samples]
    return TokenOrigin(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _find_origin_of_one(sample: Sample, trained_version: int) -> tuple[Tensor, Tensor]:
    staleness = torch.full((len(sample.tokens),), -1)
    ends = [start for start, _ in sample.versions[1:]] + [len(sample.tokens)]
    for (start, version), end in zip(sample.versions, ends, strict=False):
        staleness[start:end] = min(max(trained_version - version, 0), MAX_STALENESS)
    has_loss = torch.tensor(sample.loss_mask)[1:] > 0  # the first token has no log-prob
    chosen = staleness[1:][has_loss]
    return chosen, torch.arange(len(chosen))
