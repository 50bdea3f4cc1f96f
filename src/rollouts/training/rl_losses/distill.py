"""Context distillation: from what a teacher says of a student's tokens to credit, or to a loss over distributions.

The teacher sees a context, the student does not; both speak of the tokens that the student sampled. With ls and lt
their log-probs and a, b = teacher_tau, student_tau, all estimators minimise

    J = E over the student's responses of sum_t (b ls - a lt),      a = b: a KL(student || teacher)

whose minimum, with a reward R that weighs c = adv_tau, is the distribution p(teacher)^(a/b) exp(c R / b), normalised.
token, topk+tail and full take each token for itself (they leave out that it decides what may follow; where the
teacher's response can be matched this changes nothing at the minimum). togo and sequence have the whole gradient.

Sources: reverse KL on a student's own samples, MiniLLM 2306.08543 and GKD 2306.13649 (which has the generalised JSD).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import accumulate, zip_longest

import msgspec
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rollouts.training.objectives import Direction, Objective
from rollouts.training.rl_losses.inputs import LossInputs
from rollouts.training.types import Sample

LEAST_LOGPROB = -100.0
"""Stands for a probability of zero, which would make a divergence infinite."""


def distill_term(inputs: LossInputs, objective: Objective) -> Float[Tensor, " tokens"]:
    """The divergence of each loss token that `objective.distill` asks for, weighed by the taus, on tokens of anchors by
    1; other tokens have 0."""
    if inputs.student_table is None or inputs.teacher_table is None:
        raise ValueError(
            f"loss.distill.estimator is {objective.distill.estimator} but the batch carries no distributions of a "
            "teacher: use estimator token, togo or sequence, or a teacher that tells its top-k"
        )
    tables, choice = (inputs.student_table, inputs.teacher_table), objective.distill
    taus = (objective.teacher_tau, objective.student_tau)
    term = compute_divergence(*tables, choice.direction, *taus, choice.jsd_beta)
    if inputs.anchored is not None:
        term = inputs.where_anchored(compute_divergence(*tables, choice.direction, jsd_beta=choice.jsd_beta), term)
    return torch.where(inputs.loss_mask > 0, term, 0.0)


def compute_divergence(
    student: Float[Tensor, "tokens outcomes"],
    teacher: Float[Tensor, "tokens outcomes"],
    direction: Direction = "reverse",
    teacher_tau: float = 1.0,
    student_tau: float = 1.0,
    jsd_beta: float = 0.5,
) -> Float[Tensor, " tokens"]:
    """How far the student's log-probs s are from the teacher's t over the same outcomes, per token.

        reverse   sum p(s) (b s - a t)               a = b: a KL(student || teacher)
        forward   b KL(q || student)                 q = p(t)^(a/b), normalised: the target of the taus
        jsd       b (beta KL(q || m) + (1 - beta) KL(student || m))      m = beta q + (1 - beta) p(s)

    with a, b = teacher_tau, student_tau. `ValueError` for a `student_tau` of 0 where there is no target.
    """
    student, teacher = student.clamp(min=LEAST_LOGPROB), teacher.clamp(min=LEAST_LOGPROB)
    if direction == "reverse":
        return (student.exp() * (student_tau * student - teacher_tau * teacher)).sum(-1)
    if not student_tau > 0:
        raise ValueError(f"direction {direction} has no target at loss.student_tau {student_tau}: set it above 0")
    target = teacher
    if teacher_tau != student_tau:
        target = torch.log_softmax(teacher_tau / student_tau * teacher, -1).clamp(min=LEAST_LOGPROB)
    if direction == "forward":
        return student_tau * (target.exp() * (target - student)).sum(-1)
    mixture = (jsd_beta * target.exp() + (1 - jsd_beta) * student.exp()).log()
    of_teacher = (target.exp() * (target - mixture)).sum(-1)
    of_student = (student.exp() * (student - mixture)).sum(-1)
    return student_tau * (jsd_beta * of_teacher + (1 - jsd_beta) * of_student)


def compute_coverage(
    student: Float[Tensor, "tokens outcomes"], teacher: Float[Tensor, "tokens outcomes"]
) -> Float[Tensor, " tokens"]:
    """The student's probability of the teacher's likeliest token: how often it samples what the teacher would say."""
    return student.gather(-1, teacher.argmax(-1, keepdim=True)).squeeze(-1).exp()


def estimate_coverage(hits: Bool[Tensor, " tokens"], logprobs: Float[Tensor, " tokens"]) -> float:
    """How often students say what the teacher would, where that is not settled: 0 never, .5 nearly always.

    `hits`: the sampled token is the teacher's favourite; `logprobs` are the sampler's. A student that is sure of the
    teacher's favourite (the end, a forced letter) has nothing to learn there, so hits weigh 1 - p(sampled) and misses
    weigh 1. With a probability q of the favourite everywhere this tends to q / (1 + q); tokens on which the student is
    surely wrong pull it to 0, however many others agree. 1 where nothing is open.
    """
    unsettled = torch.where(hits, -logprobs.expm1(), 1.0)
    total = unsettled.sum()
    return (unsettled[hits].sum() / total).item() if total > 0 else 1.0


def measure_tables(inputs: LossInputs) -> dict[str, Float[Tensor, " tokens"]]:
    """Exact divergences and coverage per token, where there are distributions."""
    if inputs.student_table is None or inputs.teacher_table is None:
        return {}
    student, teacher = inputs.student_table.detach(), inputs.teacher_table
    return {
        "teacher_kl_reverse": compute_divergence(student, teacher, "reverse"),
        "teacher_kl_forward": compute_divergence(student, teacher, "forward"),
        "teacher_coverage": compute_coverage(student, teacher[:, :-1] if inputs.has_tail else teacher),
    }


def credit_samples(samples: Sequence[Sample], objective: Objective) -> list[Sample]:
    """Samples of whole groups with the teacher's term in their advantages, for the estimators togo and sequence.

    With k_u = a lt_u - b li_u over the loss tokens u of sample i, li being the sampler's log-probs:

        togo       A'_t = c A_t + sum over u >= t of k_u  -  the mean of the same sums of the other samples of the group
        sequence   A'_t = c A_t + sum over all u of k_u   -  the mean over the other samples of the group

    Position t is counted from the first loss token; a response that is over has a rest of 0. The mean leaves the sample
    itself out, so it changes no expectation; a group of one has none. The taus have done their work then: the loss
    takes the result as it is. A sample that no teacher has scored keeps c A. `ValueError` where samples have no
    group.
    """
    if objective.distill.estimator not in ("togo", "sequence"):
        return list(samples)
    seen: Counter[tuple[int, int | None]] = Counter()
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    credit: dict[int, list[float]] = {}
    for i, sample in enumerate(samples):
        if sample.group_index is None:
            raise ValueError(f"estimator {objective.distill.estimator} compares the samples of a group: there is none")
        if sample.teacher_logprobs is not None:
            rollout = (sample.group_index, sample.index)
            # The parts of one rollout are no strangers to each other: first parts are compared with first parts.
            groups[sample.group_index, 0 if sample.index is None else seen[rollout]].append(i)
            seen[rollout] += 1
    compare = _compare_rests if objective.distill.estimator == "togo" else _compare_totals
    for members in groups.values():
        rows = compare([_own_credit(samples[i], objective) for i in members])
        credit |= zip(members, rows, strict=True)
    return [_advanced(sample, objective.adv_tau, credit.get(i, [])) for i, sample in enumerate(samples)]


def _own_credit(sample: Sample, objective: Objective) -> list[float]:
    """a lt - b li of each loss token, lt within `clip` of li; of an anchor lt - li."""
    inference, teacher = sample.inference_logprobs, sample.teacher_logprobs
    assert inference is not None and teacher is not None, "both have spoken"
    clip = math.inf if objective.distill.clip is None else objective.distill.clip
    a, b = (1.0, 1.0) if sample.anchor else (objective.teacher_tau, objective.student_tau)
    rows = zip(teacher, inference, sample.loss_mask, strict=True)
    return [a * min(max(lt, li - clip), li + clip) - b * li for lt, li, m in rows if m > 0]


def _compare_totals(rows: list[list[float]]) -> list[list[float]]:
    """On every token the sum of its row, less the mean sum of the other rows."""
    totals = [sum(row) for row in rows]
    whole, others = sum(totals), max(1, len(rows) - 1)
    return [[total - (whole - total) / others] * len(row) for total, row in zip(totals, rows, strict=True)]


def _compare_rests(rows: list[list[float]]) -> list[list[float]]:
    """On every token the sum from there to the end of its row, less the mean of those of the other rows."""
    rests = [list(accumulate(reversed(row)))[::-1] for row in rows]
    whole = [sum(column) for column in zip_longest(*rests, fillvalue=0.0)]
    others = max(1, len(rows) - 1)
    return [[rest - (total - rest) / others for rest, total in zip(row, whole, strict=False)] for row in rests]


def _advanced(sample: Sample, adv_tau: float, credit: list[float]) -> Sample:
    """A copy whose advantages are c A plus the credit of each loss token."""
    advantages = [adv_tau * a for a in sample.advantages or [0.0] * len(sample.tokens)]
    places = (t for t, m in enumerate(sample.loss_mask) if m > 0)
    for t, k in zip(places, credit, strict=False):
        advantages[t] += k
    return msgspec.structs.replace(sample, advantages=advantages)


def anchor_samples(samples: Sequence[Sample], weight: float) -> list[Sample]:
    """Samples that hold the student where it is: their teacher has seen what the student saw, no reward counts.

    Their tokens count `weight` times in the sum and in the count of the loss, whatever the taus are. Mixed into a batch
    they keep what the model does with *other* contexts, which distillation alone forgets.
    """
    if not weight > 0:
        raise ValueError(f"an anchor's weight {weight} must be above 0: remove the anchor instead")
    return [
        msgspec.structs.replace(
            sample,
            anchor=weight,
            loss_mask=[weight * m for m in sample.loss_mask],
            advantages=[0.0] * len(sample.tokens),
        )
        for sample in samples
    ]


def compute_fixed_point(
    teacher: Float[Tensor, " outcomes"], rewards: Float[Tensor, " outcomes"] | None, objective: Objective
) -> Float[Tensor, " outcomes"]:
    """Log-probs at which the taus come to rest: p(teacher)^(a/b) exp(c R / b), normalised; one outcome for b = 0."""
    gain = objective.teacher_tau * teacher
    if rewards is not None:
        gain = gain + objective.adv_tau * rewards
    if objective.student_tau > 0:
        return torch.log_softmax(gain / objective.student_tau, -1)
    best = (gain == gain.max()).to(gain.dtype)
    return (best / best.sum()).log()
