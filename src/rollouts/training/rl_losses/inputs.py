"""Inputs and outputs of losses: per-token streams; a sum with its count and metrics."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rollouts.training.rl_losses.stats import TokenStats

MIN_LOGPROB = -1e5
"""Lower bound of log-probs; its square is finite in fp32."""


def widen(values: Tensor) -> Tensor:
    """Convert half precision to fp32; return other tensors unchanged."""
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


@dataclass(frozen=True)
class LossInputs:
    """Per-token streams of one micro-batch; only `trainer_logprobs`, `entropy` and `student_table` have a gradient.

    `loss_mask` weights tokens (0: no loss). `sequence` is the index of each token's sequence, from 0; a sequence is
    never split over micro-batches. `num_sequences` bounds these indices (None: computed, which synchronizes a GPU).
    `has_teacher` is true where there are teacher log-probs (None: everywhere); elsewhere the teacher's terms are 0.
    `is_reference` is true on reference samples, whose teacher and student terms have weight 1 instead of the taus
    (None: nowhere). `student_table` and `teacher_table` are log-probs of the same outcomes, see `distill`.
    """

    trainer_logprobs: Float[Tensor, " tokens"]
    inference_logprobs: Float[Tensor, " tokens"]
    advantages: Float[Tensor, " tokens"]
    loss_mask: Float[Tensor, " tokens"]
    sequence: Int[Tensor, " tokens"]
    teacher_logprobs: Float[Tensor, " tokens"] | None = None
    entropy: Float[Tensor, " tokens"] | None = None
    num_sequences: int | None = None
    has_teacher: Bool[Tensor, " tokens"] | None = None
    is_reference: Bool[Tensor, " tokens"] | None = None
    student_table: Float[Tensor, "tokens outcomes"] | None = None
    teacher_table: Float[Tensor, "tokens outcomes"] | None = None
    has_tail: bool = False
    """Whether the last outcome of the tables is the sum of all other tokens."""
    old_logprobs: Float[Tensor, " tokens"] | None = None
    """Log-probs under the policy that ratios and their bounds refer to; None: `inference_logprobs`."""
    observation_logprobs: Float[Tensor, " observed"] | None = None
    """The trainer's log-probs of the tokens that the environment wrote after the first response of each sequence."""
    observation_sequence: Int[Tensor, " observed"] | None = None
    objectives: tuple[str | None, ...] | None = None
    """Name of each sequence's objective, None for that of the run; shorter than `num_sequences` if padded."""
    values: Float[Tensor, " tokens"] | None = None
    """The critic's values before each token, with a gradient."""
    old_values: Float[Tensor, " tokens"] | None = None
    """The values before the first update of the batch."""
    returns: Float[Tensor, " tokens"] | None = None
    """What the values are regressed to."""
    sample_ids: tuple[int, ...] = ()
    """`MicroBatch.sample_ids`: which samples of the batch these are."""

    def sanitized(self) -> LossInputs:
        """The streams in fp32 or better, with log-probs of at least `MIN_LOGPROB`."""
        streams = {f.name: widen(x) for f in fields(self) if isinstance(x := getattr(self, f.name), Tensor)}
        for name in ("trainer_logprobs", "inference_logprobs", "teacher_logprobs", "old_logprobs"):
            if name in streams:
                streams[name] = streams[name].clamp(min=MIN_LOGPROB)
        return replace(self, **streams)  # type: ignore[arg-type]

    @property
    def ratio_logprobs(self) -> Float[Tensor, " tokens"]:
        """Log-probs in the denominator of the importance ratio."""
        return self.inference_logprobs if self.old_logprobs is None else self.old_logprobs

    def select_sequences(self, chosen: Bool[Tensor, " sequences"]) -> LossInputs:
        """The streams of the tokens of some sequences, which keep their numbers."""
        tokens = chosen[self.sequence]
        index = {f.name: tokens for f in fields(self)}
        if self.observation_sequence is not None:
            index |= dict.fromkeys(("observation_logprobs", "observation_sequence"), chosen[self.observation_sequence])
        streams = {name: x[index[name]] for name in index if isinstance(x := getattr(self, name), Tensor)}
        return replace(self, **streams)  # type: ignore[arg-type]

    def zero_without_teacher(self, values: Float[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
        """The values, and 0 for tokens without teacher log-probs."""
        return values if self.has_teacher is None else torch.where(self.has_teacher, values, 0.0)

    def select_reference(
        self, is_reference: Float[Tensor, " tokens"], others: Float[Tensor, " tokens"]
    ) -> Float[Tensor, " tokens"]:
        """The first for tokens of reference samples, the second for all others."""
        return others if self.is_reference is None else torch.where(self.is_reference, is_reference, others)

    def per_sequence(self, values: Float[Tensor, " tokens"], how: str = "sum") -> Float[Tensor, " sequences"]:
        """`sum`, `amin` or `amax` of the values of each sequence."""
        num = self.num_sequences
        if num is None:
            num = int(self.sequence.max()) + 1 if len(self.sequence) else 0
        start = {"sum": 0.0, "amin": torch.inf, "amax": -torch.inf}[how]
        empty = torch.full((num,), start, dtype=values.dtype, device=values.device)
        return empty.scatter_reduce(0, self.sequence, values, how)

    def mean_per_sequence(self, values: Float[Tensor, " tokens"]) -> Float[Tensor, " sequences"]:
        """Unweighted mean over the loss tokens of each sequence; 0 for a sequence without loss tokens."""
        active = self.loss_mask > 0
        count = self.per_sequence(active.to(values.dtype)).clamp(min=1)
        return self.per_sequence(torch.where(active, values, 0.0)) / count


@dataclass(frozen=True)
class LossOutput:
    """The summed loss (divide by the global count), this part's count, and statistics over its loss tokens."""

    loss_sum: Float[Tensor, ""]
    count: Float[Tensor, ""]
    stats: TokenStats = field(default_factory=TokenStats)
    further: dict[str, Float[Tensor, ""]] = field(default_factory=dict)
    """Further sums, each divided by the global count of its unit (see `MicroBatch.count`)."""

    def add(self, part: LossOutput, part_unit: str, unit: str) -> LossOutput:
        """This output, whose sum averages over `unit`, plus one that averages over `part_unit`."""
        loss_sum, count, further = self.loss_sum, self.count, dict(self.further)
        own = part.further.items() if part_unit == unit else (*part.further.items(), (part_unit, part.loss_sum))
        for name, total in own:
            further[name] = further[name] + total if name in further else total
        if part_unit == unit:
            loss_sum, count = loss_sum + part.loss_sum, count + part.count
        self.stats.merge(part.stats)
        return LossOutput(loss_sum, count, self.stats, further)
