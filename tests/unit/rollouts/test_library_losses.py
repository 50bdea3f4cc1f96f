"""`grpo_loss` and `ppo_loss`: closed forms, finite differences and invariances."""

from __future__ import annotations

import importlib.util
import math
from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rollouts.training.rl_losses import (
    aggregate_tokens,
    compute_entropy,
    compute_kl,
    compute_label_logprobs,
    grpo_loss,
    ppo_loss,
    ppo_loss_with_metrics,
)

LN2 = math.log(2.0)


def coin(probabilities: list[list[float]]) -> tuple[Tensor, Tensor]:
    """Logits over two tokens under which label 0 has the given probability, and the labels."""
    p = torch.tensor(probabilities, dtype=torch.float64)
    return torch.stack((p.log(), (1 - p).log()), -1), torch.zeros(p.shape, dtype=torch.int64)


def draw(seed: int = 0, batch: int = 3, seq: int = 5, vocab: int = 7) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    labels = torch.randint(0, vocab, (batch, seq), generator=generator)
    mask = torch.ones(batch, seq, dtype=torch.float64)
    mask[0, 3:], mask[1, :2] = 0, 0
    return {
        "logits": noise(batch, seq, vocab),
        "labels": labels,
        "loss_mask": mask,
        "advantages": noise(batch),
        "old_log_probs": -1.9 + 0.4 * noise(batch, seq),
        "ref_log_probs": -1.9 + 0.4 * noise(batch, seq),
    }


def of(batch: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: batch[name] for name in ("logits", "labels", "loss_mask", "advantages", *names)}


def test_grpo_closed_form() -> None:
    logits, labels = coin([[0.5, 0.25, 0.9], [0.5, 0.5, 0.5]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    loss = grpo_loss(logits, labels, mask, torch.tensor([2.0, -1.0]))
    # first: mean logp (ln 1/2 + ln 1/4) / 2 = -1.5 ln 2, times 2; second: -ln 2, times -1
    assert float(loss) == pytest.approx((3 * LN2 - LN2) / 2, rel=1e-6)
    nothing = grpo_loss(logits, labels, torch.zeros(2, 3), torch.ones(2))
    assert float(nothing) == 0.0


def test_ppo_closed_form() -> None:
    logits, labels = coin([[0.5, 0.3, 0.8]])
    mask, old = torch.tensor([[1.0, 1.0, 1.0]]), torch.log(torch.tensor([[0.25, 0.3, 0.9]]))

    def loss(advantage: float, **options: Any) -> float:
        return float(ppo_loss(logits, labels, mask, torch.tensor([advantage]), old, **options))

    # ratios 2, 1, 8/9
    assert loss(1.0) == pytest.approx(-(1.2 + 1 + 8 / 9) / 3, rel=1e-6)
    assert loss(1.0, clip_range=0.1, clip_range_high=0.5) == pytest.approx(-(1.5 + 1 + 8 / 9) / 3, rel=1e-6)
    assert loss(1.0, clip_range=0.1, clip_range_high=0.0) == pytest.approx(-(1 + 1 + 8 / 9) / 3, rel=1e-6)
    assert loss(-1.0) == pytest.approx((2 + 1 + 8 / 9) / 3, rel=1e-6)
    assert loss(-1.0, clip_range=0.05) == pytest.approx((2 + 1 + 0.95) / 3, rel=1e-6)
    assert loss(-1.0, dual_clip=1.5) == pytest.approx((1.5 + 1 + 8 / 9) / 3, rel=1e-6)
    assert loss(1.0, dual_clip=1.5) == loss(1.0)
    entropy = -sum(p * math.log(p) + (1 - p) * math.log(1 - p) for p in (0.5, 0.3, 0.8)) / 3
    assert loss(1.0, entropy_coef=0.1) == pytest.approx(loss(1.0) - 0.1 * entropy, rel=1e-5)
    ref = torch.log(torch.tensor([[0.25, 0.6, 0.8]]))
    gaps = [LN2, -LN2, 0.0]
    for estimator, term in {
        "k2": lambda d: d * d / 2,
        "k3": lambda d: math.exp(-d) - 1 + d,
    }.items():
        with_kl = loss(1.0, ref_log_probs=ref, kl_coef=0.3, kl_estimator=estimator)
        assert with_kl == pytest.approx(loss(1.0) + 0.3 * sum(map(term, gaps)) / 3, abs=1e-6), estimator


def test_ppo_metrics() -> None:
    logits, labels = coin([[0.5, 0.3, 0.8, 0.5]])
    mask, old = torch.tensor([[1.0, 1.0, 1.0, 0.0]]), torch.log(torch.tensor([[0.25, 0.3, 0.9, 1e-9]]))
    loss, metrics = ppo_loss_with_metrics(logits, labels, mask, torch.tensor([1.0]), old, ref_log_probs=old)
    assert metrics["clip_frac"] == pytest.approx(1 / 3) and metrics["dual_clip_frac"] == 0.0
    assert metrics["ratio"] == pytest.approx((2 + 1 + 8 / 9) / 3)
    assert (metrics["ratio/max"], metrics["ratio/min"]) == (pytest.approx(2.0), pytest.approx(8 / 9))
    assert metrics["policy_loss"] == pytest.approx(float(loss))
    assert {"approx_kl", "ref_kl", "entropy"} <= metrics.keys() and metrics["approx_kl"] > 0


def test_aggregations() -> None:
    values, mask = torch.tensor([[1.0, 2.0, torch.inf], [4.0, 0.0, 0.0]]), torch.tensor([[1.0, 1.0, 0.0], [1.0, 0, 0]])
    assert float(aggregate_tokens(values, mask, "token")) == pytest.approx(7 / 3)
    assert float(aggregate_tokens(values, mask, "sequence")) == pytest.approx((1.5 + 4) / 2)
    assert float(aggregate_tokens(values, mask, "constant", 10)) == pytest.approx(7 / 20)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.bfloat16], ids=str)
def test_masks_of_any_dtype_give_the_same_loss(dtype: torch.dtype) -> None:
    batch = draw(seq=300)  # bfloat16 cannot count 601 tokens
    other = batch | {"loss_mask": batch["loss_mask"].to(dtype)}
    for name, loss in LOSSES.items():
        assert float(loss(other)) == pytest.approx(float(loss(batch)), rel=1e-6), name


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_ppo_at_the_old_policy_has_the_gradient_of_reinforce(aggregation: Any) -> None:
    batch = draw()
    logits = batch["logits"].requires_grad_()
    logprobs = compute_label_logprobs(logits, batch["labels"])
    reinforce = aggregate_tokens(-logprobs * batch["advantages"][:, None], batch["loss_mask"], aggregation, 9)
    [expected] = torch.autograd.grad(reinforce, logits)
    loss = ppo_loss(**of(batch), old_log_probs=logprobs.detach(), aggregation=aggregation, max_tokens=9)
    [found] = torch.autograd.grad(loss, logits)
    assert torch.allclose(found, expected, atol=1e-7) and found[batch["loss_mask"] == 0].abs().max() == 0


LOSSES = {
    "grpo": lambda b: grpo_loss(**of(b)),
    "token": lambda b: ppo_loss(**of(b, "old_log_probs")),
    "sequence": lambda b: ppo_loss(**of(b, "old_log_probs"), aggregation="sequence", clip_range_high=0.3),
    "dual": lambda b: ppo_loss(**of(b, "old_log_probs"), dual_clip=1.2, aggregation="constant", max_tokens=4),
    "kl2": lambda b: ppo_loss(**of(b, "old_log_probs", "ref_log_probs"), kl_coef=0.5, kl_estimator="k2"),
    "kl3": lambda b: ppo_loss(**of(b, "old_log_probs", "ref_log_probs"), kl_coef=0.5, entropy_coef=0.2),
    "sequence_ratio": lambda b: ppo_loss(**{**of(b), "old_log_probs": b["old_log_probs"].mean(1)}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_against_finite_differences(name: str) -> None:
    batch, loss = draw(3), LOSSES[name]
    logits = batch["logits"].requires_grad_()
    [gradient] = torch.autograd.grad(loss(batch), logits)
    direction = torch.randn(logits.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    step = 1e-5
    with torch.no_grad():
        up, down = (loss({**batch, "logits": logits + sign * step * direction}) for sign in (1, -1))
    assert float((up - down) / (2 * step)) == pytest.approx(float((gradient * direction).sum()), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_padding_and_order_change_nothing(name: str) -> None:
    batch, loss = draw(), LOSSES[name]
    expected = float(loss(batch))
    shuffled = {key: value[[2, 0, 1]] for key, value in batch.items()}
    if name != "sequence_ratio":  # its old log-probs are means over the row
        padded = dict(batch)
        for key in ("logits", "labels", "loss_mask", "old_log_probs", "ref_log_probs"):
            padded[key] = torch.cat((batch[key], torch.zeros_like(batch[key])), 1)
        assert float(loss(padded)) == pytest.approx(expected, rel=1e-6)
    assert float(loss(shuffled)) == pytest.approx(expected, rel=1e-6)


def test_advantages_per_token_and_per_sequence_agree() -> None:
    batch = draw()
    wide = {**batch, "advantages": batch["advantages"][:, None].expand(3, 5)}
    for name, loss in LOSSES.items():
        assert float(loss(wide)) == pytest.approx(float(loss(batch)), rel=1e-6), name


def test_k1_in_a_loss_would_have_no_gradient_on_policy() -> None:
    logits = torch.tensor([0.3, -0.5, 1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64).log()

    def gradient(estimator: Any) -> torch.Tensor:
        logprobs = logits.log_softmax(0)
        expected = (logprobs.exp().detach() * compute_kl(logprobs - reference, estimator)).sum()
        return torch.autograd.grad(expected, logits)[0]

    exact = torch.autograd.grad((logits.softmax(0) * (logits.log_softmax(0) - reference)).sum(), logits)[0]
    assert gradient("k1").abs().max() < 1e-12 and torch.allclose(gradient("k2"), exact)
    assert float(gradient("k3") @ exact) > 0


def test_kl_estimators_by_expectation() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    gap, exact = (p / q).log(), float((p * (p / q).log()).sum())
    assert float((p * compute_kl(gap, "k1")).sum()) == pytest.approx(exact)
    assert float((p * compute_kl(gap, "k3")).sum()) == pytest.approx(exact)
    assert float((p * compute_kl(gap, "k2")).sum()) == pytest.approx(exact, rel=0.1)
    assert float(compute_entropy(torch.zeros(1, 1, 8))) == pytest.approx(math.log(8))


@pytest.mark.parametrize(
    ("change", "options", "sentence"),
    [
        ({"advantages": torch.zeros(4)}, {}, r"advantages have shape \[4\]"),
        ({"old_log_probs": torch.zeros(3, 4)}, {}, r"old_log_probs have shape \[3, 4\]"),
        ({"labels": torch.zeros(3, 4, dtype=torch.int64)}, {}, r"labels have shape \[3, 4\]"),
        ({}, {"clip_range": -0.1}, "clip_range -0.1"),
        ({}, {"dual_clip": 1.0}, "dual_clip 1.0"),
        ({}, {"kl_coef": 0.1}, "no ref_log_probs"),
        ({}, {"kl_estimator": "k4"}, "'k4'"),
        ({}, {"kl_estimator": "k1", "kl_coef": 0.1, "ref_log_probs": draw()["ref_log_probs"]}, "use k2 or k3"),
        ({}, {"aggregation": "mean"}, "'mean'"),
        ({}, {"aggregation": "constant"}, "max_tokens"),
    ],
)
def test_bad_input(change: dict[str, Any], options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        partial(ppo_loss, **options)(**{**of(draw(), "old_log_probs"), **change})


class Trainer(SimpleNamespace):
    """What the oracle's method reads of its trainer; every option that is not named is off."""

    def __getattr__(self, name: str) -> None:
        return None


@pytest.mark.parametrize(("kind", "aggregation"), [("grpo", "sequence"), ("bnpo", "token"), ("dr_grpo", "constant")])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("options", [{}, {"kl_coef": 0.3}, {"dual_clip": 1.25}], ids=["plain", "kl", "dual"])
def test_agrees_with_trl(kind: str, aggregation: Any, ratio: str, options: dict[str, float]) -> None:
    if importlib.util.find_spec("trl") is None:
        pytest.skip("trl is not installed; cure: make test-peers")
    from trl.trainer import grpo_trainer

    batch = draw(5)
    logprobs = compute_label_logprobs(batch["logits"], batch["labels"]).double()
    trainer = Trainer(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
        top_entropy_quantile=1.0,
        beta=options.get("kl_coef", 0.0),
        importance_sampling_level=ratio,
        epsilon_low=0.1,
        epsilon_high=0.2,
        args=Trainer(delta=options.get("dual_clip")),
        loss_type=kind,
        current_gradient_accumulation_steps=1,
        max_completion_length=9,
        model=torch.nn.Identity(),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    none = torch.zeros(3, 0, dtype=torch.int64)
    inputs = {
        "prompt_ids": none,
        "prompt_mask": none,
        "completion_ids": batch["labels"],
        "completion_mask": batch["loss_mask"],
        "advantages": batch["advantages"],
        "old_per_token_logps": batch["old_log_probs"],
        "ref_per_token_logps": batch["ref_log_probs"],
    }
    expected = grpo_trainer.GRPOTrainer._compute_loss(trainer, torch.nn.Identity(), inputs)
    mask, old = batch["loss_mask"], batch["old_log_probs"]
    if ratio == "sequence":
        old = (old * mask).sum(1) / mask.sum(1)
    names = ("ref_log_probs",) if "kl_coef" in options else ()
    found = ppo_loss(
        **of(batch, *names),
        old_log_probs=old,
        clip_range=0.1,
        clip_range_high=0.2,
        aggregation=aggregation,
        max_tokens=9,
        **options,
    )
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
