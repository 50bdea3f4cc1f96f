"""Context distillation: teacher log-probs to advantages, or to a divergence between distributions.

Teacher and student score the tokens that the student sampled; only the teacher sees the context. With ls and lt the
student's and the teacher's log-probs and a, b = teacher_tau, student_tau, all estimators minimize

    J = E over the student's responses of sum_t (b ls - a lt),      a = b: a KL(student || teacher)

With a reward R of weight c = adv_tau, the minimum is the normalized distribution p(teacher)^(a/b) exp(c R / b).
token, topk+tail and full are per-token: they ignore the effect of a token on later ones, which does not change the
minimum if the student can match the teacher. reward_to_go and sequence have the full gradient.

Sources: reverse KL on a student's own samples, MiniLLM 2306.08543 and GKD 2306.13649 (which has the generalized JSD).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import accumulate, zip_longest
from typing import Any

import msgspec
import torch
from jaxtyping import Float
from torch import Tensor

from rollouts.training.objectives import LOW_COVERAGE, Direction, Objective
from rollouts.training.rl_losses.inputs import LossInputs
from rollouts.training.types import Sample

MIN_TABLE_LOGPROB = -100.0
"""Lower bound of log-probs; a probability of zero would make a divergence infinite."""


def distill_term(inputs: LossInputs, objective: Objective) -> Float[Tensor, " tokens"]:
    """Per-token divergence of `objective.distill`, weighted by the taus (reference samples: by 1); 0 without loss."""
    if inputs.student_table is None or inputs.teacher_table is None:
        if inputs.has_teacher is not None and not inputs.has_teacher.any():
            return torch.zeros_like(inputs.trainer_logprobs)
        raise ValueError(
            f"loss.distill.estimator is {objective.distill.estimator} but the batch has no teacher distributions: "
            "use estimator token, reward_to_go or sequence, or a teacher that returns its top-k"
        )
    tables, choice = (inputs.student_table, inputs.teacher_table), objective.distill
    taus = (objective.teacher_tau, objective.student_tau)
    options: dict[str, Any] = {"jsd_beta": choice.jsd_beta, "has_tail": inputs.has_tail}
    term = compute_divergence(*tables, choice.direction, *taus, **options)
    if inputs.is_reference is not None:
        term = inputs.select_reference(compute_divergence(*tables, choice.direction, **options), term)
    return torch.where(inputs.loss_mask > 0, term, 0.0)


def compute_divergence(
    student: Float[Tensor, "tokens outcomes"],
    teacher: Float[Tensor, "tokens outcomes"],
    direction: Direction = "reverse",
    teacher_tau: float = 1.0,
    student_tau: float = 1.0,
    jsd_beta: float = 0.5,
    *,
    has_tail: bool = False,
) -> Float[Tensor, " tokens"]:
    """Per-token divergence between the student's log-probs s and the teacher's t over the same outcomes.

        reverse   sum p(s) (b s - a t)               a = b: a KL(student || teacher)
        forward   b KL(q || student)                 q = p(t)^(a/b), normalized: the target of the taus
        adaptive  forward where the student's probability of the teacher's most likely token is below LOW_COVERAGE,
                  else reverse: there samples of the student show its mistakes
        jsd       b (beta KL(q || m) + (1 - beta) KL(student || m))      m = beta q + (1 - beta) p(s)

    with a, b = teacher_tau, student_tau. With `has_tail` the last outcome is all tokens outside of the teacher's top k.
    `ValueError` for a `student_tau` of 0 where there is no target.
    """
    student, teacher = student.clamp(min=MIN_TABLE_LOGPROB), teacher.clamp(min=MIN_TABLE_LOGPROB)
    reverse = (student.exp() * (student_tau * student - teacher_tau * teacher)).sum(-1)
    if direction == "reverse":
        return reverse
    if not student_tau > 0:
        raise ValueError(f"direction {direction} has no target at loss.student_tau {student_tau}: set it above 0")
    target = teacher
    if teacher_tau != student_tau:
        target = torch.log_softmax(teacher_tau / student_tau * teacher, -1).clamp(min=MIN_TABLE_LOGPROB)
    forward = student_tau * (target.exp() * (target - student)).sum(-1)
    if direction == "forward":
        return forward
    if direction == "adaptive":
        return torch.where(compute_coverage(student.detach(), teacher, has_tail) < LOW_COVERAGE, forward, reverse)
    mixture = (jsd_beta * target.exp() + (1 - jsd_beta) * student.exp()).log()
    of_teacher = (target.exp() * (target - mixture)).sum(-1)
    of_student = (student.exp() * (student - mixture)).sum(-1)
    return student_tau * (jsd_beta * of_teacher + (1 - jsd_beta) * of_student)


def compute_coverage(
    student: Float[Tensor, "tokens outcomes"], teacher: Float[Tensor, "tokens outcomes"], has_tail: bool = False
) -> Float[Tensor, " tokens"]:
    """The student's probability of the teacher's most likely token; with `has_tail` the last outcome is no token."""
    tokens = teacher[..., :-1] if has_tail else teacher
    return student.gather(-1, tokens.argmax(-1, keepdim=True)).squeeze(-1).exp()


def measure_tables(inputs: LossInputs) -> dict[str, Float[Tensor, " tokens"]]:
    """Exact divergences and coverage per token; empty without distributions."""
    if inputs.student_table is None or inputs.teacher_table is None:
        return {}
    student, teacher = inputs.student_table.detach(), inputs.teacher_table
    return {
        "teacher_kl_reverse": compute_divergence(student, teacher, "reverse"),
        "teacher_kl_forward": compute_divergence(student, teacher, "forward"),
        "teacher_coverage": compute_coverage(student, teacher, inputs.has_tail),
    }


def compute_sequence_kl_advantages(samples: Sequence[Sample], objective: Objective) -> list[Sample]:
    """Add the teacher's term to the advantages, for the estimators reward_to_go and sequence; takes complete groups.

    With k_u = a lt_u - b li_u over the loss tokens u of sample i, li being the sampler's log-probs:

        reward_to_go  A'_t = c A_t + sum over u >= t of k_u  -  mean of the same sums of the other samples of the group
        sequence   A'_t = c A_t + sum over all u of k_u   -  mean over the other samples of the group

    Position t counts from the first loss token; a response that has ended contributes 0. The leave-one-out baseline
    does not change the expectation; a group of one has no baseline. The result includes the taus: the loss uses it
    unchanged. A sample without teacher log-probs gets c A. `ValueError` for samples without a group.
    """
    if objective.distill.estimator not in ("reward_to_go", "sequence"):
        return list(samples)
    seen: Counter[tuple[int, int | None]] = Counter()
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    credit: dict[int, list[float]] = {}
    for i, sample in enumerate(samples):
        if sample.group_index is None:
            raise ValueError(f"estimator {objective.distill.estimator} compares the samples of a group: there is none")
        if sample.teacher_logprobs is not None:
            rollout = (sample.group_index, sample.index)
            # Parts of one rollout are not independent: compare first parts with first parts, and so on.
            groups[sample.group_index, 0 if sample.index is None else seen[rollout]].append(i)
            seen[rollout] += 1
    compare = _center_rewards_to_go if objective.distill.estimator == "reward_to_go" else _center_totals
    for members in groups.values():
        rows = compare([_token_credit(samples[i], objective) for i in members])
        credit |= zip(members, rows, strict=True)
    return [_add_credit(sample, objective.adv_tau, credit.get(i, [])) for i, sample in enumerate(samples)]


def _token_credit(sample: Sample, objective: Objective) -> list[float]:
    """a lt - b li of each loss token, lt clipped to li +- `clip`; lt - li for reference samples."""
    inference, teacher = sample.inference_logprobs, sample.teacher_logprobs
    assert inference is not None and teacher is not None, "teacher and sampler log-probs are required"
    clip = math.inf if objective.distill.clip is None else objective.distill.clip
    a, b = (1.0, 1.0) if sample.reference_weight else (objective.teacher_tau, objective.student_tau)
    rows = zip(teacher, inference, sample.loss_mask, strict=True)
    return [a * min(max(lt, li - clip), li + clip) - b * li for lt, li, m in rows if m > 0]


def _center_totals(rows: list[list[float]]) -> list[list[float]]:
    """For every token, the sum of its row minus the mean sum of the other rows."""
    totals = [sum(row) for row in rows]
    whole, others = sum(totals), max(1, len(rows) - 1)
    return [[total - (whole - total) / others] * len(row) for total, row in zip(totals, rows, strict=True)]


def _center_rewards_to_go(rows: list[list[float]]) -> list[list[float]]:
    """For every token, the sum from there to the end of its row minus the mean of those of the other rows."""
    to_go = [list(accumulate(reversed(row)))[::-1] for row in rows]
    whole = [sum(column) for column in zip_longest(*to_go, fillvalue=0.0)]
    others = max(1, len(rows) - 1)
    return [[value - (total - value) / others for value, total in zip(row, whole, strict=False)] for row in to_go]


def _add_credit(sample: Sample, adv_tau: float, credit: list[float]) -> Sample:
    """A copy with advantages c A plus the credit of each loss token."""
    advantages = [adv_tau * a for a in sample.advantages or [0.0] * len(sample.tokens)]
    places = (t for t, m in enumerate(sample.loss_mask) if m > 0)
    for t, k in zip(places, credit, strict=False):
        advantages[t] += k
    return msgspec.structs.replace(sample, advantages=advantages)


def reference_samples(samples: Sequence[Sample], weight: float) -> list[Sample]:
    """Samples for KL-to-reference regularization: the teacher sees the student's own context, rewards are ignored.

    Their tokens count `weight` times in the sum and in the count of the loss, independently of the taus. They prevent
    forgetting: distillation alone changes the model's behavior with *other* contexts.
    """
    if not weight > 0:
        raise ValueError(f"reference_weight {weight} must be above 0: remove the reference environment instead")
    return [
        msgspec.structs.replace(
            sample,
            reference_weight=weight,
            loss_mask=[weight * m for m in sample.loss_mask],
            advantages=[0.0] * len(sample.tokens),
        )
        for sample in samples
    ]


def compute_fixed_point(
    teacher: Float[Tensor, " outcomes"], rewards: Float[Tensor, " outcomes"] | None, objective: Objective
) -> Float[Tensor, " outcomes"]:
    """Log-probs of the minimum, p(teacher)^(a/b) exp(c R / b), normalized; the argmax for b = 0."""
    gain = objective.teacher_tau * teacher
    if rewards is not None:
        gain = gain + objective.adv_tau * rewards
    if objective.student_tau > 0:
        return torch.log_softmax(gain / objective.student_tau, -1)
    best = (gain == gain.max()).to(gain.dtype)
    return (best / best.sum()).log()
