"""Optimizer steps on one batch: minibatches, epochs, and old log-probs recomputed before the first update."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from prime_rl.trainer.backend import Backend, Loss, WrappedLoss
from prime_rl.trainer.rl.config import CriticConfig
from prime_rl.trainer.rl.critic import CriticLoss, Streams, compute_targets
from rollouts.training.backends.step import StepReport
from rollouts.training.batching import UNITS, MicroBatch, Share
from rollouts.training.rl_losses import LossInputs, LossOutput, PolicyLoss, TokenStats
from rollouts.training.types import Sample


@dataclass(frozen=True)
class PreparedLoss(WrappedLoss):
    """A loss with streams that were computed before the first update, by `sample_ids` of the micro-batch."""

    streams: Mapping[tuple[int, ...], Streams]

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Loss of a micro-batch."""
        return self.loss(replace(inputs, **self.streams[inputs.sample_ids]))  # type: ignore[arg-type]


def split_batch(samples: Sequence[Sample], num_minibatches: int, seed: str) -> list[list[int]]:
    """Indices of the samples of each minibatch: a random partition, a function of `seed`.

    Samples with loss, and then the others, are distributed evenly. Fewer minibatches if fewer samples have loss.
    """
    if num_minibatches == 1:
        return [list(range(len(samples)))]
    order = random.Random(seed).sample(range(len(samples)), len(samples))
    has_loss = [any(mask > 0 for mask in sample.loss_mask[1:]) for sample in samples]
    order.sort(key=lambda i: not has_loss[i])
    num = max(1, min(num_minibatches, sum(has_loss)))
    return [order[start::num] for start in range(num)]


def pack_minibatches(
    samples: Sequence[Sample],
    parts: Sequence[Sequence[int]],
    pack: Callable[[Sequence[Sample]], Share],
    has_gradient: Callable[[Sample], bool] = lambda sample: True,
) -> tuple[list[list[MicroBatch]], Share]:
    """This rank's micro-batches of each minibatch, and all of them; `sample_ids` refer to `samples`.

    Samples without gradient are counted, not computed; if no sample of a minibatch has one, a sample with loss is
    computed, so that the optimizer takes its step.
    """
    kept = [
        [i for i in part if has_gradient(samples[i])] or [max(part, key=lambda i: any(samples[i].loss_mask[1:]))]
        for part in parts
    ]
    shares = [pack([samples[i] for i in part]) for part in kept]
    minibatches = [
        [replace(micro, sample_ids=[part[i] for i in micro.sample_ids]) for micro in share.micros]
        for part, share in zip(kept, shares, strict=True)
    ]
    lengths, num_computed = [len(sample.tokens) for sample in samples], 0
    for part, computed, micros in zip(parts, kept, minibatches, strict=True):
        num_computed += sum(lengths[i] for i in computed)
        if skipped := [samples[i] for i in sorted(set(part).difference(computed))]:
            others = pack(skipped).micros
            micros[0].skipped = {unit: sum(micro.count(unit) for micro in others) for unit in UNITS}
    whole = Share(
        [micro for micros in minibatches for micro in micros],
        lengths,
        fmean(share.padding_ratio for share in shares),
        fmean(share.imbalance for share in shares),
        skipped_ratio=1 - num_computed / sum(lengths),
    )
    return minibatches, whole


def run_updates(
    backend: Backend,
    minibatches: Sequence[Sequence[MicroBatch]],
    loss: PolicyLoss,
    num_epochs: int,
    first_loss: Loss | None = None,
    before_update: Callable[[], None] = lambda: None,
    *,
    critic: CriticConfig | None = None,
    step: int = 1,
) -> tuple[StepReport, TokenStats]:
    """One optimizer step per minibatch and epoch; returns their reports as one, and statistics over all of them.

    `first_loss` replaces the loss in the first epoch; `before_update` is called before the parameters change. With
    `old_logprobs` "recomputed" or a critic, an additional forward pass over the batch comes first.
    """
    prepared, stats = prepare_streams(backend, minibatches, loss, critic)
    is_warmup = critic is not None and step <= critic.warmup_steps
    reports = list[StepReport]()
    for epoch in range(num_epochs):
        for micros in minibatches:
            used = first_loss if first_loss is not None and epoch == 0 else loss
            if critic is not None:
                used = CriticLoss(used, critic)
            part = backend.forward_backward(micros, PreparedLoss(used, prepared) if prepared else used)
            before_update()
            reports.append(backend.optim_step(part, begins_step=not reports, only_critic=is_warmup))
            stats.merge(part)
    return merge_reports(reports), stats


def prepare_streams(
    backend: Backend, minibatches: Sequence[Sequence[MicroBatch]], loss: PolicyLoss, critic: CriticConfig | None
) -> tuple[dict[tuple[int, ...], Streams], TokenStats]:
    """Streams of every micro-batch with loss under the current weights, and statistics of the critic."""
    is_decoupled = loss.objective.old_logprobs == "recomputed"
    if critic is None and not is_decoupled:
        return {}, TokenStats()
    recorded, stats = list[LossInputs](), TokenStats()

    def record(inputs: LossInputs) -> LossOutput:
        recorded.append(inputs)
        zero = inputs.trainer_logprobs.new_zeros(())
        return LossOutput(zero, zero)

    for micros in minibatches:
        backend.evaluate(micros, record)
    streams = list[Streams]({} for _ in recorded)
    if critic is not None:
        streams, stats = compute_targets(backend, recorded, critic)
    for one, inputs in zip(streams, recorded, strict=True) if is_decoupled else ():
        one["old_logprobs"] = inputs.trainer_logprobs
    return {inputs.sample_ids: one for one, inputs in zip(streams, recorded, strict=True)}, stats


def merge_reports(reports: Sequence[StepReport]) -> StepReport:
    """The report of a step of several updates: the mean gradient norm, and the first reason to skip one."""
    if len(reports) == 1:
        return reports[0]
    skipped = [
        f"update {n} of {len(reports)}: {report.skipped}" for n, report in enumerate(reports, 1) if report.skipped
    ]
    norm = fmean(report.grad_norm for report in reports)
    return replace(reports[0], grad_norm=norm, skipped=skipped[0] if skipped else None)
