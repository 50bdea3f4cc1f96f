"""Losses of the training API against their formulas, token by token in fp64, and against closed-form gradients."""

from __future__ import annotations

import math

import pytest
import torch

from prime_rl.training_api.losses import LOSSES, check_loss

GENERATOR = torch.Generator().manual_seed(0)
LOGPROBS = -torch.rand(64, generator=GENERATOR, dtype=torch.float64) * 3
SAMPLER = LOGPROBS + torch.randn(64, generator=GENERATOR, dtype=torch.float64) * 0.4
ADVANTAGES = torch.randn(64, generator=GENERATOR, dtype=torch.float64)
MASK = (torch.arange(64) % 3 > 0).to(torch.float64)
INPUTS = {"logprobs": SAMPLER, "advantages": ADVANTAGES, "weights": ADVANTAGES, "sequence_ratio_mask": MASK}


def expected(name: str, lp: float, s: float, a: float) -> tuple[float, float]:
    """Loss and its derivative at one token."""
    r = math.exp(lp - s)
    clipped = min(max(r, 0.8), 1.2)
    if name == "cross_entropy":
        return -a * lp, -a
    if name == "importance_sampling":
        return -r * a, -r * a
    if name == "ppo":
        return -min(r * a, clipped * a), (-r * a if r * a <= clipped * a else 0.0)
    if name == "cispo":
        return -clipped * a * lp, -clipped * a
    return -(a * lp - 0.025 * (lp - s) ** 2), -(a - 0.05 * (lp - s))


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "gspo"])
def test_loss_and_gradient_equal_the_formulas(name: str) -> None:
    logprobs = LOGPROBS.clone().requires_grad_()
    loss = LOSSES[name](logprobs, INPUTS, check_loss(name, {}))
    loss.backward()
    rows = [expected(name, *map(float, row)) for row in zip(LOGPROBS, SAMPLER, ADVANTAGES, strict=True)]
    assert abs(float(loss.detach()) - math.fsum(value for value, _ in rows)) < 1e-9
    assert logprobs.grad is not None
    assert torch.allclose(logprobs.grad, torch.tensor([d for _, d in rows], dtype=torch.float64), rtol=0, atol=1e-12)


def test_clip_thresholds_are_configurable() -> None:
    wide = LOSSES["ppo"](LOGPROBS, INPUTS, check_loss("ppo", {"clip_low_threshold": 0.0, "clip_high_threshold": 1e9}))
    assert torch.equal(wide, LOSSES["importance_sampling"](LOGPROBS, INPUTS, {}))


@pytest.mark.parametrize("shift", [-0.01, 0.0, 2e-4, 0.01])
def test_gspo_equals_its_formula(shift: float) -> None:
    """`shift`: log of the sequence ratio, inside or outside of the clip range."""
    chosen = [i for i in range(64) if i % 3]
    own = math.fsum(float(LOGPROBS[i] - SAMPLER[i]) for i in chosen) / len(chosen)
    logprobs = (LOGPROBS + shift - own).requires_grad_()
    loss = LOSSES["gspo"](logprobs, INPUTS, check_loss("gspo", {}))
    loss.backward()
    q = math.exp(shift)
    clipped = min(max(q, 0.9997), 1.0004)
    pairs = [(q * float(a), clipped * float(a)) for a in ADVANTAGES]
    assert abs(float(loss.detach()) + math.fsum(min(pair) for pair in pairs)) < 1e-9
    slopes = torch.tensor([-free if free <= bound else 0.0 for free, bound in pairs], dtype=torch.float64)
    assert logprobs.grad is not None
    assert torch.allclose(logprobs.grad, slopes, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("stable_reinforce", {}, "not supported"),
        ("ppo", {"clip": 0.2}, "clip is not a key of ppo"),
        ("dro", {"beta": "big"}, "must be a number"),
    ],
)
def test_unknown_losses_and_keys_are_refused(name: str, config: dict[str, float | str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_loss(name, config)
