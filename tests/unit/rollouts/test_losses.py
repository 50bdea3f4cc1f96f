"""Losses against closed forms, finite differences and autograd; log-probs against the plain formula."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rollouts.kernels.cpu import name_bf16_instructions
from rollouts.kernels.linear import linear
from rollouts.kernels.log_softmax import log_softmax
from rollouts.kernels.onednn import plain_weights_are_exact
from rollouts.training.objectives import PRESETS, Objective
from rollouts.training.rl_losses import (
    LossInputs,
    TokenStats,
    compute_head_logprobs,
    compute_logprobs,
    nll_loss,
    policy_loss,
)

AIPO = PRESETS["aipo"]


def make_inputs(trainer: list[float], inference: list[float], advantages: list[float], **more: object) -> LossInputs:
    n = len(trainer)
    streams = {"loss_mask": [1.0] * n, "sequence": [0] * n, **more}
    return LossInputs(
        trainer_logprobs=torch.tensor(trainer, dtype=torch.float64, requires_grad=True),
        inference_logprobs=torch.tensor(inference, dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        loss_mask=torch.tensor(streams["loss_mask"], dtype=torch.float64),
        sequence=torch.tensor(streams["sequence"]),
        teacher_logprobs=None if "teacher" not in more else torch.tensor(more["teacher"], dtype=torch.float64),
    )


def gradient(inputs: LossInputs, spec: Objective) -> list[float]:
    output = policy_loss(inputs, spec)
    return torch.autograd.grad(output.loss_sum, inputs.trainer_logprobs)[0].tolist()


def test_aipo_closed_form_and_gradient() -> None:
    # ratios 2, 1/4 and 20, the last above delta = 8
    trainer = [-1.0, -2.0, -0.5]
    inference = [-1.0 - math.log(2), -2.0 + math.log(4), -0.5 - math.log(20)]
    inputs = make_inputs(trainer, inference, [1.5, -1.0, 0.5])
    output = policy_loss(inputs, AIPO)
    weights = [2 * 1.5, 0.25 * -1.0, 8 * 0.5]
    assert output.loss_sum.item() == pytest.approx(
        -sum(w * t for w, t in zip(weights, trainer, strict=True)), abs=1e-12
    )
    assert output.count.item() == 3
    assert gradient(inputs, AIPO) == pytest.approx([-w for w in weights], abs=1e-12)
    summary = output.stats.summary()
    assert summary["is_ratio_capped/mean"] == pytest.approx(1 / 3)
    assert summary["importance_ratio/max"] == pytest.approx(20)
    expected_kl = [r - math.log(r) - 1 for r in (2, 0.25, 20)]
    assert summary["mismatch_kl/mean"] == pytest.approx(sum(expected_kl) / 3)
    assert summary["mismatch_kl/min"] == pytest.approx(min(expected_kl))


def test_no_cap_leaves_the_ratio_alone() -> None:
    inputs = make_inputs([-0.5], [-0.5 - math.log(20)], [1.0])
    assert gradient(inputs, replace(AIPO, ratio_cap=None)) == pytest.approx([-20.0])


def test_taus_mix_the_advantage_without_gradient_through_it() -> None:
    spec = replace(AIPO, adv_tau=0.5, teacher_tau=0.7, student_tau=0.3)
    trainer, teacher, advantage = [-1.0, -3.0], [-0.2, -4.0], [2.0, -1.0]
    inputs = make_inputs(trainer, trainer, advantage, teacher=teacher)
    mixed = [0.5 * a + 0.7 * t - 0.3 * s for a, t, s in zip(advantage, teacher, trainer, strict=True)]
    assert gradient(inputs, spec) == pytest.approx([-m for m in mixed], abs=1e-12)
    summary = policy_loss(inputs, spec).stats.summary()
    assert summary["combined_advantage/mean"] == pytest.approx(sum(mixed) / 2)
    # ls - lt: positive where the student is surer than the teacher
    assert summary["teacher_kl/mean"] == pytest.approx((-1.0 + 0.2 + -3.0 + 4.0) / 2)
    assert summary["teacher_kl_k3/min"] >= 0


def test_a_teacher_weight_without_a_teacher_is_refused() -> None:
    with pytest.raises(ValueError, match="teacher_tau"):
        policy_loss(make_inputs([-1.0], [-1.0], [1.0]), replace(AIPO, teacher_tau=0.5))


@pytest.mark.parametrize(
    ("bound", "value", "dropped"),
    [
        ("token_mask_low", 0.5, [0, 1, 0, 0]),
        ("token_mask_high", 3.0, [0, 0, 0, 1]),
        ("seq_ratio_mask_low", 0.8, [1, 1, 0, 0]),  # sqrt(2 * 1/8) = .5 and sqrt(1 * 4) = 2
        ("seq_ratio_mask_high", 1.5, [0, 0, 1, 1]),
        ("sequence_mask_low", 0.5, [1, 1, 0, 0]),
        ("sequence_mask_high", 3.0, [0, 0, 1, 1]),
    ],
)
def test_each_mask_drops_its_tokens(bound: str, value: float, dropped: list[int]) -> None:
    ratios = [2.0, 0.125, 1.0, 4.0]
    trainer = [-1.0, -1.5, -2.0, -2.5]
    inference = [t - math.log(r) for t, r in zip(trainer, ratios, strict=True)]
    inputs = make_inputs(trainer, inference, [1.0] * 4, sequence=[0, 0, 1, 1])
    grads = gradient(inputs, replace(AIPO, **{bound: value}))
    assert grads == pytest.approx([0.0 if d else -r for d, r in zip(dropped, ratios, strict=True)], abs=1e-12)
    output = policy_loss(inputs, replace(AIPO, **{bound: value}))
    assert output.stats.summary()["is_masked/mean"] == sum(dropped) / 4
    assert output.count.item() == 4, "dropped tokens still count, or dropping would raise the others' weight"


@pytest.mark.parametrize(
    ("outside", "bounds"),
    [
        (-9.0, {"sequence_mask_high": 2.0, "seq_ratio_mask_high": 2.0}),
        (9.0, {"sequence_mask_low": 0.5, "seq_ratio_mask_low": 0.5}),
    ],
)
def test_masked_tokens_do_not_enter_sequence_statistics(outside: float, bounds: dict[str, float]) -> None:
    # the first token would pull the sequence over both bounds, but it carries no loss
    inputs = make_inputs([-1.0, -1.0], [outside, -1.0], [1.0, 1.0], loss_mask=[0.0, 1.0])
    assert gradient(inputs, replace(AIPO, **bounds)) == pytest.approx([0.0, -1.0])


def test_an_infinite_ratio_that_is_dropped_leaves_no_nan() -> None:
    inputs = make_inputs([-1.0, -1.0], [-2000.0, -1.0], [1.0, 1.0])
    grads = gradient(inputs, replace(AIPO, ratio_cap=None, token_mask_high=8.0))
    assert grads == pytest.approx([0.0, -1.0])


def test_mismatch_is_exactly_zero_on_policy() -> None:
    logprobs = torch.randn(50).tolist()
    summary = policy_loss(make_inputs(logprobs, logprobs, [1.0] * 50), AIPO).stats.summary()
    assert summary["mismatch_kl/max"] == summary["mismatch_kl/min"] == 0.0
    assert summary["geo_seq_ratio/mean"] == 1.0


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 12), st.sampled_from([None, 1.2, 8.0]))
def test_aipo_gradient_is_the_finite_difference_of_its_surrogate(seed: int, n: int, cap: float | None) -> None:
    """The coefficient is detached, so the derivative is that of `-c logp` with c held fixed."""
    torch.manual_seed(seed)
    logits = torch.randn(n, 7, dtype=torch.float64)
    labels = torch.randint(7, (n,))
    temperature = torch.rand(n, dtype=torch.float64) + 0.5
    inference, advantages = -torch.rand(n).double() * 3, torch.randn(n).double()
    spec = replace(AIPO, ratio_cap=cap)

    def logprobs(z: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(z / temperature[:, None], -1).gather(-1, labels[:, None]).squeeze(1)

    free = logits.clone().requires_grad_()
    inputs = LossInputs(logprobs(free), inference, advantages, torch.ones(n).double(), torch.zeros(n).long())
    policy_loss(inputs, spec).loss_sum.backward()
    ratio = (logprobs(logits) - inference).exp()
    fixed = (ratio if cap is None else ratio.clamp(max=cap)) * advantages
    row, column, eps = seed % n, seed % 7, 1e-6
    bumped = [logits.clone(), logits.clone()]
    bumped[0][row, column] += eps
    bumped[1][row, column] -= eps
    up, down = (-(fixed * logprobs(z)).sum().item() for z in bumped)
    assert free.grad is not None
    assert free.grad[row, column].item() == pytest.approx((up - down) / (2 * eps), abs=1e-7)


def test_nll_is_the_cross_entropy_over_masked_tokens() -> None:
    logits, labels = torch.randn(9, 5, dtype=torch.float64), torch.randint(5, (9,))
    mask = torch.tensor([1.0, 0, 1, 1, 0, 0, 1, 1, 1], dtype=torch.float64)
    logprobs = torch.log_softmax(logits, -1).gather(-1, labels[:, None]).squeeze(1)
    zeros = torch.zeros(9).double()
    output = nll_loss(LossInputs(logprobs, zeros, zeros, mask, zeros.long()))
    expected = torch.nn.functional.cross_entropy(logits[mask > 0], labels[mask > 0], reduction="sum")
    assert output.loss_sum.item() == pytest.approx(expected.item(), abs=1e-10)
    assert output.count.item() == 6


def test_logprobs_follow_the_sampler_operation_by_operation() -> None:
    logits, labels, temperature = torch.randn(20, 33), torch.randint(33, (20,)), torch.rand(20) + 0.1
    logprobs, entropy = compute_logprobs(logits, labels, temperature)
    table = log_softmax(logits / temperature[:, None])
    assert torch.equal(logprobs, table.gather(-1, labels[:, None]).squeeze(-1))
    expected = torch.distributions.Categorical(logits=logits / temperature[:, None]).entropy()
    assert torch.allclose(entropy, expected, atol=1e-5)


class Largest(TorchDispatchMode):
    """The most numbers that any tensor made under it holds."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return result


def test_head_never_materializes_all_logits() -> None:
    tokens, width, vocab, per_chunk = 512, 16, 96, 96 * 32
    hidden, weight = torch.randn(tokens, width, requires_grad=True), torch.randn(vocab, width, requires_grad=True)
    labels, temperature = torch.randint(vocab, (tokens,)), torch.rand(tokens) + 0.5
    saved: list[int] = []
    plain_weights_are_exact()  # its product, once in a process, is not of the head
    with (
        Largest() as largest,
        torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x.numel()), x)[1], lambda x: x),
    ):
        logprobs, entropy = compute_head_logprobs(hidden, weight, labels, temperature, per_chunk)
        (logprobs.sum() + entropy.sum()).backward()
    assert largest.numbers <= max(tokens * width, per_chunk) < tokens * vocab / 4
    assert sum(saved) <= tokens * width + vocab * width + 5 * tokens, "what waits for the backward is linear in tokens"
    assert hidden.grad is not None and weight.grad is not None
    with Largest() as plain:
        compute_logprobs(hidden @ weight.T, labels, temperature)
    assert plain.numbers == tokens * vocab, "the probe sees a table of all logits where there is one"


@pytest.mark.parametrize("per_chunk", [1 << 20, 5 * 7])
def test_head_gradcheck_of_log_probs_and_entropies(per_chunk: int) -> None:
    hidden, weight = torch.randn(20, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    labels, temperature = torch.randint(5, (20,)), torch.rand(20, dtype=torch.float64) + 0.5

    def head(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return compute_head_logprobs(hidden, weight, labels, temperature, per_chunk)

    assert torch.autograd.gradcheck(head, (hidden.requires_grad_(), weight.requires_grad_()))
    only = torch.autograd.grad(head(hidden, weight)[0].sum(), weight)[0]
    plain = compute_logprobs(hidden @ weight.T, labels, temperature)[0]
    assert torch.allclose(only, torch.autograd.grad(plain.sum(), weight)[0], atol=1e-12)


@pytest.mark.skipif(not name_bf16_instructions(), reason="no instructions for bf16; cure: a CPU with AVX512_BF16")
@pytest.mark.parametrize("capped", [False, True])
def test_head_with_rounded_products(capped: bool) -> None:
    """The bits of a rounded layer, whatever the chunks, and gradients as near to its own as bf16 is."""
    draw = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(40, 64, generator=draw), torch.randn(96, 64, generator=draw) / 4
    labels, temperature = torch.randint(96, (40,), generator=draw), torch.full((40,), 0.7)
    cap = 30.0 if capped else None  # without kernels
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    logits = linear(hidden, weight, rounded=True)
    expected, _ = compute_logprobs(logits if cap is None else cap * torch.tanh(logits / cap), labels, temperature)
    grads = torch.autograd.grad(expected.sum(), leaves)
    for size in (40 * 96, 500):
        found, _ = compute_head_logprobs(hidden, weight, labels, temperature, size, cap, rounded=True)
        assert torch.equal(found, expected)
        for mine, value in zip(torch.autograd.grad(found.sum(), leaves), grads, strict=True):
            assert (mine - value).norm() < 4e-3 * value.norm()


def test_head_of_bf16_model_accumulates_in_fp32() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(256, 8), torch.randn(64, 8)
    labels, ones = torch.randint(64, (256,)), torch.ones(256)
    exact = torch.autograd.grad(compute_head_logprobs(hidden, weight.requires_grad_(), labels, ones)[0].sum(), weight)[
        0
    ]
    errors = []
    for per_chunk in (1 << 24, 64 * 4):
        narrow = weight.detach().bfloat16().requires_grad_()
        logprobs, _ = compute_head_logprobs(hidden.bfloat16(), narrow, labels, ones, per_chunk)
        [grad] = torch.autograd.grad(logprobs.sum(), narrow)
        assert grad.dtype == torch.bfloat16 and logprobs.dtype == torch.float32
        errors.append((grad.float() - exact).norm() / exact.norm())
    assert errors[1] < 1.4 * errors[0] < 0.1, errors  # summed in bfloat16 it is about twice as far off


@pytest.mark.parametrize("tokens", [4, 37, 64])
def test_chunked_logprobs_match_unchunked(tokens: int) -> None:
    torch.manual_seed(tokens)
    hidden, weight = torch.randn(tokens, 32, requires_grad=True), torch.randn(48, 32, requires_grad=True)
    labels, temperature = torch.randint(48, (tokens,)), torch.ones(tokens)
    results = []
    for logits_per_chunk in (1 << 24, 48 * 20, 48 * 7):  # one chunk; several, stored; for 37 and 64 tokens recomputed
        logprobs, entropy = compute_head_logprobs(hidden, weight, labels, temperature, logits_per_chunk)
        loss = (logprobs * torch.arange(tokens)).sum() + 0.3 * entropy.sum()
        results.append((logprobs, entropy, *torch.autograd.grad(loss, (hidden, weight))))
    for chunked in results[1:]:
        assert torch.equal(results[0][0], chunked[0]) and torch.equal(results[0][1], chunked[1])
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(results[0][2:], chunked[2:], strict=True))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30), st.integers(0, 30))
def test_stats_do_not_depend_on_how_tokens_are_split(values: list[float], cut: int) -> None:
    stream = torch.tensor(values, dtype=torch.float64)
    everything = torch.ones(len(values), dtype=torch.bool)
    merged = TokenStats.measure({"x": stream[:cut]}, everything[:cut])
    merged.merge(TokenStats.measure({"x": stream[cut:]}, everything[cut:]))
    # As measured on a GPU, with a value that does not count.
    on_gpu = TokenStats(masked=[({"x": stream[:cut]}, everything[:cut])])
    padded, mask = torch.cat((stream[cut:], stream[:1])), torch.cat((everything[cut:], ~everything[:1]))
    on_gpu.merge(TokenStats(masked=[({"x": padded}, mask)]))
    assert not on_gpu.empty
    summary = on_gpu.summary()
    assert summary == merged.summary() and summary == on_gpu.summary()
    assert summary["x/mean"] == pytest.approx(stream.mean().item(), abs=1e-9)
    assert summary["x/std"] == pytest.approx(stream.std(correction=0).item(), abs=1e-4)
    assert (summary["x/min"], summary["x/max"]) == (min(values), max(values))


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.floats(-1e3, 1e3, width=32), max_size=40), min_size=1, max_size=4), st.sampled_from([5, 99])
)
@example([[0.5] * 8, [0.25] * 8], 5)  # narrow, and only a sample of it is sent
def test_stats_of_several_ranks_are_those_of_all_values(ranks: list[list[float]], most: int) -> None:
    merged = TokenStats()
    for values in ranks:
        part = TokenStats.measure({"x": torch.tensor(values)})
        part.ratios["y"] = torch.tensor([sum(values), len(values)], dtype=torch.float64)
        merged.merge(TokenStats.decode(part.encode(most)))
    everything = sorted(value for values in ranks for value in values)
    summary = merged.summary()
    if not everything:
        assert summary == {}
        return
    assert summary["x/mean"] == pytest.approx(statistics.fmean(everything), abs=1e-6)
    assert summary["y"] == pytest.approx(statistics.fmean(everything), abs=1e-6)
    assert summary["x/std"] == pytest.approx(statistics.pstdev(everything), abs=1e-3)
    assert (summary["x/min"], summary["x/max"]) == (everything[0], everything[-1])
    if most == 99:
        assert summary["x/median"] == pytest.approx(statistics.median(everything), abs=1e-6)
    else:
        assert everything[0] <= summary["x/median"] <= everything[-1]


def test_the_median_of_many_ranks_is_that_of_a_weighted_sample() -> None:
    merged = TokenStats.measure({"x": torch.full((5,), 100.0)})
    merged.merge(TokenStats.decode(TokenStats.measure({"x": torch.arange(10.0)}).encode(most=5)))
    summary = merged.summary()
    # 0 2 4 6 8 stand for two each, 100 five times for itself: half of 15 is reached at 6; of all values it is 7
    assert (summary["x/median"], summary["x/max"]) == (6.0, 100.0)
    assert summary["x/mean"] == pytest.approx((45 + 500) / 15)


def test_stats_of_nothing_are_silent() -> None:
    nothing = TokenStats.measure({"x": torch.ones(3)}, torch.zeros(3, dtype=torch.bool))
    assert nothing.summary() == {} == TokenStats().summary()
