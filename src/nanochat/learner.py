"""Optimizer steps on scored samples, independent of micro-batch size and number of ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from msgspec import structs
from torch import Tensor

from nanochat.common import autocast
from nanochat.gpt import GPT, causal_attention
from rollouts.training.backends.ranks import Ranks
from rollouts.training.backends.step import OptimizerStep, StepReport
from rollouts.training.batching import pad_samples
from rollouts.training.rl_losses import LossInputs, LossOutput, PolicyLoss, TokenStats
from rollouts.training.sampling import keep_top_k
from rollouts.training.types import Sample


@dataclass(frozen=True)
class StepResult:
    """Result of a step: optimizer report, token statistics over all ranks, gradient norm by parameter."""

    report: StepReport
    stats: dict[str, float]
    num_tokens: int
    sync_s: float
    grad_norms: dict[str, float] = field(default_factory=dict)


class NanochatTrainer:
    """Data-parallel trainer with a replicated model. `top_k` must match the sampler's.

    A `loss` without a unit, such as `nll_loss`, is averaged over tokens.
    `micro_batch_size` bounds the samples of one pass on one rank. `reference` gives the log-probs that a KL term of the
    loss compares with.
    """

    def __init__(
        self,
        model: GPT,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[LossInputs], LossOutput],
        *,
        ranks: Ranks,
        micro_batch_size: int,
        top_k: int | None = None,
        dtype: torch.dtype = torch.float32,
        schedule: Callable[[int], float] | None = None,
        max_grad_norm: float | None = None,
        reference: GPT | None = None,
    ) -> None:
        self.model, self.loss, self.ranks = model, loss, ranks
        self.micro_batch_size, self.top_k, self.dtype, self.reference = micro_batch_size, top_k, dtype, reference
        self.stepper = OptimizerStep(optimizer, schedule=schedule, max_norm=max_grad_norm)

    def learn(self, samples: Sequence[Sample]) -> StepResult:
        """One step on all samples; every rank passes the same list."""
        usable, count = self._find_usable(samples)
        stats, loss = TokenStats(), self.loss
        teaches = [s for s in usable if loss.has_gradient(s)] if isinstance(loss, PolicyLoss) else usable
        # Longest first, round-robin: ranks and micro-batches get samples of similar length.
        mine = sorted(teaches, key=lambda s: -len(s.tokens))[self.ranks.rank :: self.ranks.size]
        for start in range(0, len(mine), self.micro_batch_size):
            stats.merge(self._backward(mine[start : start + self.micro_batch_size], count))
        began = time.perf_counter()
        self.ranks.sum_gradients(self.stepper.parameters)
        gathered = self.ranks.gather_bytes(stats.encode())
        sync_s = time.perf_counter() - began
        everything = TokenStats()
        for part in gathered:
            everything.merge(TokenStats.decode(part))
        everything.set_loss_count(count)
        norms = {n: float(p.grad.norm()) for n, p in self.model.named_parameters() if p.grad is not None}
        report = self.stepper.step() if teaches else self.stepper.skip("all rewards were equal", is_failure=False)
        return StepResult(report, everything.summary(), sum(len(s.tokens) for s in teaches), sync_s, norms)

    @torch.no_grad()
    def measure_loss(self, samples: Sequence[Sample]) -> float:
        """The current loss of these samples, per token or sequence as in a step, without an update."""
        usable, count = self._find_usable(samples)
        starts = range(0, len(usable), self.micro_batch_size)
        parts = [self._compute_loss(usable[i : i + self.micro_batch_size]) for i in starts]
        return sum(float(part.loss_sum) for part in parts) / max(1, count)

    def _find_usable(self, samples: Sequence[Sample]) -> tuple[list[Sample], int]:
        """The samples with loss, and the number of their sequences or tokens that the loss is averaged over."""
        usable = [s for s in samples if s.response_length]
        is_by_sequence = getattr(self.loss, "mean_over", "token") == "sequence"
        return usable, len(usable) if is_by_sequence else sum(s.response_length for s in usable)

    def _backward(self, samples: Sequence[Sample], count: float) -> TokenStats:
        out = self._compute_loss(samples)
        self.stepper.backward(out.loss_sum, count)
        return out.stats

    def _compute_loss(self, samples: Sequence[Sample]) -> LossOutput:
        device = self.model.get_device()
        rows = _pad(samples, device)
        at = rows["loss_mask"] > 0  # positions of the labels
        labels, sequence = rows["labels"][at], at.nonzero()[:, 0]
        temperature = torch.tensor([s.temperature for s in samples], device=device)[sequence]
        with autocast(device, self.dtype):
            logprobs, entropy = _score(self.model, rows["input_ids"], at, labels, temperature, self.top_k)
        reference = None
        if self.reference is not None:
            with torch.no_grad(), autocast(device, self.dtype):
                reference, _ = _score(self.reference, rows["input_ids"], at, labels, temperature, self.top_k)
        out = self.loss(
            LossInputs(
                trainer_logprobs=logprobs,
                inference_logprobs=rows["old_log_probs"][at],
                advantages=rows["advantages"][at],
                loss_mask=rows["loss_mask"][at],
                sequence=sequence,
                teacher_logprobs=reference,
                entropy=entropy,
                num_sequences=len(samples),
            )
        )
        out.stats.merge(TokenStats.measure({"logprobs": logprobs}))
        return out


def _score(
    model: GPT,
    tokens: Int[Tensor, "rows width"],
    at: Tensor,
    labels: Int[Tensor, " tokens"],
    temperature: Float[Tensor, " tokens"],
    top_k: int | None,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """Log-prob of each label in the sampling distribution, and the entropy of that distribution (no gradient)."""
    hidden = model.hidden(tokens, torch.arange(tokens.shape[1], device=tokens.device), causal_attention)
    table = torch.log_softmax(keep_top_k(model.logits(hidden[at]), top_k, labels) / temperature[:, None], dim=-1)
    with torch.no_grad():
        entropy = torch.special.entr(table.exp()).sum(-1)
    return table.gather(-1, labels[:, None])[:, 0], entropy


def _pad(samples: Sequence[Sample], device: torch.device) -> dict[str, Tensor]:
    """`pad_samples` on the device; streams that a sample lacks are 0."""
    zeros = [[0.0] * len(s.tokens) for s in samples]
    filled = [
        structs.replace(s, advantages=s.advantages or zero, inference_logprobs=s.inference_logprobs or zero)
        for s, zero in zip(samples, zeros, strict=True)
    ]
    return {name: stream.to(device) for name, stream in pad_samples(filled).items()}
