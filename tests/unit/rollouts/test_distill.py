"""Context distillation: closed forms, exact expectations over all responses, fixed points and invariances."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any, get_args

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollouts.kernels import linear as kernels_linear
from rollouts.training.advantages import compute_batch_advantages
from rollouts.training.batching import pack_samples
from rollouts.training.objectives import (
    LOW_COVERAGE,
    PRESETS,
    DistillChoice,
    LossAggregation,
    Objective,
    choose_distillation,
)
from rollouts.training.rl_losses import (
    LossInputs,
    compute_coverage,
    compute_divergence,
    compute_fixed_point,
    compute_head_logprobs,
    compute_head_table,
    compute_sequence_kl_advantages,
    logprobs,
    policy_loss,
    reference_samples,
)
from rollouts.training.types import Sample

VOCAB, LENGTH = 3, 2
SAMPLED = ("token", "reward_to_go", "sequence")


def objective(estimator: str = "token", direction: str = "reverse", **choices: Any) -> Objective:
    """REINFORCE with the taus 0/1/1 by default, summed over tokens and divided by sequences."""
    taus = {
        "adv_tau": 0.0,
        "teacher_tau": 1.0,
        "student_tau": 1.0,
        "loss_aggregation": "seq-mean-token-sum",
        "ratio": "none",
    }
    distill = DistillChoice(estimator, direction)  # type: ignore[arg-type]
    return replace(PRESETS["reinforce"], **{"distill": distill, **taus, **choices})


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_inputs(student: Tensor, teacher: Tensor, table: bool = True) -> LossInputs:
    """One sequence of one token per row of the tables, whose sampled token is the first."""
    n, zeros = len(student), torch.zeros(len(student), dtype=student.dtype)
    return LossInputs(
        trainer_logprobs=student[:, 0],
        inference_logprobs=student.detach()[:, 0],
        advantages=zeros,
        loss_mask=zeros + 1,
        sequence=torch.arange(n),
        teacher_logprobs=teacher[:, 0],
        student_table=student if table else None,
        teacher_table=teacher if table else None,
    )


# distributions ------------------------------------------------------------------------------------------------------


def test_divergences_of_two_coins() -> None:
    student, teacher = (torch.tensor([[p, 1 - p]], dtype=torch.float64).log() for p in (0.5, 0.8))
    reverse = 0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2)
    forward = 0.8 * math.log(0.8 / 0.5) + 0.2 * math.log(0.2 / 0.5)
    m = (0.3 * 0.8 + 0.7 * 0.5, 0.3 * 0.2 + 0.7 * 0.5)
    jsd = 0.3 * (0.8 * math.log(0.8 / m[0]) + 0.2 * math.log(0.2 / m[1])) + 0.7 * (
        0.5 * math.log(0.5 / m[0]) + 0.5 * math.log(0.5 / m[1])
    )
    assert compute_divergence(student, teacher).item() == pytest.approx(reverse, abs=1e-12)
    assert compute_divergence(student, teacher, "forward").item() == pytest.approx(forward, abs=1e-12)
    assert compute_divergence(student, teacher, "jsd", jsd_beta=0.3).item() == pytest.approx(jsd, abs=1e-12)
    assert compute_coverage(student, teacher).item() == pytest.approx(0.5)


def test_taus_weigh_the_two_halves() -> None:
    student, teacher = torch.log_softmax(drawn(4, 5), -1), torch.log_softmax(drawn(4, 5, seed=1), -1)
    p = student.exp()
    found = compute_divergence(student, teacher, "reverse", 0.7, 0.2)
    assert torch.allclose(found, (p * (0.2 * student - 0.7 * teacher)).sum(-1), atol=1e-12)
    target = torch.log_softmax(3.5 * teacher, -1)
    constant = -0.2 * torch.logsumexp(3.5 * teacher, -1)  # what the target's normalizer adds moves no gradient
    assert torch.allclose(found, 0.2 * compute_divergence(student, target) + constant, atol=1e-12)
    forward = compute_divergence(student, teacher, "forward", 0.7, 0.2)
    assert torch.allclose(forward, 0.2 * compute_divergence(student, target, "forward"), atol=1e-12)
    for direction in ("forward", "jsd"):
        with pytest.raises(ValueError, match="student_tau 0"):
            compute_divergence(student, teacher, direction, 1.0, 0.0)  # type: ignore[arg-type]


def test_adaptive_direction_depends_on_each_token() -> None:
    teacher = torch.tensor([[0.9, 0.05, 0.05]] * 3, dtype=torch.float64).log()
    student = torch.tensor([[0.19, 0.8, 0.01], [0.21, 0.78, 0.01], [1e-9, 1 - 2e-9, 1e-9]], dtype=torch.float64).log()
    forward, reverse = (compute_divergence(student, teacher, direction) for direction in ("forward", "reverse"))
    found = compute_divergence(student, teacher, "adaptive")
    assert found.tolist() == [forward[0].item(), reverse[1].item(), forward[2].item()]
    tail = replace(make_inputs(student[:1, [0, 1]], teacher[:1, [1, 0]]), has_tail=True)
    term = compute_divergence(student[:1, [0, 1]], teacher[:1, [1, 0]], "forward").item()
    assert policy_loss(tail, objective("topk+tail", "adaptive")).loss_sum.item() == pytest.approx(term)
    assert choose_distillation(has_topk=True) == DistillChoice("topk+tail", "adaptive")
    assert choose_distillation(has_topk=False) == DistillChoice("token")


def test_adaptive_learns_facts_that_style_hides() -> None:
    """Eight tokens of style on which both roughly agree, and two facts of which the student is sure and wrong."""
    noise = drawn(8, 20, scale=0.3)
    style = (drawn(8, 20, seed=1, scale=2.0), drawn(8, 20, seed=1, scale=2.0) + noise)
    sure = 12.0 * torch.eye(20, dtype=torch.float64)
    start, teacher = torch.cat((style[0], sure[:2])), torch.log_softmax(torch.cat((style[1], sure[2:4])), -1)
    mean = compute_coverage(torch.log_softmax(start, -1), teacher).mean().item()
    assert mean > LOW_COVERAGE, "an average over all tokens would choose the reverse direction"
    right = {}
    for direction in ("reverse", "adaptive", "forward"):
        logits = start.clone().requires_grad_()
        for _ in range(60):
            loss = compute_divergence(torch.log_softmax(logits, -1), teacher, direction).sum()  # type: ignore[arg-type]
            [gradient] = torch.autograd.grad(loss, logits)
            logits = (logits - gradient).detach().requires_grad_()
        student = torch.log_softmax(logits, -1)
        right[direction] = compute_coverage(student, teacher)[8:].min().item()
        assert compute_divergence(student, teacher)[:8].max() < 0.01, "the style is learned in any direction"
    assert right["reverse"] < 0.01 and min(right["adaptive"], right["forward"]) > 0.9, right


@pytest.mark.parametrize("direction", ["reverse", "forward", "jsd"])
@pytest.mark.parametrize("taus", [(1.0, 1.0), (1.0, 0.5), (0.3, 0.9)])
def test_gradients_against_finite_differences(direction: Any, taus: tuple[float, float]) -> None:
    teacher = torch.log_softmax(drawn(3, 4, seed=1), -1)

    def loss(logits: Tensor) -> Tensor:
        return compute_divergence(torch.log_softmax(logits, -1), teacher, direction, *taus, jsd_beta=0.4).sum()

    logits, step = drawn(3, 4).requires_grad_(), 1e-6
    [gradient] = torch.autograd.grad(loss(logits), logits)
    for direction_of in torch.eye(12, dtype=torch.float64).view(12, 3, 4):
        slope = (loss(logits + step * direction_of) - loss(logits - step * direction_of)) / (2 * step)
        assert slope.item() == pytest.approx((gradient * direction_of).sum().item(), abs=1e-8)


@pytest.mark.parametrize("direction", ["reverse", "forward", "jsd"])
def test_the_minimum_is_the_target_of_the_taus(direction: Any) -> None:
    teacher = torch.log_softmax(drawn(1, 4, seed=1), -1)
    target = compute_fixed_point(teacher[0], None, objective(student_tau=0.5))
    assert torch.allclose(target, torch.log_softmax(2 * teacher[0], -1))

    def loss(logits: Tensor) -> Tensor:
        return compute_divergence(torch.log_softmax(logits, -1)[None], teacher, direction, 1.0, 0.5).sum()

    logits = target.clone().requires_grad_()
    [gradient] = torch.autograd.grad(loss(logits), logits)
    assert gradient.abs().max() < 1e-12
    assert all(loss(target + drawn(4, seed=seed, scale=0.1)) > loss(target) for seed in range(5))


@given(st.integers(0, 10_000), st.integers(1, 5))
@settings(deadline=None, max_examples=25)
def test_tail_outcome_bounds_divergence(seed: int, k: int) -> None:
    """Merging outcomes loses information (data processing); none is lost where both spread the tail alike."""
    hidden, weight = drawn(2, 6, seed=seed), drawn(6, 6, seed=seed + 1)
    teacher = torch.log_softmax(drawn(2, 6, seed=seed + 2), -1)
    ids = teacher.topk(k).indices
    ones = torch.ones(2, dtype=torch.float64)
    full, merged = compute_head_table(hidden, weight, ones), compute_head_table(hidden, weight, ones, ids)
    tail = teacher.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    topk = torch.cat((teacher.gather(-1, ids), tail), -1)
    assert torch.allclose(merged.exp().sum(-1), ones)
    assert torch.allclose(topk.exp().sum(-1), ones)
    for direction in ("reverse", "forward", "jsd"):
        less = compute_divergence(merged, topk, direction)  # type: ignore[arg-type]
        assert torch.all(less >= -1e-12)
        assert torch.all(less <= compute_divergence(full, teacher, direction) + 1e-12)  # type: ignore[arg-type]
    # a student with the teacher's own tail: all differences are in the top-k outcomes
    alike = torch.cat((full.gather(-1, ids), full.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)), -1)
    spread = (teacher - tail).scatter(-1, ids, 0.0) + alike[:, -1:]
    same = spread.scatter(-1, ids, full.gather(-1, ids))
    assert torch.allclose(compute_divergence(same, teacher), compute_divergence(alike, topk), atol=1e-9)


def test_probabilities_of_zero_stay_finite() -> None:
    student = torch.log_softmax(drawn(1, 3), -1).requires_grad_()
    teacher = torch.tensor([[0.0, -torch.inf, -torch.inf]], dtype=torch.float64)
    for direction in ("reverse", "forward", "jsd"):
        loss = compute_divergence(student, teacher, direction).sum()  # type: ignore[arg-type]
        [gradient] = torch.autograd.grad(loss, student)
        assert loss.isfinite() and gradient.isfinite().all()


def test_head_tables_do_not_depend_on_chunks() -> None:
    hidden, weight = drawn(24, 8).requires_grad_(), drawn(11, 8, seed=1).requires_grad_()
    temperature = torch.linspace(0.5, 2.0, 24, dtype=torch.float64)
    ids = torch.rand(24, 11).topk(4).indices
    for chosen in (None, ids):
        results = []
        for per_chunk in (1 << 20, 50):
            table = compute_head_table(hidden, weight, temperature, chosen, per_chunk)
            gradients = torch.autograd.grad((table.exp() * table * 1.7).sum(), (hidden, weight))
            results.append((table, *gradients))
        assert all(torch.allclose(one, other, atol=1e-12) for one, other in zip(*results, strict=True))
    plain = torch.log_softmax(hidden @ weight.T / temperature[:, None], -1)
    assert torch.allclose(compute_head_table(hidden, weight, temperature), plain)
    with pytest.raises(ValueError, match="leave no others"):
        compute_head_table(hidden, weight, temperature, torch.arange(11).expand(24, 11))


def test_chosen_columns_of_head_tables_keep_no_whole_table() -> None:
    hidden, weight = drawn(24, 8).requires_grad_(), drawn(11, 8, seed=1).requires_grad_()
    ones, ids = torch.ones(24, dtype=torch.float64), torch.randint(0, 11, (24, 3))  # ids may repeat
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        chosen = compute_head_table(hidden, weight, ones, ids, 50, has_rest=False)
    table = compute_head_table(hidden, weight, ones, None, 50).gather(1, ids)
    assert torch.equal(chosen, table) and max(kept, default=0) < 24 * 11
    gradients = (torch.autograd.grad((x.exp() * x).sum(), (hidden, weight)) for x in (chosen, table))
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_head_tables_have_the_logit_cap_of_logprobs() -> None:
    hidden, weight, labels = drawn(6, 8, scale=9.0), drawn(11, 8, seed=1), torch.arange(6)
    temperature = torch.linspace(0.5, 2.0, 6, dtype=torch.float64)
    for per_chunk in (1 << 20, 22):
        expected, _ = compute_head_logprobs(hidden, weight, labels, temperature, cap=15.0)
        table = compute_head_table(hidden, weight, temperature, None, per_chunk, 15.0)
        assert torch.allclose(table.gather(1, labels[:, None])[:, 0], expected)
        some = compute_head_table(hidden, weight, temperature, labels[:, None], per_chunk, 15.0)
        assert torch.allclose(some[:, 0], expected) and torch.allclose(some.exp().sum(-1), torch.ones_like(expected))


def test_head_tables_on_a_gpu_are_those_of_wide_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the log-probs of labels and those of the engine: a logit of 16 in bfloat16 is off by up to 1/16."""
    monkeypatch.setattr(logprobs, "widens", lambda x: x.dtype == torch.bfloat16)
    monkeypatch.setattr(kernels_linear, "multiply_wide", lambda x, weight: x.float() @ weight.float().t())
    wide = [drawn(6, 8, scale=9.0).bfloat16(), drawn(11, 8, seed=1).bfloat16()]
    hidden, weight = (x.clone().requires_grad_() for x in wide)
    temperature, labels = torch.ones(6), torch.arange(6)
    of_labels, _ = compute_head_logprobs(hidden, weight, labels, temperature)
    exact = [x.float().requires_grad_() for x in wide]
    expected = torch.log_softmax(exact[0] @ exact[1].t(), -1)
    of_expected = torch.autograd.grad((expected.exp() * expected).sum(), exact)
    for per_chunk in (1 << 20, 22):
        table = compute_head_table(hidden, weight, temperature, None, per_chunk)
        assert torch.allclose(table, expected, atol=1e-4)
        assert torch.allclose(table.gather(1, labels[:, None])[:, 0], of_labels, atol=1e-4)
        gradients = torch.autograd.grad((table.exp() * table).sum(), (hidden, weight))
        for one, other in zip(gradients, of_expected, strict=True):
            assert one.dtype == torch.bfloat16 and torch.allclose(one.float(), other, atol=0.1, rtol=0.05)


# estimators: exact expectations over every response of a two-token language -------------------------------------------


def responses(logits: tuple[Tensor, Tensor]) -> dict[tuple[int, int], Tensor]:
    """Log-probs of both tokens of every response; the second token's distribution depends on the first."""
    first, second = torch.log_softmax(logits[0], -1), torch.log_softmax(logits[1], -1)
    return {(i, j): torch.stack((first[i], second[i, j])) for i, j in itertools.product(range(VOCAB), repeat=LENGTH)}


def draw_policy(seed: int) -> tuple[Tensor, Tensor]:
    return drawn(VOCAB, seed=seed), drawn(VOCAB, VOCAB, seed=seed + 1)


def expected_gradient(estimator: str, taus: dict[str, float], rewards: dict[tuple[int, int], float]) -> list[Tensor]:
    """Mean gradient of the loss over all pairs of responses of a group, each weighed by its probability."""
    policy = tuple(logits.requires_grad_() for logits in draw_policy(0))
    student, teacher = responses(policy), responses(draw_policy(10))  # type: ignore[arg-type]
    choice = objective(estimator, **taus)
    pairs = list(itertools.product(student, repeat=2))
    samples = [
        Sample(
            prompt="",
            tokens=[0, *response],
            loss_mask=[0.0, 1.0, 1.0],
            inference_logprobs=[0.0, *student[response].tolist()],
            teacher_logprobs=[0.0, *teacher[response].tolist()],
            advantages=[0.0, *[rewards[response] - rewards[other]] * 2],
            group_index=g,
            index=i,
        )
        for g, pair in enumerate(pairs)
        for i, (response, other) in enumerate((pair, pair[::-1]))
    ]
    credited = compute_sequence_kl_advantages(samples, choice)
    total = torch.zeros((), dtype=torch.float64)
    for g, pair in enumerate(pairs):
        weight = torch.stack([student[response].sum() for response in pair]).sum().exp().detach()
        group = credited[2 * g : 2 * g + 2]
        inputs = LossInputs(
            trainer_logprobs=torch.cat([student[response] for response in pair]),
            inference_logprobs=torch.cat([student[response].detach() for response in pair]),
            advantages=torch.tensor([a for s in group for a in (s.advantages or [])[1:]], dtype=torch.float64),
            loss_mask=torch.ones(4, dtype=torch.float64),
            sequence=torch.tensor([0, 0, 1, 1]),
            teacher_logprobs=torch.cat([teacher[response] for response in pair]),
        )
        output = policy_loss(inputs, choice)
        total = total + weight * output.loss_sum / output.count
    return list(torch.autograd.grad(total, policy))


def exact_gradient(taus: dict[str, float], rewards: dict[tuple[int, int], float]) -> list[Tensor]:
    """Of E over responses of sum_t (b ls - a lt) - c R."""
    policy = tuple(logits.requires_grad_() for logits in draw_policy(0))
    student, teacher = responses(policy), responses(draw_policy(10))  # type: ignore[arg-type]
    value = torch.zeros((), dtype=torch.float64)
    for response, own in student.items():
        cost = taus["student_tau"] * own.sum() - taus["teacher_tau"] * teacher[response].sum()
        value = value + own.sum().exp() * (cost - taus["adv_tau"] * rewards[response])
    return list(torch.autograd.grad(value, policy))


REWARDS = {pair: float(pair == (2, 1)) - 0.5 * pair[0] for pair in itertools.product(range(VOCAB), repeat=LENGTH)}


@pytest.mark.parametrize("taus", [(0.0, 1.0, 1.0), (1.0, 0.4, 0.4), (0.5, 1.0, 0.5), (1.0, 0.0, 0.3)])
@pytest.mark.parametrize("estimator", ["reward_to_go", "sequence"])
def test_credit_has_the_gradient_of_the_whole_objective(estimator: str, taus: tuple[float, ...]) -> None:
    named = dict(zip(("adv_tau", "teacher_tau", "student_tau"), taus, strict=True))
    found, exact = expected_gradient(estimator, named, REWARDS), exact_gradient(named, REWARDS)
    assert all(torch.allclose(f, e, atol=1e-10) for f, e in zip(found, exact, strict=True))


def test_token_estimator_has_per_token_divergence_gradient() -> None:
    """In expectation over the sampled token, the estimator of one token is that of the whole vocabulary."""
    taus = {"adv_tau": 0.0, "teacher_tau": 0.8, "student_tau": 0.5}
    found = expected_gradient("token", taus, dict.fromkeys(REWARDS, 0.0))
    policy = tuple(logits.requires_grad_() for logits in draw_policy(0))
    first, second = (torch.log_softmax(logits, -1) for logits in policy)
    teacher = [torch.log_softmax(logits, -1) for logits in draw_policy(10)]
    value = compute_divergence(first[None], teacher[0][None], "reverse", 0.8, 0.5).sum()
    here = compute_divergence(second, teacher[1], "reverse", 0.8, 0.5)
    value = value + (first.detach().exp() * here).sum()  # states as often as the student comes there
    exact = torch.autograd.grad(value, policy)
    assert all(torch.allclose(f, e, atol=1e-10) for f, e in zip(found, exact, strict=True))
    # and it is not the whole gradient: the first token decides what the second costs
    assert not torch.allclose(found[0], exact_gradient(taus, dict.fromkeys(REWARDS, 0.0))[0], atol=1e-3)


@pytest.mark.parametrize(("alpha", "direction"), [(1.0, "reverse"), (0.0, "forward"), (0.3, "jsd")])
def test_divergences_equal_those_of_trl(alpha: float, direction: Any) -> None:
    peer = pytest.importorskip("trl.experimental.sdpo.loss_utils", reason="trl is missing; cure: make test-peers")
    student, teacher = drawn(5, 11).requires_grad_(), drawn(5, 11, seed=1)
    expected = peer.compute_full_logit_self_distillation_loss(student, teacher, distillation_alpha=alpha)
    pair = (torch.log_softmax(student, -1), torch.log_softmax(teacher, -1))
    found = compute_divergence(*pair, direction, jsd_beta=alpha or 0.5)
    assert torch.allclose(found, expected, atol=1e-12)
    gradients = [torch.autograd.grad(values.sum(), student, retain_graph=True)[0] for values in (found, expected)]
    assert torch.allclose(*gradients, atol=1e-12)


# self-distillation from outcomes: the teacher of a response depends on that response ----------------------------------


def outcome_teacher(response: tuple[int, int]) -> tuple[Tensor, Tensor] | None:
    """Log-probs of the teacher under the context of this response; None: it has no context."""
    if response[1] == 2:
        return None
    first, second = draw_policy(20 + 2 * (VOCAB * response[0] + response[1]))
    return torch.log_softmax(first, -1), torch.log_softmax(second, -1)


def policy_tables(policy: Any, response: tuple[int, int]) -> Tensor:
    """Log-probs [tokens, vocabulary] of the distributions along a response."""
    return torch.stack((torch.log_softmax(policy[0], -1), torch.log_softmax(policy[1], -1)[response[0]]))


def preset_gradient(name: str) -> list[Tensor]:
    """Expected gradient of the preset over all groups of two responses, each weighed by its probability."""
    row = replace(PRESETS[name], teacher_tau=0.3, student_tau=0.3) if name == "sdpg" else PRESETS[name]
    policy = tuple(logits.requires_grad_() for logits in draw_policy(0))
    total = torch.zeros((), dtype=torch.float64)
    for pair in itertools.product(REWARDS, repeat=2):
        [advantages] = compute_batch_advantages([[REWARDS[r] for r in pair]], std=row.advantage.std)
        student = torch.cat([policy_tables(policy, response) for response in pair])
        shown = [outcome_teacher(response) for response in pair]
        blank = torch.full((LENGTH, VOCAB), -9.0, dtype=torch.float64)
        teacher = torch.cat([blank if t is None else policy_tables(t, r) for t, r in zip(shown, pair, strict=True)])
        if row.distill.estimator == "topk+tail":  # k = all but one: the tail is one token
            ids = teacher.topk(VOCAB - 1).indices
            student_table, teacher = (
                torch.cat((x.gather(-1, ids), x.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)), -1)
                for x in (student, teacher)
            )
        else:
            student_table = student
        tokens = torch.tensor([token for response in pair for token in response])
        logprobs = student.gather(-1, tokens[:, None]).squeeze(-1)
        inputs = LossInputs(
            trainer_logprobs=logprobs,
            inference_logprobs=logprobs.detach(),
            advantages=torch.tensor(advantages, dtype=torch.float64).repeat_interleave(LENGTH),
            loss_mask=torch.ones(4, dtype=torch.float64),
            sequence=torch.tensor([0, 0, 1, 1]),
            teacher_logprobs=torch.full((4,), -1.0, dtype=torch.float64),
            has_teacher=torch.tensor([t is not None for t in shown]).repeat_interleave(LENGTH),
            student_table=student_table,
            teacher_table=teacher,
            has_tail=row.distill.estimator == "topk+tail",
        )
        output = policy_loss(inputs, row)
        weight = logprobs.sum().exp().detach()
        total = total + weight * output.loss_sum / output.count
    return list(torch.autograd.grad(total, policy))


def closed_form_gradient(name: str) -> list[Tensor]:
    """The same in closed form: gradients by logits z of p = softmax(z), all other factors held fixed.

    KL(p || q): p (log p/q - KL). JSD: p (g - sum p g), g = log(p / m) / 2. -A log p[y]: -A (onehot(y) - p).
    """
    first, second = (torch.softmax(logits, -1) for logits in draw_policy(0))
    found = [torch.zeros_like(first), torch.zeros_like(second)]
    for pair in itertools.product(REWARDS, repeat=2):
        probability = math.prod((first[r[0]] * second[r[0], r[1]]).item() for r in pair)
        rewards = [REWARDS[response] for response in pair]
        spread = abs(rewards[0] - rewards[1]) / math.sqrt(2)
        for response, reward in zip(pair, rewards, strict=True):
            advantage = (reward - sum(rewards) / 2) / spread if spread else 0.0
            shown = outcome_teacher(response)
            for t, p in enumerate((first, second[response[0]])):
                gradient = torch.zeros_like(p)
                if name == "sdpg":
                    gradient += advantage * p
                    gradient[response[t]] -= advantage
                if shown is not None and (name != "sdpg" or advantage > 0):
                    q = (shown[0] if t == 0 else shown[1][response[0]]).exp()
                    log = (p / q).log() if name != "opsd" else 0.5 * (p / (0.5 * p + 0.5 * q)).log()
                    gradient += (0.3 if name == "sdpg" else 1.0) * p * (log - (p * log).sum())
                target = found[0] if t == 0 else found[1][response[0]]
                target += probability * gradient / (2 * LENGTH)  # mean over four tokens, or of means of two
    return found


@pytest.mark.parametrize("name", ["sdpo", "opsd", "sdpg"])
def test_self_distillation_has_the_exact_gradient(name: str) -> None:
    for found, exact in zip(preset_gradient(name), closed_form_gradient(name), strict=True):
        assert found.abs().max() > 1e-3
        assert torch.allclose(found, exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("estimator", ["token", "topk+tail", "full"])
def test_response_without_context_keeps_its_advantage(estimator: str) -> None:
    student = torch.log_softmax(drawn(4, 5), -1).requires_grad_()
    inputs = make_inputs(student, torch.log_softmax(drawn(4, 5, seed=1), -1))
    has_teacher = torch.tensor([True, False, True, False])
    inputs = replace(inputs, advantages=drawn(4, seed=2), has_teacher=has_teacher)
    choice = objective(estimator, adv_tau=0.7)
    [found] = torch.autograd.grad(policy_loss(inputs, choice).loss_sum, student)
    plain = replace(choice, teacher_tau=0.0, student_tau=0.0)
    [alone] = torch.autograd.grad(policy_loss(inputs, plain).loss_sum, student)
    assert torch.equal(found[~has_teacher], alone[~has_teacher])
    assert not torch.allclose(found[has_teacher], alone[has_teacher])
    unscored = replace(inputs, has_teacher=has_teacher & False, student_table=None, teacher_table=None)
    [found] = torch.autograd.grad(policy_loss(unscored, choice).loss_sum, student)
    assert torch.equal(found, alone)


@pytest.mark.parametrize("estimator", ["token", "full"])
def test_gate_leaves_out_advantages_up_to_zero(estimator: str) -> None:
    student = torch.log_softmax(drawn(3, 5), -1).requires_grad_()
    inputs = make_inputs(student, torch.log_softmax(drawn(3, 5, seed=1), -1))
    inputs = replace(inputs, advantages=torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64))
    gated = objective(estimator, adv_tau=0.0, distill=DistillChoice(estimator, gate="positive"))  # type: ignore[arg-type]
    [found] = torch.autograd.grad(policy_loss(inputs, gated).loss_sum, student)
    [whole] = torch.autograd.grad(policy_loss(inputs, objective(estimator)).loss_sum, student)
    assert torch.equal(found[0], whole[0]) and torch.all(found[1:] == 0) and torch.all(whole[1:].abs().sum(-1) > 0)
    with pytest.raises(ValueError, match="gate positive applies to single tokens"):
        DistillChoice("sequence", gate="positive")


# the loss -----------------------------------------------------------------------------------------------------------


def test_the_term_is_added_to_the_policy_term() -> None:
    student = torch.log_softmax(drawn(4, 5), -1).requires_grad_()
    teacher = torch.log_softmax(drawn(4, 5, seed=1), -1)
    inputs = replace(make_inputs(student, teacher), advantages=drawn(4, seed=2))
    choice = objective("full", "forward", adv_tau=0.5, teacher_tau=2.0, student_tau=2.0)
    output = policy_loss(inputs, choice)
    policy = -(0.5 * inputs.advantages * student[:, 0]).sum()
    expected = policy + 2.0 * compute_divergence(student, teacher, "forward").sum()
    assert output.loss_sum.item() == pytest.approx(expected.item(), abs=1e-12)
    summary = output.stats.summary()
    assert summary["teacher_kl_reverse/mean"] == pytest.approx(compute_divergence(student, teacher).mean().item())
    assert summary["teacher_kl_forward/mean"] >= 0 and 0 < summary["teacher_coverage/mean"] < 1
    masked = replace(inputs, loss_mask=torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64))
    [gradient] = torch.autograd.grad(policy_loss(masked, choice).loss_sum, student)
    assert torch.all(gradient[2] == 0) and torch.all(gradient[1] != 0)


def test_missing_distributions_raise_a_clear_error() -> None:
    student = torch.log_softmax(drawn(2, 3), -1).requires_grad_()
    inputs = make_inputs(student, student.detach(), table=False)
    with pytest.raises(ValueError, match="estimator token, reward_to_go or sequence"):
        policy_loss(inputs, objective("topk+tail"))
    # taus without a teacher are what they are with one: an entropy bonus of the sampled token
    alone = replace(inputs, teacher_logprobs=None)
    bonus = objective("full", teacher_tau=0.0, student_tau=0.3)
    found, token = (policy_loss(alone, replace(bonus, distill=DistillChoice(name))) for name in ("full", "token"))  # type: ignore[arg-type]
    assert found.loss_sum.item() == pytest.approx(token.loss_sum.item())
    for estimator in SAMPLED:
        with pytest.raises(ValueError, match=f"not {estimator}"):
            DistillChoice(estimator, "jsd")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="jsd_beta"):
        DistillChoice("full", "jsd", 1.0)


# credit -------------------------------------------------------------------------------------------------------------


def has_teacher(teacher: list[float], group: int = 0, index: int | None = None, **more: Any) -> Sample:
    """A sample of one prompt token, whose sampler gave every token 0."""
    n = len(teacher)
    fields: dict[str, Any] = {
        "tokens": [0] * (n + 1),
        "loss_mask": [0.0, *[1.0] * n],
        "inference_logprobs": [0.0] * (n + 1),
        "teacher_logprobs": [0.0, *teacher],
        "advantages": [0.0, *[1.0] * n],
    }
    return Sample(prompt="", group_index=group, index=index, **{**fields, **more})


def credit(samples: list[Sample], estimator: str, **taus: float) -> list[list[float]]:
    return [
        s.advantages or []
        for s in compute_sequence_kl_advantages(samples, objective(estimator, **{"adv_tau": 2.0, **taus}))
    ]


def test_credit_by_hand() -> None:
    samples = [has_teacher([-1.0, -2.0, -4.0]), has_teacher([-3.0]), has_teacher([-8.0], group=1)]
    assert credit(samples, "sequence") == [[0, 2 - 7 + 3, -2, -2], [0, 2 - 3 + 7], [0, 2 - 8]]
    assert credit(samples, "reward_to_go") == [[0, 2 - 7 + 3, 2 - 6, 2 - 4], [0, 2 - 3 + 7], [0, 2 - 8]]
    assert credit(samples, "token") == [s.advantages for s in samples]
    assert [s.advantages for s in samples] == [[0, 1, 1, 1], [0, 1], [0, 1]]  # untouched


def test_a_clip_bounds_the_distance_of_teacher_and_student() -> None:
    clipped = objective("reward_to_go", distill=DistillChoice("reward_to_go", clip=3.0), adv_tau=0.0)
    samples = [has_teacher([-1.0, -9.0]), has_teacher([0.0, 0.0])]
    assert [s.advantages for s in compute_sequence_kl_advantages(samples, clipped)] == [[0, -4, -3], [0, 4, 3]]
    student = torch.tensor([[-1.0, -0.5], [-1.0, -0.5]], dtype=torch.float64).requires_grad_()
    teacher = torch.tensor([[-9.0, 0.0], [-2.0, 0.0]], dtype=torch.float64)
    choice = objective(distill=DistillChoice("token", clip=3.0))
    [gradient] = torch.autograd.grad(policy_loss(make_inputs(student, teacher, table=False), choice).loss_sum, student)
    assert gradient[:, 0].tolist() == [3.0, 1.0]
    with pytest.raises(ValueError, match="clip"):
        DistillChoice("full", clip=3.0)


def test_environment_tokens_get_no_credit() -> None:
    """The teacher's log-probs of tool output have no effect."""
    model = has_teacher([-1.0, -50.0, -2.0], loss_mask=[0.0, 1.0, 0.0, 1.0])
    other = has_teacher([-1.0, -0.1, -2.0], loss_mask=[0.0, 1.0, 0.0, 1.0])
    for estimator in ("reward_to_go", "sequence"):
        assert credit([model, other], estimator) == [[0, 2, 2, 2], [0, 2, 2, 2]]


def test_rollout_parts_are_compared_by_position() -> None:
    samples = [
        has_teacher([-1.0], index=0),
        has_teacher([-5.0], index=0),
        has_teacher([-2.0], index=1),
        has_teacher([-9.0], index=1),
    ]
    assert credit(samples, "sequence", adv_tau=0.0) == [[0, 1], [0, 4], [0, -1], [0, -4]]


def test_credit_without_a_teacher_and_without_a_group() -> None:
    samples = [has_teacher([-1.0]), has_teacher([-2.0], teacher_logprobs=None)]
    assert credit(samples, "sequence") == [[0, 2 - 1], [0, 2]]
    with pytest.raises(ValueError, match="there is none"):
        credit([Sample(prompt="", tokens=[0])], "reward_to_go")


@given(st.lists(st.lists(st.floats(-9, 0), min_size=1, max_size=4), min_size=2, max_size=5))
def test_credit_of_a_group_sums_to_nothing_at_the_first_token(rows: list[list[float]]) -> None:
    for estimator in ("reward_to_go", "sequence"):
        first = [row[1] for row in credit([has_teacher(row) for row in rows], estimator, adv_tau=0.0)]
        assert sum(first) == pytest.approx(0, abs=1e-9)


def test_reference_samples_have_weight_and_no_reward() -> None:
    [reference] = reference_samples([has_teacher([-1.0, -2.0])], 0.25)
    assert reference.reference_weight == 0.25
    assert (reference.loss_mask, reference.advantages) == ([0.0, 0.25, 0.25], [0.0, 0.0, 0.0])
    assert reference.teacher_logprobs == [0.0, -1.0, -2.0]
    with pytest.raises(ValueError, match="above 0"):
        reference_samples([], 0.0)


@pytest.mark.parametrize("aggregation", get_args(LossAggregation))
def test_reference_weight_scales_gradients(aggregation: LossAggregation) -> None:
    aim = Objective("aipo", ratio_cap=8.0, loss_aggregation=aggregation, max_tokens=7)

    def compute(weight: float) -> tuple[list[float], float]:
        [reference] = reference_samples([has_teacher([-1.0, -2.0, -3.0])], weight)
        task = msgspec.structs.replace(has_teacher([-1.0, -2.0]), advantages=[0.0, 1.0, 1.0])
        [[micro]] = pack_samples([task, reference], 16)
        batch = micro.to_tensors()
        logprobs = torch.linspace(-3, -1, len(batch.loss_mask)).requires_grad_()
        streams = {"sequence": batch.sequence, "is_reference": batch.is_reference, "num_sequences": len(batch.lengths)}
        streams |= {"teacher_logprobs": batch.teacher_logprobs, "advantages": batch.advantages}
        output = policy_loss(LossInputs(logprobs, logprobs.detach(), loss_mask=batch.loss_mask, **streams), aim)
        output.loss_sum.backward()
        assert micro.count(aim.unit) == float(output.count)
        assert logprobs.grad is not None
        own = batch.loss_mask == weight
        return logprobs.grad[own].tolist(), float(output.count)

    (light, few), (heavy, many) = compute(0.25), compute(4.0)
    assert heavy == pytest.approx([16 * x for x in light]) and any(light)
    assert many - few == 3.75 * (3 if aggregation == "token-mean" else 1)
