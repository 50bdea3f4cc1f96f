"""The policy loss of all objectives; they differ in the options of `Objective`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rollouts.training.objectives import MAX_LOG_RATIO, Objective, Ratio
from rollouts.training.rl_losses.distill import distill_term, measure_tables
from rollouts.training.rl_losses.inputs import LossInputs, LossOutput
from rollouts.training.rl_losses.kl import compute_kl
from rollouts.training.rl_losses.normalize import normalize
from rollouts.training.rl_losses.stats import TokenStats
from rollouts.training.rl_losses.trust_region import (
    any_mask,
    bounded_exp,
    clip_log_ratio,
    compute_dropped,
    compute_ratio,
    find_bounded,
    surrogate_loss,
    weigh_behavior,
)
from rollouts.training.types import Sample

Custom = Callable[[LossInputs], Tensor]
"""Per-token losses from the streams, with A' as their `advantages`; must not depend on packing."""


@dataclass(frozen=True)
class PolicyLoss:
    """An objective as a loss function of a micro-batch, for a backend.

    `others` are the objectives of sequences that name one. The loss of a sequence is divided by the global count, over
    all sequences, of the unit of its own objective: it is what it would be if all sequences had that objective.
    """

    objective: Objective
    custom: Custom | None = None
    others: Mapping[str, Objective] = field(default_factory=dict)

    @property
    def mean_over(self) -> str:
        """The unit that the loss averages over, and thus its global count: "token" or "sequence"."""
        return self.objective.unit

    def has_gradient(self, sample: Sample) -> bool:
        """Whether a sample can have a gradient: an advantage is not 0, or the loss has terms without advantages."""
        objective = self.objective if sample.objective is None else self.others.get(sample.objective, self.objective)
        is_plain = not (self.custom or sample.reference_weight or objective.has_other_terms)
        return not is_plain or sample.advantages is None or any(sample.advantages)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Sum and count of one micro-batch."""
        if not self.others:
            return policy_loss(inputs, self.objective, self.custom)
        output = policy_loss(inputs, self.objective, self.custom) if inputs.objectives is None else self._mix(inputs)
        for name in self.others:  # also without samples: `TokenStats.set_loss_count` leaves several objectives alone
            nothing = inputs.trainer_logprobs.new_zeros(2, dtype=torch.float64)
            output.stats.ratios.setdefault(f"loss/policy/{name}", nothing)
        return output

    def _mix(self, inputs: LossInputs) -> LossOutput:
        total = LossOutput(inputs.trainer_logprobs.new_zeros(()), inputs.trainer_logprobs.new_zeros(()))
        named: list[tuple[str | None, Objective]] = [(None, self.objective), *self.others.items()]
        for name, objective in named:
            part = self._compute_part(inputs, name, objective)
            if part is not None:
                total = total.add(part, objective.unit, self.mean_over)
        return total

    def _compute_part(self, inputs: LossInputs, name: str | None, objective: Objective) -> LossOutput | None:
        """The loss of the sequences with one objective, None without such tokens."""
        assert inputs.objectives is not None
        num = inputs.num_sequences or len(inputs.objectives)
        chosen = torch.zeros(num, dtype=torch.bool, device=inputs.sequence.device)
        chosen[[i for i, used in enumerate(inputs.objectives) if used == name]] = True
        part = inputs.select_sequences(chosen)
        if not len(part.sequence):
            return None
        output = policy_loss(part, objective, self.custom if name is None else None)
        if name is not None:  # sums over different units have no common mean
            output.stats.ratios[f"loss/policy/{name}"] = output.stats.ratios.pop("loss/policy")
        return output


def policy_loss(inputs: LossInputs, objective: Objective, custom: Custom | None = None) -> LossOutput:
    """The loss of `objective` (see `Objective` for the formula); `custom` replaces the ratio term."""
    inputs = inputs.sanitized()
    active = inputs.loss_mask > 0
    advantage = mix_advantages(inputs, objective)
    dropped = compute_dropped(inputs, advantage, objective)
    is_masked = any_mask(dropped, active)
    keep = active & ~is_masked
    logprobs = torch.where(keep, inputs.trainer_logprobs, inputs.trainer_logprobs.detach())
    log_ratio = torch.where(active, logprobs - inputs.ratio_logprobs, 0.0)
    is_bounded = _reference_bounded(inputs, objective)
    if custom is None:
        # A dropped token's ratio may be infinite: it counts in means over its sequence, not in its own loss.
        used_ratio = torch.where(keep, log_ratio, 0.0) if objective.ratio == "token" else log_ratio
        is_bounded = is_bounded | find_bounded(inputs, used_ratio, objective.ratio)
        used_ratio, clipped = clip_log_ratio(used_ratio, advantage, objective)
        ratio = compute_ratio(inputs, used_ratio, objective.ratio)
        policy, bound = surrogate_loss(ratio, advantage, logprobs, objective)
        bound |= clipped
        if (behavior := weigh_behavior(inputs, objective)) is not None:
            weight, is_capped = behavior
            policy = weight * policy
            bound |= {"behavior_weight": weight, "is_behavior_capped": is_capped}
    else:
        policy, bound = _check_custom(custom(replace(inputs, advantages=advantage)), active), {}
    # Masked by `where`, not by a product with 0.
    policy = torch.where(keep, policy, 0.0)
    terms = extra_terms(inputs, objective)
    per_token = policy
    for term in terms.values():
        per_token = per_token + term
    loss_sum, count = normalize(per_token, inputs, objective.loss_aggregation, objective.max_tokens)
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
    stats.ratios["loss/bounded_ratio"] = torch.stack(((is_bounded & active).sum(), active.sum())).double()
    return LossOutput(loss_sum, count, stats, observe(inputs, objective, stats))


def observe(inputs: LossInputs, objective: Objective, stats: TokenStats) -> dict[str, Float[Tensor, ""]]:
    """The sum of the cross-entropy of observed tokens, times its coefficient (ECHO, 2605.24517); empty without it."""
    if not objective.observation_coef:
        return {}
    if inputs.observation_logprobs is None:
        raise ValueError(f"loss.observation_coef is {objective.observation_coef} but observed tokens have no log-probs")
    losses = -inputs.observation_logprobs
    stats.merge(TokenStats.measure({"observation_loss": losses}))
    return {"observation": objective.observation_coef * losses.sum()}


def nll_loss(inputs: LossInputs) -> LossOutput:
    """-logp of the labels (supervised fine-tuning); uses mask and trainer log-probs only."""
    logprobs, mask = inputs.trainer_logprobs, inputs.loss_mask
    values = {"loss": -logprobs.detach()}
    if inputs.entropy is not None:
        values["entropy"] = inputs.entropy
    return LossOutput(-(mask * logprobs).sum(), mask.sum(), TokenStats.measure(values, mask > 0))


def mix_advantages(inputs: LossInputs, objective: Objective) -> Float[Tensor, " tokens"]:
    """A' = adv_tau A + teacher_tau lt - student_tau ls - inference_kl_coef (ls - li), detached.

    lt, ls, li: log-probs of the teacher, the student (trainer) and the sampler (inference). On reference samples
    teacher_tau and student_tau are 1, independently of the configured taus. With the estimators reward_to_go and
    sequence the advantages already contain the first three terms (`distill.compute_sequence_kl_advantages`); with
    topk+tail and full the teacher's and the student's terms are separate (`extra_terms`).
    """
    student = inputs.trainer_logprobs.detach()
    mixed = inputs.advantages if _is_credited(objective) else objective.adv_tau * inputs.advantages
    if not _is_credited(objective) and not _compares(objective):
        if objective.teacher_tau or inputs.is_reference is not None:
            teacher = _teacher(inputs, "teacher_tau", objective.teacher_tau)
            if (clip := objective.distill.clip) is not None:
                teacher = student + (teacher - student).clamp(-clip, clip)
            term = inputs.select_reference(teacher, objective.teacher_tau * teacher)
            mixed = mixed + gate_teacher(inputs, objective, term)
        if objective.student_tau or inputs.is_reference is not None:
            term = inputs.select_reference(student, objective.student_tau * student)
            mixed = mixed - gate_teacher(inputs, objective, term)
    if objective.inference_kl_coef:
        mixed = mixed - objective.inference_kl_coef * (student - inputs.inference_logprobs)
    return mixed


def extra_terms(inputs: LossInputs, objective: Objective) -> dict[str, Float[Tensor, " tokens"]]:
    """Additional loss terms per loss token, by metric name; they also apply to dropped tokens."""
    active = inputs.loss_mask > 0
    terms: dict[str, Float[Tensor, " tokens"]] = {}
    if _compares(objective):
        terms["loss_distill"] = gate_teacher(inputs, objective, distill_term(inputs, objective))
    if objective.kl_tau:
        gap = torch.where(active, inputs.trainer_logprobs - inputs.inference_logprobs, 0.0)
        terms["loss_kl"] = objective.kl_tau * gap.square()
    if objective.kl_coef:
        reference = _teacher(inputs, "kl_coef", objective.kl_coef)
        gap = torch.where(active, inputs.trainer_logprobs - reference, 0.0)
        penalty = compute_kl(gap, objective.kl_estimator)
        terms["loss_ref_kl"] = inputs.zero_without_teacher(objective.kl_coef * penalty)
    if objective.entropy_coef:
        if inputs.entropy is None:
            raise ValueError(f"loss.entropy_coef is {objective.entropy_coef} but no entropies were computed")
        terms["loss_entropy"] = -objective.entropy_coef * torch.where(active, inputs.entropy, 0.0)
    return terms


def gate_teacher(
    inputs: LossInputs, objective: Objective, values: Float[Tensor, " tokens"]
) -> Float[Tensor, " tokens"]:
    """The values, and 0 for tokens without teacher log-probs and for those that `distill.gate` leaves out."""
    values = inputs.zero_without_teacher(values)
    if objective.distill.gate == "none":
        return values
    is_open = inputs.advantages > 0
    return torch.where(is_open if inputs.is_reference is None else is_open | inputs.is_reference, values, 0.0)


@torch.no_grad()
def _reference_bounded(inputs: LossInputs, objective: Objective) -> Bool[Tensor, " tokens"]:
    """Tokens at which the reference KL term bounds an exponent."""
    if not objective.kl_coef or objective.kl_estimator != "k3":
        return torch.zeros_like(inputs.loss_mask, dtype=torch.bool)
    reference = _teacher(inputs, "kl_coef", objective.kl_coef)
    return inputs.zero_without_teacher(reference - inputs.trainer_logprobs) > MAX_LOG_RATIO


def _is_credited(objective: Objective) -> bool:
    return objective.distill.estimator in ("reward_to_go", "sequence")


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
    """Divergence metrics between student and teacher; empty without a teacher."""
    if inputs.teacher_logprobs is None:
        return {}
    # The mean of ls - lt over the student's tokens estimates KL(student || teacher).
    gap = inputs.trainer_logprobs.detach() - inputs.teacher_logprobs
    return {"teacher_kl": gap, "teacher_kl_k3": compute_kl(gap, "k3"), **measure_tables(inputs)}


@torch.no_grad()
def _measure(inputs: LossInputs, objective: Objective, values: dict[str, Tensor], is_masked: Tensor) -> TokenStats:
    """The metrics of the loss, each over the loss tokens that it applies to."""
    active = inputs.loss_mask > 0
    student, inference = inputs.trainer_logprobs.detach(), inputs.inference_logprobs
    log_ratio = torch.where(active, student - inference, 0.0)
    kind = _SHOWN_RATIO.get(objective.ratio, objective.ratio)
    mismatch_kl = compute_kl(-log_ratio)  # of KL(sampler || trainer)
    values = {name: value.to(student.dtype) for name, value in values.items()} | {
        "mismatch_kl": mismatch_kl,
        "importance_ratio": compute_ratio(inputs, log_ratio, kind),
        "trainer_probs": student.exp(),
        "inference_probs": inference.exp(),
    }
    if inputs.old_logprobs is not None:
        from_old = torch.where(active, student - inputs.old_logprobs, 0.0)
        values["proximal_ratio"] = compute_ratio(inputs, from_old, kind)
    if inputs.entropy is not None:
        values["entropy"] = inputs.entropy
    stats = TokenStats.measure(values, active)
    has_teacher = active if inputs.has_teacher is None else active & inputs.has_teacher
    compared = _compare_teacher(inputs)
    if compared and inputs.is_reference is not None:
        stats.merge(TokenStats.measure({"reference_kl": compared["teacher_kl"]}, has_teacher & inputs.is_reference))
        has_teacher = has_teacher & ~inputs.is_reference
    stats.merge(TokenStats.measure(compared, has_teacher))
    stats.merge(TokenStats.measure({"masked_mismatch_kl": mismatch_kl}, active & is_masked))
    stats.merge(TokenStats.measure({"unmasked_mismatch_kl": mismatch_kl}, active & ~is_masked))
    has_loss = inputs.per_sequence(active.to(student.dtype)) > 0
    geo = bounded_exp(inputs.mean_per_sequence(log_ratio))
    stats.merge(TokenStats.measure({"geo_seq_ratio": geo}, has_loss))
    return stats
