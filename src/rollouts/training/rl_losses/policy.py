"""The one policy loss: every objective is the same few lines with other choices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from rollouts.training.objectives import Objective, Ratio
from rollouts.training.rl_losses.distill import distill_term, measure_tables
from rollouts.training.rl_losses.inputs import LossInputs, LossOutput
from rollouts.training.rl_losses.kl import compute_kl
from rollouts.training.rl_losses.normalise import normalise
from rollouts.training.rl_losses.stats import TokenStats
from rollouts.training.rl_losses.trust_region import compute_dropped, compute_ratio, surrogate, union_of

Custom = Callable[[LossInputs], Tensor]
"""Streams, with A' as their `advantages`, to per-token losses; nothing else may depend on how tokens are packed."""


@dataclass(frozen=True)
class PolicyLoss:
    """An objective as the function of a micro-batch that a backend takes."""

    objective: Objective
    custom: Custom | None = None

    @property
    def mean_over(self) -> str:
        """What the loss is a mean over, so which global count it is divided by: "token" or "sequence"."""
        return self.objective.unit

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Sum and count of one micro-batch."""
        return policy_loss(inputs, self.objective, self.custom)


def policy_loss(inputs: LossInputs, objective: Objective, custom: Custom | None = None) -> LossOutput:
    """The loss of `objective`, whose docstring has the formula; `custom` replaces its ratio term."""
    active = inputs.loss_mask > 0
    advantage = mix_advantages(inputs, objective)
    dropped = compute_dropped(inputs, advantage, objective)
    is_masked = union_of(dropped, active)
    keep = active & ~is_masked
    logprobs = torch.where(keep, inputs.trainer_logprobs, inputs.trainer_logprobs.detach())
    log_ratio = torch.where(active, logprobs - inputs.inference_logprobs, 0.0)
    if custom is None:
        # A dropped token's ratio may be infinite: it takes part in means over its sequence, never in its own loss.
        own = torch.where(keep, log_ratio, 0.0) if objective.ratio == "token" else log_ratio
        ratio = compute_ratio(inputs, own, objective.ratio)
        policy, bound = surrogate(ratio, advantage, logprobs, objective)
    else:
        policy, bound = _check_custom(custom(replace(inputs, advantages=advantage)), active), {}
    # Taken out by `where`, not by a product with 0.
    policy = torch.where(keep, policy, 0.0)
    terms = extra_terms(inputs, objective)
    per_token = policy
    for term in terms.values():
        per_token = per_token + term
    loss_sum, count = normalise(per_token, inputs, objective.normaliser, objective.max_tokens)
    values = {
        "loss": per_token,
        "advantages": inputs.advantages,
        "combined_advantage": advantage,
        "is_masked": is_masked,
        **dropped,
        **bound,
        **({"loss_policy": policy, **terms} if terms else {}),
    }
    stats = _measure(inputs, objective, values, is_masked)
    stats.ratios["loss/policy"] = torch.stack((loss_sum, count)).detach().double()
    return LossOutput(loss_sum, count, stats)


def nll_loss(inputs: LossInputs) -> LossOutput:
    """-logp of the labels, the loss of supervised fine-tuning; of the streams it reads mask and log-probs only."""
    logprobs, mask = inputs.trainer_logprobs, inputs.loss_mask
    values = {"loss": -logprobs.detach()}
    if inputs.entropy is not None:
        values["entropy"] = inputs.entropy
    return LossOutput(-(mask * logprobs).sum(), mask.sum(), TokenStats.measure(values, mask > 0))


def mix_advantages(inputs: LossInputs, objective: Objective) -> Float[Tensor, " tokens"]:
    """A' = adv_tau A + teacher_tau lt - student_tau ls - sampler_tau (ls - li), detached.

    lt, ls, li: log-prob of the teacher, the student (the trainer) and the sampler (inference). On tokens of anchors
    teacher_tau and student_tau are 1: what holds the student does not weaken as the taus do. With the estimators
    togo and sequence the first three terms are in the advantages already (`distill.credit_samples`); with those that
    compare distributions the teacher's and the student's stand beside the policy term (`extra_terms`).
    """
    student = inputs.trainer_logprobs.detach()
    mixed = inputs.advantages if _is_credited(objective) else objective.adv_tau * inputs.advantages
    if not _is_credited(objective) and not _compares(objective):
        if objective.teacher_tau or inputs.anchored is not None:
            teacher = _teacher(inputs, "teacher_tau", objective.teacher_tau)
            if (clip := objective.distill.clip) is not None:
                teacher = student + (teacher - student).clamp(-clip, clip)
            mixed = mixed + inputs.where_taught(inputs.where_anchored(teacher, objective.teacher_tau * teacher))
        if objective.student_tau or inputs.anchored is not None:
            mixed = mixed - inputs.where_taught(inputs.where_anchored(student, objective.student_tau * student))
    if objective.sampler_tau:
        mixed = mixed - objective.sampler_tau * (student - inputs.inference_logprobs)
    return mixed


def extra_terms(inputs: LossInputs, objective: Objective) -> dict[str, Float[Tensor, " tokens"]]:
    """What is added to the loss of each loss token, under the name of its metric; dropped tokens have it too."""
    active = inputs.loss_mask > 0
    terms: dict[str, Float[Tensor, " tokens"]] = {}
    if _compares(objective):
        terms["loss_distill"] = inputs.where_taught(distill_term(inputs, objective))
    if objective.kl_tau:
        gap = torch.where(active, inputs.trainer_logprobs - inputs.inference_logprobs, 0.0)
        terms["loss_kl"] = objective.kl_tau * gap.square()
    if objective.ref_kl_tau:
        reference = _teacher(inputs, "ref_kl_tau", objective.ref_kl_tau)
        gap = torch.where(active, inputs.trainer_logprobs - reference, 0.0)
        penalty = compute_kl(gap, objective.ref_kl_estimator)
        terms["loss_ref_kl"] = inputs.where_taught(objective.ref_kl_tau * penalty)
    if objective.entropy_tau:
        if inputs.entropy is None:
            raise ValueError(f"loss.entropy_tau is {objective.entropy_tau} but no entropies were computed")
        terms["loss_entropy"] = -objective.entropy_tau * torch.where(active, inputs.entropy, 0.0)
    return terms


def _is_credited(objective: Objective) -> bool:
    return objective.distill.estimator in ("togo", "sequence")


def _compares(objective: Objective) -> bool:
    return objective.distill.has_table and objective.teacher_tau > 0


_SHOWN_RATIO: dict[Ratio, Ratio] = {"none": "token"}


def _teacher(inputs: LossInputs, option: str, value: float) -> Float[Tensor, " tokens"]:
    if inputs.teacher_logprobs is None:
        raise ValueError(f"loss.{option} is {value} but the batch carries no teacher log-probs")
    return inputs.teacher_logprobs


def _check_custom(losses: Tensor, active: Tensor) -> Tensor:
    if not isinstance(losses, Tensor) or losses.shape != active.shape:
        found = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ValueError(f"the custom loss returned {found}: it must return one loss per token, {list(active.shape)}")
    return losses


def _compare_teacher(inputs: LossInputs) -> dict[str, Float[Tensor, " tokens"]]:
    """How far the student is from its teacher, where there is one."""
    if inputs.teacher_logprobs is None:
        return {}
    # E over the student's tokens of ls - lt estimates KL(student || teacher) and falls to 0 as they agree.
    gap = inputs.trainer_logprobs.detach() - inputs.teacher_logprobs
    return {"teacher_kl": gap, "teacher_kl_k3": compute_kl(gap, "k3"), **measure_tables(inputs)}


@torch.no_grad()
def _measure(inputs: LossInputs, objective: Objective, values: dict[str, Tensor], is_masked: Tensor) -> TokenStats:
    """The metrics of the loss, each over the loss tokens it speaks of."""
    active = inputs.loss_mask > 0
    student, inference = inputs.trainer_logprobs.detach(), inputs.inference_logprobs
    log_ratio = torch.where(active, student - inference, 0.0)
    mismatch_kl = log_ratio.expm1() - log_ratio  # k3 of KL(sampler || trainer); expm1 keeps tiny differences
    values = {name: value.to(student.dtype) for name, value in values.items()} | {
        "mismatch_kl": mismatch_kl,
        "importance_ratio": compute_ratio(inputs, log_ratio, _SHOWN_RATIO.get(objective.ratio, objective.ratio)),
        "trainer_probs": student.exp(),
        "inference_probs": inference.exp(),
    }
    if inputs.entropy is not None:
        values["entropy"] = inputs.entropy
    stats = TokenStats.measure(values, active)
    taught = active if inputs.taught is None else active & inputs.taught
    compared = _compare_teacher(inputs)
    if compared and inputs.anchored is not None:
        stats.merge(TokenStats.measure({"anchor_kl": compared["teacher_kl"]}, taught & inputs.anchored))
        taught = taught & ~inputs.anchored
    stats.merge(TokenStats.measure(compared, taught))
    stats.merge(TokenStats.measure({"masked_mismatch_kl": mismatch_kl}, active & is_masked))
    stats.merge(TokenStats.measure({"unmasked_mismatch_kl": mismatch_kl}, active & ~is_masked))
    has_loss = inputs.per_sequence(active.to(student.dtype)) > 0
    geo = inputs.mean_per_sequence(log_ratio).exp()
    stats.merge(TokenStats.measure({"geo_seq_ratio": geo}, has_loss))
    return stats
