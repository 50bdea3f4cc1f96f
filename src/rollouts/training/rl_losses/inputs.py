"""What losses take and give: per-token streams in, a sum with its count and its metrics out."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rollouts.training.rl_losses.stats import TokenStats


@dataclass(frozen=True)
class LossInputs:
    """Per-token streams of one micro-batch; only `trainer_logprobs`, `entropy` and `student_table` carry one.

    `loss_mask` weighs tokens (0: no loss). `sequence` numbers the sequence each token belongs to, from 0; a sequence
    is never split over micro-batches. `num_sequences` bounds these numbers (None: read off, which waits for a GPU).
    `taught` is true where a teacher has spoken (None: everywhere); elsewhere there is no term of one. `anchored` is
    true where the taus do not hold: there the teacher and the student weigh 1 (None: nowhere).
    `student_table` (with a gradient) and `teacher_table` are log-probs of the same outcomes, see `distill`.
    """

    trainer_logprobs: Float[Tensor, " tokens"]
    inference_logprobs: Float[Tensor, " tokens"]
    advantages: Float[Tensor, " tokens"]
    loss_mask: Float[Tensor, " tokens"]
    sequence: Int[Tensor, " tokens"]
    teacher_logprobs: Float[Tensor, " tokens"] | None = None
    entropy: Float[Tensor, " tokens"] | None = None
    num_sequences: int | None = None
    taught: Bool[Tensor, " tokens"] | None = None
    anchored: Bool[Tensor, " tokens"] | None = None
    student_table: Float[Tensor, "tokens outcomes"] | None = None
    teacher_table: Float[Tensor, "tokens outcomes"] | None = None
    has_tail: bool = False
    """Whether the last outcome of the tables is all other tokens together."""

    def where_taught(self, values: Float[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
        """The values, 0 where no teacher has spoken."""
        return values if self.taught is None else torch.where(self.taught, values, 0.0)

    def where_anchored(
        self, anchored: Float[Tensor, " tokens"], others: Float[Tensor, " tokens"]
    ) -> Float[Tensor, " tokens"]:
        """The first on tokens of anchors, the second on all others."""
        return others if self.anchored is None else torch.where(self.anchored, anchored, others)

    def per_sequence(self, values: Float[Tensor, " tokens"], how: str = "sum") -> Float[Tensor, " sequences"]:
        """`sum`, `amin` or `amax` of the values of each sequence."""
        num = self.num_sequences
        if num is None:
            num = int(self.sequence.max()) + 1 if len(self.sequence) else 0
        start = {"sum": 0.0, "amin": torch.inf, "amax": -torch.inf}[how]
        empty = torch.full((num,), start, dtype=values.dtype, device=values.device)
        return empty.scatter_reduce(0, self.sequence, values, how)

    def mean_per_sequence(self, values: Float[Tensor, " tokens"]) -> Float[Tensor, " sequences"]:
        """Mean over the loss tokens of each sequence, each counted once; 0 for a sequence without loss tokens."""
        active = self.loss_mask > 0
        count = self.per_sequence(active.to(values.dtype)).clamp(min=1)
        return self.per_sequence(torch.where(active, values, 0.0)) / count


@dataclass(frozen=True)
class LossOutput:
    """The summed loss (divide by the global count), this part's count, and statistics over its loss tokens."""

    loss_sum: Float[Tensor, ""]
    count: Float[Tensor, ""]
    stats: TokenStats = field(default_factory=TokenStats)
