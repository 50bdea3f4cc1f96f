"""Extreme log-ratios: finite values and gradients, equal to the plain formula up to the bound."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from prime_rl.orchestrator.distillation.baseline_eval import estimate_k3
from rollouts.training.objectives import MAX_LOG_RATIO, PRESETS, Objective
from rollouts.training.rl_losses import LossInputs, compute_divergence, compute_kl, policy_loss, ppo_loss
from rollouts.training.rl_losses import kl as kl_module
from rollouts.training.rl_losses import trust_region as trust_region_module

NAMES = [name for name, row in PRESETS.items() if name != "custom" and not row.teacher_tau]  # others: test_distill.py
LOG_RATIOS = [0.0, 1.0, -1.0, 19.0, -19.0, 21.0, -21.0, 88.0, -88.0, 100.0, -100.0, 1e4, -1e4]
FLOAT_TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def preset(name: str) -> Objective:
    return replace(PRESETS[name], max_tokens=1)


def tokens(log_ratios: list[float], advantages: list[float], dtype: torch.dtype = torch.float32) -> LossInputs:
    """One sequence per token; the larger of both log-probs is -1."""
    ratios = torch.tensor(log_ratios, dtype=dtype)
    trainer = (-1 + ratios.clamp(max=0)).requires_grad_()
    inference, ones = -1 - ratios.clamp(min=0), torch.ones(len(ratios), dtype=dtype)
    number = torch.arange(len(ratios))
    return LossInputs(trainer, inference, torch.tensor(advantages, dtype=dtype), ones, number)


def run(inputs: LossInputs, objective: Objective) -> tuple[float, list[float], dict[str, float]]:
    output = policy_loss(inputs, objective)
    [gradient] = torch.autograd.grad(output.loss_sum, inputs.trainer_logprobs)
    return output.loss_sum.item(), gradient.tolist(), output.stats.summary()


def expected(name: str, d: float, advantage: float) -> tuple[float, float]:
    """Loss of a token and its derivative by the token's log-prob."""
    row = PRESETS[name]
    logprob, inference = -1 + min(d, 0.0), -1 - max(d, 0.0)
    ratio, slope = math.exp(min(d, MAX_LOG_RATIO)), float(d <= MAX_LOG_RATIO)
    if row.ratio == "none":
        return -advantage * logprob, -advantage
    if row.gamma_pos is not None and row.gamma_neg is not None:
        k, g = row.gamma_pos if advantage >= 0 else row.gamma_neg
        weight = math.exp(min(g + k * d - g * ratio, 0.0))
        return -weight * advantage * logprob, -weight * advantage
    if row.detached:
        weight = min(ratio, row.ratio_cap or 1 + (row.clip_high or 0))
        return -weight * advantage * logprob, -weight * advantage
    if row.max_prob_diff is not None:
        moved = math.exp(logprob) - math.exp(inference)
        is_far = moved > row.max_prob_diff if advantage > 0 else moved < -row.max_prob_diff
        kept = 0.0 if is_far else -ratio * advantage
        return kept + row.kl_tau * d * d, kept * slope + 2 * row.kl_tau * d
    if row.gate_pos is not None and row.gate_neg is not None:
        t = row.gate_pos if advantage > 0 else row.gate_neg
        gate = 1 / (1 + math.exp(min(-t * (ratio - 1), 700)))
        return -4 / t * gate * advantage, -4 * gate * (1 - gate) * ratio * slope * advantage
    if row.log_clip_low is not None and row.log_clip_high is not None:
        is_clipped = d > row.log_clip_high if advantage > 0 else d < -row.log_clip_low and advantage < 0
        bounded = max(min(d, row.log_clip_high), -row.log_clip_low) if is_clipped else min(d, MAX_LOG_RATIO)
        return -math.exp(bounded) * advantage, 0.0 if is_clipped else -ratio * slope * advantage
    assert row.clip_low is not None and row.clip_high is not None
    limited = min(max(ratio, 1 - row.clip_low), 1 + row.clip_high)
    loss = max(-ratio * advantage, -limited * advantage)
    derivative = -ratio * advantage * slope if loss == -ratio * advantage else 0.0
    if row.dual_clip is not None and advantage < 0 and loss > -row.dual_clip * advantage:
        return -row.dual_clip * advantage, 0.0
    return loss, derivative


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_every_preset_at_extreme_log_ratios(name: str, advantage: float) -> None:
    for d in LOG_RATIOS:
        value, [gradient], summary = run(tokens([d], [advantage]), preset(name))
        loss, derivative = expected(name, d, advantage)
        assert value == pytest.approx(loss, rel=1e-5), d
        assert gradient == pytest.approx(derivative, rel=1e-5), d
        assert all(map(math.isfinite, summary.values())), (d, summary)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [{}, {"ratio_cap": None}, {"kl_coef": 0.1, "inference_kl_coef": 0.1}], ids=str)
def test_extreme_tokens_leave_the_others_alone(name: str, options: dict[str, Any]) -> None:
    ratios, advantages = [0.1, -0.2, 0.05], [1.0, -1.0, 0.5]
    objective = replace(preset(name), **options)

    def gradient(log_ratios: list[float], advantages: list[float]) -> list[float]:
        inputs = tokens(log_ratios, advantages)
        inputs = replace(inputs, teacher_logprobs=torch.full((len(log_ratios),), -2.0))
        # The count is left out of the sum, so a token's gradient does not depend on how many there are.
        return run(inputs, replace(objective, loss_aggregation="seq-mean-token-sum"))[1]

    extreme = [d for d in (21.0, -21.0, 100.0, -100.0, 1e4, -1e4, math.inf) for _ in range(3)]
    together = gradient(ratios + extreme, advantages + [-1.0, 0.0, 1.0] * 7)
    assert together[:3] == gradient(ratios, advantages)
    assert all(map(math.isfinite, together))


@pytest.mark.parametrize("kind", ["geometric", "arithmetic", "product"])
@pytest.mark.parametrize("detached", [True, False])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_sequence_ratios_at_extreme_means(kind: Any, detached: bool, advantage: float) -> None:
    objective = Objective("x", ratio=kind, detached=detached, **({} if detached else {"clip_high": 0.2}))
    for log_ratios in ([100.0, 90.0], [1e4, 0.0], [-1e4, 0.0], [-100.0, 100.0], [math.inf, 0.0], [30.0, 5.0, -35.0]):
        inputs = tokens(log_ratios, [advantage] * len(log_ratios))
        inputs = replace(inputs, sequence=torch.zeros(len(log_ratios), dtype=torch.int64))
        value, gradient, summary = run(inputs, objective)
        numbers = [value, *gradient, *summary.values()]
        assert all(map(math.isfinite, numbers)), (log_ratios, numbers)
        if advantage == 0:
            assert value == 0 and not any(gradient)
        if advantage > 0 and not detached and sum(log_ratios) > 40:  # above the clip
            assert not any(gradient)


@pytest.mark.parametrize("name", NAMES)
def test_infinite_log_probs_are_finite_losses(name: str) -> None:
    for advantage in (-1.0, 0.0, 1.0):
        for d in (-math.inf, math.inf):
            value, gradient, summary = run(tokens([d, 0.1], [advantage, 1.0]), preset(name))
            assert all(map(math.isfinite, [value, *gradient, *summary.values()])), (d, advantage)


def test_nan_log_probs_are_not_hidden() -> None:
    assert math.isnan(run(tokens([math.nan], [1.0]), preset("grpo"))[0])


@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators_at_extreme_gaps(estimator: Any, dtype: torch.dtype) -> None:
    formulas = {
        "k1": lambda d: (d, 1.0),
        "k2": lambda d: (d * d / 2, d),
        "k3": lambda d: (math.expm1(min(-d, 20)) + max(d, -20), 1 - math.exp(-d) if d >= -20 else 0.0),
    }
    for d in (0.0, 1.0, -1.0, 19.0, -19.0, 21.0, -21.0, 88.0, -88.0, 1e4, -1e4):
        gap = torch.tensor([d], dtype=dtype, requires_grad=True)
        values = compute_kl(gap, estimator)
        [gradient] = torch.autograd.grad(values.sum(), gap)
        value, derivative = formulas[estimator](gap.item())
        assert values.item() == pytest.approx(value, rel=1e-5, abs=1e-6), d
        limit = torch.finfo(dtype).max  # a gradient has the format of its variable
        assert gradient.item() == pytest.approx(min(max(derivative, -limit), limit), rel=0.01) or dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_streams_are_computed_in_fp32(dtype: torch.dtype) -> None:
    narrow, wide = tokens([30.0, 0.5, -3.0] * 200, [-1.0, 0.0, 1.0] * 200, dtype), None
    names = ("inference_logprobs", "advantages", "loss_mask")
    wide = replace(narrow, **{name: getattr(narrow, name).float() for name in names})
    wide = replace(wide, trainer_logprobs=narrow.trainer_logprobs.float())
    for name in NAMES:
        found, reference = policy_loss(narrow, preset(name)), policy_loss(wide, preset(name))
        assert found.loss_sum.isfinite() and torch.equal(found.loss_sum, reference.loss_sum), name
        assert found.count.item() == 600, "a count of bfloat16 would be rounded"


@pytest.mark.parametrize("name", NAMES)
def test_inside_the_bound_nothing_changes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    inference = -20 * torch.rand(999, generator=generator)
    spread = 1 if PRESETS[name].ratio == "product" else 3  # of 9 tokens, far from exp(20)
    trainer = (inference + spread * torch.randn(999, generator=generator)).clamp(max=0).requires_grad_()
    inputs = LossInputs(
        trainer,
        inference,
        torch.randn(999, generator=generator),
        torch.ones(999),
        torch.arange(999) // 9,
        teacher_logprobs=inference + 1.0,
    )
    objective = replace(preset(name), kl_coef=0.1)
    bounded = run(inputs, objective)
    for module in (kl_module, trust_region_module):
        monkeypatch.setattr(module, "MAX_LOG_RATIO", math.inf)
    assert run(inputs, objective) == bounded
    assert bounded[2]["loss/bounded_ratio"] == 0


def test_bounded_tokens_are_counted() -> None:
    ratios, advantages = [25.0, -25.0, 19.0, 1e4], [1.0, 0.0, -1.0, -1.0]
    assert run(tokens(ratios, advantages), preset("grpo"))[2]["loss/bounded_ratio"] == 0.5
    masked = replace(tokens(ratios, advantages), loss_mask=torch.tensor([0.0, 1.0, 1.0, 1.0]))
    assert run(masked, preset("grpo"))[2]["loss/bounded_ratio"] == pytest.approx(1 / 3)
    together = replace(tokens(ratios, advantages), sequence=torch.tensor([0, 0, 1, 1]))
    assert run(together, preset("gspo"))[2]["loss/bounded_ratio"] == 0.5, "the mean of the second sequence"
    dropped = replace(preset("aipo"), token_mask_high=8.0)
    assert run(tokens(ratios, advantages), dropped)[2]["loss/bounded_ratio"] == 0
    # k3 to a reference: exp(reference - policy) is what grows
    reference = replace(tokens([0.0, 0.0], [1.0, 1.0]), teacher_logprobs=torch.tensor([-1.0, 30.0]))
    assert run(reference, replace(preset("grpo"), kl_coef=0.1))[2]["loss/bounded_ratio"] == 0.5


@pytest.mark.parametrize("old", [-200.0, -math.inf])
def test_documented_ppo_with_extreme_old_log_probs(old: float) -> None:
    for advantage in (-1.0, 0.0, 1.0):
        for options in ({}, {"dual_clip": 3.0}, {"kl_coef": 0.1, "entropy_coef": 0.1}):
            logits = torch.zeros(1, 2, 5, requires_grad=True)
            labels, mask = torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2)
            reference = torch.tensor([[0.0, 90.0]]) if "kl_coef" in options else None
            loss = ppo_loss(
                logits,
                labels,
                mask,
                torch.tensor([advantage]),
                torch.tensor([[old, math.log(0.2)]]),
                ref_log_probs=reference,
                **options,
            )
            loss.backward()
            assert loss.isfinite() and logits.grad is not None and logits.grad.isfinite().all()
            if advantage == 0 and "kl_coef" not in options:
                assert loss == 0 and not logits.grad.any()
            if "kl_coef" not in options:  # clipped above for a positive advantage, beyond the bound for a negative one
                assert not logits.grad[0, 0].any()


@pytest.mark.parametrize("direction", ["reverse", "forward", "jsd"])
def test_divergences_of_disjoint_distributions(direction: Any) -> None:
    logits = torch.tensor([[0.0, -1e4, -300.0]], requires_grad=True)
    student, teacher = torch.log_softmax(logits, -1), torch.tensor([[-math.inf, 0.0, -math.inf]])
    divergence: Tensor = compute_divergence(student, teacher, direction, 0.5, 0.7)
    [gradient] = torch.autograd.grad(divergence.sum(), logits)
    assert divergence.isfinite().all() and gradient.isfinite().all()


def test_k3_of_baselines_does_not_overflow() -> None:
    assert estimate_k3([0.5, -0.5]) == pytest.approx((math.exp(-0.5) + 0.5 - 1 + math.exp(0.5) - 0.5 - 1) / 2)
    assert math.isfinite(estimate_k3([-1e4, 1e4]))
