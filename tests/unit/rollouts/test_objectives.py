"""Every preset against its formula in plain Python and finite differences; gradient invariances."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prime_rl.trainer.config import TrainConfig
from prime_rl.trainer.rl.config import AnnealConfig, EntropyControlConfig, LossConfig
from prime_rl.trainer.rl.data import check_batch
from prime_rl.trainer.rl.loss import build_loss, build_loss_schedule, build_objective
from rollouts.training.batching import pack_samples
from rollouts.training.objectives import PRESETS, Objective
from rollouts.training.rl_losses import LossInputs, PolicyLoss, TokenStats, policy_loss
from rollouts.training.types import Sample

LIMIT = 7  # max_tokens of loss_aggregation "constant"
NAMES = [name for name, row in PRESETS.items() if name != "custom" and not row.teacher_tau]  # others: test_distill.py
Row = list[float]


def preset(name: str) -> Objective:
    row = PRESETS[name]
    return replace(row, max_tokens=LIMIT) if row.loss_aggregation == "constant" else row


# --- the formulas, one function each, of one sequence: l is what is differentiated, l0 the same held fixed ------------


def mean(values: Row) -> float:
    return sum(values) / len(values)


def clip(x: float, low: float, high: float) -> float:
    return max(low, min(high, x))


def truncated(cap: float) -> Callable[[Row, Row, Row, Row], Row]:
    return lambda l, l0, li, a: [-min(math.exp(z - s), cap) * k * x for x, z, s, k in zip(l, l0, li, a, strict=True)]


def clipped(low: float, high: float, dual: float = math.inf) -> Callable[[Row, Row, Row, Row], Row]:
    def loss(l: Row, l0: Row, li: Row, a: Row) -> Row:
        out = []
        for x, s, k in zip(l, li, a, strict=True):
            r = math.exp(x - s)
            value = -min(r * k, clip(r, 1 - low, 1 + high) * k)
            out.append(min(value, -dual * k) if k < 0 else value)
        return out

    return loss


def gspo(l: Row, l0: Row, li: Row, a: Row) -> Row:
    s = math.exp(mean([x - i for x, i in zip(l, li, strict=True)]))
    return [-min(s * k, clip(s, 1 - 3e-4, 1 + 4e-4) * k) for k in a]


def sapo(l: Row, l0: Row, li: Row, a: Row) -> Row:
    out = []
    for x, s, k in zip(l, li, a, strict=True):
        t = 1.0 if k > 0 else 1.05
        out.append(-4 / t / (1 + math.exp(-t * (math.exp(x - s) - 1))) * k)
    return out


def gmpo(l: Row, l0: Row, li: Row, a: Row) -> Row:
    gaps = [min(x - s, 0.4) if k > 0 else max(x - s, -0.4) for x, s, k in zip(l, li, a, strict=True)]
    return [-math.exp(mean(gaps)) * k for k in a]


def vespo(l: Row, l0: Row, li: Row, a: Row) -> Row:
    w = math.exp(sum(x - s for x, s in zip(l0, li, strict=True)))
    weights = [math.exp(3 - 3 * w) * w**2 if k > 0 else math.exp(2 - 2 * w) * w**3 for k in a]
    return [-weight * k * x for weight, k, x in zip(weights, a, l, strict=True)]


def cispo(l: Row, l0: Row, li: Row, a: Row) -> Row:
    return [-clip(math.exp(z - s), 0.0, 1.28) * k * x for x, z, s, k in zip(l, l0, li, a, strict=True)]


def dppo(l: Row, l0: Row, li: Row, a: Row) -> Row:
    out = []
    for x, z, s, k in zip(l, l0, li, a, strict=True):
        moved = math.exp(z) - math.exp(s)
        is_far = moved > 0.2 if k > 0 else moved < -0.2
        out.append((0.0 if is_far else -k * math.exp(x - s)) + 1e-3 * (x - s) ** 2)
    return out


FORMULAS: dict[str, Callable[[Row, Row, Row, Row], Row]] = {
    "aipo": truncated(8.0),
    "grpo": clipped(0.2, 0.2),
    "gspo": gspo,
    "luspo": gspo,
    "sapo": sapo,
    "gmpo": gmpo,
    "vespo": vespo,
    "maxrl": truncated(8.0),
    "opo": truncated(8.0),
    "rloo": truncated(8.0),
    "cispo": cispo,
    "ppo": clipped(0.2, 0.2, 3.0),
    "dapo": clipped(0.2, 0.28),
    "dr_grpo": clipped(0.2, 0.2),
    "reinforce": lambda l, l0, li, a: [-k * x for x, k in zip(l, a, strict=True)],
    "dppo": dppo,
}
MEANS = ("grpo", "gspo", "sapo", "gmpo")
PER_SEQUENCE = {**dict.fromkeys(MEANS, mean), **dict.fromkeys(("luspo", "maxrl", "rloo"), sum)}
PER_SEQUENCE["dr_grpo"] = lambda x: sum(x) / LIMIT


def formula(name: str, l: list[Row], l0: list[Row], li: list[Row], a: list[Row]) -> float:
    rows = [FORMULAS[name](*row) for row in zip(l, l0, li, a, strict=True)]
    if name in PER_SEQUENCE:
        return mean([PER_SEQUENCE[name](row) for row in rows])
    return mean([x for row in rows for x in row])


# --- batches ----------------------------------------------------------------------------------------------------------


def pack(l: list[Row], li: list[Row], a: list[Row], **more: Any) -> LossInputs:
    """Rows of loss tokens side by side, in fp64."""

    def flat(rows: list[Row]) -> Tensor:
        return torch.tensor([x for row in rows for x in row], dtype=torch.float64)

    sequence = torch.tensor([i for i, row in enumerate(l) for _ in row], dtype=torch.int64)
    logprobs = flat(l).requires_grad_()
    return LossInputs(logprobs, flat(li), flat(a), torch.ones_like(flat(li)), sequence, num_sequences=len(l), **more)


def draw(seed: int, lengths: list[int], spread: float = 0.5) -> tuple[list[Row], list[Row], list[Row]]:
    generator = torch.Generator().manual_seed(seed)

    def noise(n: int) -> Tensor:
        return torch.randn(n, generator=generator, dtype=torch.float64)

    inference = [-0.1 - 3 * noise(n).abs() for n in lengths]
    trainer = [(row + spread * noise(len(row))).clamp(max=-1e-3) for row in inference]
    advantages = [noise(1).expand(n) for n in lengths]
    return tuple([row.tolist() for row in rows] for rows in (trainer, inference, advantages))  # type: ignore[return-value]


def value_and_gradient(inputs: LossInputs, objective: Objective, **options: Any) -> tuple[float, Tensor]:
    output = policy_loss(inputs, objective, **options)
    loss = output.loss_sum / output.count
    [gradient] = torch.autograd.grad(loss, inputs.trainer_logprobs)
    return loss.item(), gradient


def spread_of(name: str) -> float:
    """Standard deviation of log-ratios for which the bounds of a preset bind now and then."""
    return 6e-4 if name in ("gspo", "luspo") else 1.5


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(4))
def test_presets_match_formula_and_finite_differences(name: str, seed: int) -> None:
    """Values to 1e-12; differences of the plain formula, in which detached parts are held fixed, to 1e-6."""
    l, li, a = draw(seed, [5, 1, 3, 7], spread_of(name))
    value, gradient = value_and_gradient(pack(l, li, a), preset(name))
    assert value == pytest.approx(formula(name, l, l, li, a), abs=1e-12)
    eps, expected = 1e-6, []
    for i, row in enumerate(l):
        for t in range(len(row)):
            ways = []
            for sign in (1, -1):
                moved = [list(r) for r in l]
                moved[i][t] += sign * eps
                ways.append(formula(name, moved, l, li, a))
            expected.append((ways[0] - ways[1]) / (2 * eps))
    assert gradient.tolist() == pytest.approx(expected, abs=1e-6, rel=1e-6)


def test_gradients_of_sapo_and_luspo_are_closed_forms() -> None:
    """Of one sequence, to 1e-9: sapo 4 p (1 - p) r A / n; luspo s A, as n s A depends on n log-probs."""
    l, li = [-1.0, -2.0, -0.5], [-1.4, -1.5, -0.6]
    ratios = [math.exp(x - s) for x, s in zip(l, li, strict=True)]
    for a, t in ((0.7, 1.0), (-0.7, 1.05)):
        _, gradient = value_and_gradient(pack([l], [li], [[a] * 3]), preset("sapo"))
        gates = [1 / (1 + math.exp(-t * (r - 1))) for r in ratios]
        expected = [-4 * p * (1 - p) * r * a / 3 for p, r in zip(gates, ratios, strict=True)]
        assert gradient.tolist() == pytest.approx(expected, abs=1e-9)
    _, gradient = value_and_gradient(pack([l], [[x - 2e-4 for x in l]], [[0.7] * 3]), preset("luspo"))
    assert gradient.tolist() == pytest.approx([-math.exp(2e-4) * 0.7] * 3, abs=1e-9)


@pytest.mark.parametrize("name", ["aipo", "grpo", "gspo", "cispo", "ppo"])
@pytest.mark.parametrize("cap", [1.1, 5.0])
def test_recomputed_old_logprobs_match_decoupled_ppo(name: str, cap: float) -> None:
    """2110.00641, equation 4: ratios against the old policy, the loss times old policy / sampler, capped."""
    l, old, a = draw(5, [4, 2, 6], spread_of(name))
    inference = draw(6, [4, 2, 6])[1]
    base, _ = value_and_gradient(pack(l, old, a), preset(name))
    assert base == pytest.approx(formula(name, l, l, old, a), abs=1e-12)
    gap = [[o - i for o, i in zip(*rows, strict=True)] for rows in zip(old, inference, strict=True)]
    if name == "gspo":
        gap = [[mean(row)] * len(row) for row in gap]
    weights = [[min(math.exp(x), cap) for x in row] for row in gap]
    flat_old = pack(old, old, a).inference_logprobs
    decoupled = replace(preset(name), behavior_cap=cap)
    ours = value_and_gradient(pack(l, inference, a, old_logprobs=flat_old), decoupled)
    scaled = [[w * k for w, k in zip(*rows, strict=True)] for rows in zip(weights, a, strict=True)]
    expected = value_and_gradient(pack(l, old, scaled), preset(name))
    if name == "gspo":  # one advantage and one weight per sequence
        assert all(len(set(row)) == 1 for row in scaled)
    assert ours[0] == pytest.approx(formula(name, l, l, old, scaled), abs=1e-9)
    assert ours[0] == pytest.approx(expected[0], abs=1e-9) and torch.allclose(ours[1], expected[1], atol=1e-9, rtol=0)
    assert ours[0] != pytest.approx(base, abs=1e-3), "the weights differ from 1"


def test_masks_compare_with_the_sampler() -> None:
    l, inference, old = [[-1.0, -1.0]], [[-1.0, -3.0]], torch.tensor([-3.0, -1.0], dtype=torch.float64)
    _, gradient = value_and_gradient(
        pack(l, inference, [[1.0, 1.0]], old_logprobs=old), vary("ppo", {"token_mask_high": 2.0, "clip_high": None})
    )
    assert gradient[0] != 0 and gradient[1] == 0


def test_the_batches_reach_every_bound() -> None:
    """The test above is one of every bound only if each binds: twice as wide it gives another loss."""
    for name in NAMES:
        row = preset(name)
        batches = [pack(*draw(seed, [5, 1, 3, 7], spread_of(name))) for seed in range(4)]
        choices = (
            "ratio_cap clip_low clip_high dual_clip log_clip_low log_clip_high gate_pos gate_neg gamma_pos gamma_neg"
        )
        for choice in (*choices.split(), "max_prob_diff"):
            bound = getattr(row, choice)
            if bound is None or (choice == "clip_low" and bound >= 1):  # a ratio is never below 0
                continue
            is_pair = isinstance(bound, tuple)
            wide = replace(row, **{choice: (2 * bound[0], bound[1]) if is_pair else 2 * bound})  # type: ignore[arg-type]
            differ = [value_and_gradient(b, row)[0] != value_and_gradient(b, wide)[0] for b in batches]
            assert any(differ), (name, choice)


@pytest.mark.parametrize("name", [name for name in NAMES if not PRESETS[name].detached])
def test_gradients_that_flow_through_the_ratio_pass_gradcheck(name: str) -> None:
    l, li, a = draw(11, [4, 2, 3], spread_of(name))
    inputs = pack(l, li, a)

    def loss(logprobs: Tensor) -> Tensor:
        return policy_loss(replace(inputs, trainer_logprobs=logprobs), preset(name)).loss_sum

    assert torch.autograd.gradcheck(loss, (inputs.trainer_logprobs,), eps=1e-7, atol=1e-5)


# --- what may not change a gradient -----------------------------------------------------------------------------------

many = settings(max_examples=25, deadline=None)
batches = {"seed": st.integers(0, 10**6), "lengths": st.lists(st.integers(1, 6), min_size=1, max_size=6)}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"token_mask_low": 0.5, "token_mask_high": 2.0},
    {"seq_ratio_mask_low": 0.8, "sequence_mask_high": 2.5},
    {
        "kl_tau": 0.1,
        "inference_kl_coef": 0.2,
        "entropy_coef": 0.1,
        "kl_coef": 0.3,
        "teacher_tau": 0.5,
        "student_tau": 0.2,
    },
]


def vary(name: str, options: dict[str, Any]) -> Objective:
    return replace(preset(name), **options)


def with_streams(inputs: LossInputs, seed: int) -> LossInputs:
    generator = torch.Generator().manual_seed(seed)
    n = len(inputs.sequence)
    teacher = -torch.rand(n, generator=generator, dtype=torch.float64) * 3
    entropy = torch.rand(n, generator=generator, dtype=torch.float64)
    return replace(inputs, teacher_logprobs=teacher, entropy=entropy)


def select(inputs: LossInputs, index: Tensor) -> LossInputs:
    """Tokens at `index`, as leaves of their own, their sequences renumbered."""
    sequence = inputs.sequence[index]
    numbers = {old: new for new, old in enumerate(dict.fromkeys(sequence.tolist()))}
    return LossInputs(
        inputs.trainer_logprobs.detach()[index].requires_grad_(),
        inputs.inference_logprobs[index],
        inputs.advantages[index],
        inputs.loss_mask[index],
        torch.tensor([numbers[i] for i in sequence.tolist()], dtype=torch.int64),
        None if inputs.teacher_logprobs is None else inputs.teacher_logprobs[index],
        None if inputs.entropy is None else inputs.entropy[index],
        len(numbers),
    )


@many
@given(**batches, name=st.sampled_from(NAMES), options=st.sampled_from(OPTIONS))
def test_order_padding_and_masked_tokens_change_nothing(
    seed: int, lengths: list[int], name: str, options: dict[str, Any]
) -> None:
    """Invariant 20: padding, permutation of sequences, and no gradient for tokens without loss, for any values."""
    inputs, objective = with_streams(pack(*draw(seed, lengths)), seed), vary(name, options)
    value, gradient = value_and_gradient(inputs, objective)
    generator = torch.Generator().manual_seed(seed)
    order = torch.cat(
        [torch.nonzero(inputs.sequence == i)[:, 0] for i in torch.randperm(len(lengths), generator=generator).tolist()]
    )
    shuffled_value, shuffled = value_and_gradient(select(inputs, order), objective)
    assert shuffled_value == pytest.approx(value, abs=1e-12)
    assert torch.allclose(shuffled, gradient[order], atol=1e-12)

    def widen(stream: Tensor, junk: list[float]) -> Tensor:
        """Two tokens without loss behind every sequence."""
        rows = [stream[inputs.sequence == i] for i in range(len(lengths))]
        return torch.cat([torch.cat((row, torch.tensor(junk).to(row.dtype))) for row in rows])

    padded = LossInputs(
        widen(inputs.trainer_logprobs.detach(), [-700.0, 0.0]).requires_grad_(),
        widen(inputs.inference_logprobs, [0.0, -700.0]),
        widen(inputs.advantages, [1e9, -1e9]),
        widen(inputs.loss_mask, [0.0, 0.0]),
        torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths) + 2),
        widen(inputs.teacher_logprobs, [-1e6, 1e6]) if inputs.teacher_logprobs is not None else None,
        widen(inputs.entropy, [1e9, 1e9]) if inputs.entropy is not None else None,
    )
    padded_value, padded_gradient = value_and_gradient(padded, objective)
    assert padded_value == pytest.approx(value, abs=1e-12)
    assert torch.allclose(padded_gradient[padded.loss_mask > 0], gradient, atol=1e-12)
    assert torch.all(padded_gradient[padded.loss_mask == 0] == 0)


@many
@given(**batches, cut=st.integers(0, 6), name=st.sampled_from(NAMES), options=st.sampled_from(OPTIONS))
def test_micro_batches_add_up_to_the_whole(
    seed: int, lengths: list[int], cut: int, name: str, options: dict[str, Any]
) -> None:
    """Invariant 20: sums over the global count, whichever micro-batch or rank a sequence is in."""
    inputs, objective = with_streams(pack(*draw(seed, lengths)), seed), vary(name, options)
    value, gradient = value_and_gradient(inputs, objective)
    parts = [select(inputs, torch.nonzero(inputs.sequence < cut)[:, 0])]
    parts.append(select(inputs, torch.nonzero(inputs.sequence >= cut)[:, 0]))
    outputs = [policy_loss(part, objective) for part in parts]
    count = sum(output.count for output in outputs)
    total = sum(output.loss_sum for output in outputs) / count
    found = torch.cat(torch.autograd.grad(total, [part.trainer_logprobs for part in parts]))
    assert total.item() == pytest.approx(value, abs=1e-12) and torch.allclose(found, gradient, atol=1e-12)
    merged = outputs[0].stats
    merged.merge(outputs[1].stats)
    whole = policy_loss(inputs, objective).stats.summary()
    assert merged.summary() == pytest.approx(whole, abs=1e-9) and {"loss/median", "loss/policy"} <= whole.keys()


@many
@given(**batches, name=st.sampled_from(NAMES))
def test_on_policy_every_family_is_reinforce(seed: int, lengths: list[int], name: str) -> None:
    """Invariant 20: where the trainer is the sampler every ratio is 1, no bound binds, and the gradient is -A."""
    _, li, a = draw(seed, lengths)
    objective = replace(preset(name), loss_aggregation="token-mean", max_tokens=None)
    _, gradient = value_and_gradient(pack(li, li, a), objective)
    _, expected = value_and_gradient(pack(li, li, a), PRESETS["reinforce"])
    assert torch.allclose(gradient, expected, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_an_infinite_ratio_that_is_dropped_leaves_no_nan(name: str) -> None:
    inputs = pack([[-1.0], [-1.0]], [[-2000.0], [-1.0]], [[-1.0], [1.0]])
    _, gradient = value_and_gradient(inputs, vary(name, {"token_mask_high": 8.0, "kl_tau": 0.0}))
    assert torch.isfinite(gradient).all() and gradient[0] == 0 and gradient[1] != 0


def test_ratios_of_a_sequence() -> None:
    """Of ratios 2 and 1/8: geometric 1/2, arithmetic 17/16, product 1/4; a weight on each, without gradient."""
    li = [[-1.0 - math.log(2), -1.0 + math.log(8)]]
    for kind, expected in (("geometric", 0.5), ("arithmetic", 17 / 16), ("product", 0.25)):
        objective = Objective("aipo", ratio=kind)  # type: ignore[arg-type]
        _, gradient = value_and_gradient(pack([[-1.0, -1.0]], li, [[1.0, 1.0]]), objective)
        assert (-2 * gradient).tolist() == pytest.approx([expected] * 2), kind


def test_extra_terms() -> None:
    inputs = with_streams(pack([[-1.0, -2.0]], [[-1.5, -1.0]], [[0.0, 0.0]]), 3)
    assert inputs.teacher_logprobs is not None and inputs.entropy is not None
    gap = [0.5, -1.0]
    ref = [l - t for l, t in zip([-1.0, -2.0], inputs.teacher_logprobs.tolist(), strict=True)]
    expected = {
        "kl_tau": mean([0.7 * g * g for g in gap]),
        "kl_coef": mean([0.7 * (math.exp(-g) - 1 + g) for g in ref]),
        "entropy_coef": -0.7 * mean(inputs.entropy.tolist()),
        "inference_kl_coef": mean([0.7 * math.exp(g) * g * l for g, l in zip(gap, [-1.0, -2.0], strict=True)]),
    }
    for option, value in expected.items():
        output = policy_loss(inputs, vary("aipo", {option: 0.7}))
        assert (output.loss_sum / output.count).item() == pytest.approx(value, abs=1e-12), option
    with pytest.raises(ValueError, match=r"kl_coef is 0\.7 but"):
        policy_loss(replace(inputs, teacher_logprobs=None), vary("aipo", {"kl_coef": 0.7}))
    with pytest.raises(ValueError, match=r"entropy_coef is 0\.7 but"):
        policy_loss(replace(inputs, entropy=None), vary("aipo", {"entropy_coef": 0.7}))


def test_observed_tokens_add_their_cross_entropy() -> None:
    """ECHO, 2605.24517: coef times the mean cross-entropy of what the environment wrote, whatever the advantages."""
    inputs = pack([[-1.0, -2.0]], [[-1.5, -1.0]], [[0.3, 0.3]])
    observed = torch.tensor([-0.7, -1.1, -2.0], dtype=torch.float64, requires_grad=True)
    plain = policy_loss(inputs, preset("grpo"))
    output = policy_loss(replace(inputs, observation_logprobs=observed), vary("grpo", {"observation_coef": 0.1}))
    assert torch.equal(output.loss_sum, plain.loss_sum) and plain.further == {}
    loss = output.further["observation"] / len(observed)
    assert loss.item() == pytest.approx(0.1 * 3.8 / 3, abs=1e-12)
    [gradient] = torch.autograd.grad(loss, observed)
    assert gradient.tolist() == pytest.approx([-0.1 / 3] * 3, abs=1e-12)
    assert output.stats.summary()["observation_loss/mean"] == pytest.approx(3.8 / 3)
    with pytest.raises(ValueError, match=r"observation_coef is 0\.1 but"):
        policy_loss(inputs, vary("grpo", {"observation_coef": 0.1}))


def test_observed_tokens_lie_behind_the_first_response() -> None:
    """Of every sequence of a pack, padding excluded, as a mask of labels and as a count."""
    masks = [[0, 0, 1, 1, 0, 0, 1], [0, 1, 0], [0, 0], [1, 0, 1, 0]]
    samples = [
        Sample(
            prompt="",
            tokens=[7] * len(mask),
            loss_mask=[float(x) for x in mask],
            advantages=[1.0] * len(mask),
            inference_logprobs=[-1.0] * len(mask),
        )
        for mask in masks
    ]
    [[micro]] = pack_samples(samples, 64)
    expected = []
    for i in micro.sample_ids:
        labels = masks[i][1:]  # the first token has no prediction
        first = labels.index(1) if 1 in labels else len(labels)
        expected += [*(t > first and not m for t, m in enumerate(labels)), False]
    found = micro.to_tensors(num_tokens=40).find_observed().tolist()
    assert found == expected + [False] * (len(found) - len(expected))
    assert micro.count("observation") == sum(expected) == 4


def test_entropy_control_is_the_rule_of_its_paper() -> None:
    """Skywork-OR1: the coefficient rises by delta at or below the target, falls above, and is 0 there."""
    config = LossConfig(entropy_control=EntropyControlConfig(target=0.5, delta=0.1, max_coef=0.15))
    schedule = build_loss_schedule(config, LIMIT)
    used, entropies = [], [0.4, 0.3, 0.49, 0.9, 0.9, 0.1, 0.1]
    for step, entropy in enumerate(entropies, 1):
        used.append(schedule.loss_for_step(step, [])[0].objective.entropy_coef)
        schedule.observe_entropy(TokenStats.measure({"entropy": torch.tensor([entropy + 0.1, entropy - 0.1])}))
        schedule = build_loss_schedule(config, LIMIT, schedule.progress)  # a resumed run continues
    assert used == pytest.approx([0, 0.1, 0.15, 0.15, 0, 0, 0.1])
    assert schedule.observe_entropy(TokenStats()) == {"entropy_coef": pytest.approx(0.15)}
    with pytest.raises(ValueError, match="both set the entropy bonus"):
        LossConfig(entropy_coef=0.1, entropy_control=EntropyControlConfig(target=0.5))


MIXED = {"other": preset("grpo"), "far": vary("cispo", {"observation_coef": 0.1})}


def with_objectives(names: list[str | None]) -> LossInputs:
    inputs = pack(*draw(3, [4, 2, 5, 3], 0.5), objectives=(*names,))
    observed = -torch.rand(6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    sequence = torch.tensor([0, 0, 1, 2, 3, 3])
    return replace(inputs, observation_logprobs=observed.requires_grad_(), observation_sequence=sequence)


def divide(loss: PolicyLoss, inputs: LossInputs) -> Tensor:
    """The loss of a step of one micro-batch, as the backend divides it."""
    assert inputs.observation_logprobs is not None
    counts = {"token": len(inputs.sequence), "sequence": 4, "observation": len(inputs.observation_logprobs)}
    output = loss(inputs)
    return output.loss_sum / counts[loss.mean_over] + sum(s / counts[unit] for unit, s in output.further.items())


def test_each_sequence_has_the_gradient_of_its_own_objective() -> None:
    """In a mixed micro-batch, that of a run in which every sequence has this objective."""
    names = [None, "other", "far", "other"]
    inputs = with_objectives(names)
    streams = [inputs.trainer_logprobs, inputs.observation_logprobs]
    mixed = torch.autograd.grad(divide(PolicyLoss(preset("ppo"), None, MIXED), inputs), streams)
    for name, objective in {None: preset("ppo"), **MIXED}.items():
        alone = divide(PolicyLoss(objective), inputs)
        expected = torch.autograd.grad(alone, streams, allow_unused=True)
        for found, gradient, sequence in zip(
            mixed, expected, (inputs.sequence, inputs.observation_sequence), strict=True
        ):
            chosen = torch.tensor([names[i] == name for i in sequence.tolist()])
            target = torch.zeros_like(found) if gradient is None else gradient
            assert chosen.any() and torch.allclose(found[chosen], target[chosen], atol=1e-12, rtol=0), name


def test_equal_objectives_by_name_change_nothing() -> None:
    loss = PolicyLoss(preset("grpo"), None, {"other": preset("grpo")})
    inputs = with_objectives([None, "other", None, "other"])
    same = divide(PolicyLoss(preset("grpo")), inputs)
    assert divide(loss, inputs).item() == pytest.approx(same.item(), abs=1e-12)
    mixed, plain = loss(inputs).stats.summary(), policy_loss(inputs, preset("grpo")).stats.summary()
    for name in ("loss/mean", "importance_ratio/std", "geo_seq_ratio/mean"):
        assert mixed[name] == pytest.approx(plain[name]), name
    assert {"loss/policy", "loss/policy/other"} <= mixed.keys()


@pytest.mark.parametrize("names", [[None] * 4, None])
def test_losses_of_several_objectives_have_counts_of_their_own(names: list[str | None] | None) -> None:
    """Also where no sample of the others is computed, since none has an advantage."""
    inputs = with_objectives(names or [])
    stats = PolicyLoss(preset("grpo"), None, MIXED)(replace(inputs, objectives=names and (*names,))).stats
    plain = policy_loss(inputs, preset("grpo")).stats
    stats.set_loss_count(8)
    assert stats.summary() == pytest.approx(plain.summary())
    plain.set_loss_count(8)
    assert plain.summary()["loss/policy"] == pytest.approx(stats.summary()["loss/policy"] / 2)


def test_objectives_of_samples_reach_the_loss() -> None:
    """By packing, with padding sequences that name none; the options of the run are those of every objective."""
    samples = [
        Sample(
            prompt="",
            tokens=[3, 4, 5],
            loss_mask=[0, 1, 1],
            inference_logprobs=[0, -1.0, -1.0],
            advantages=[0, 1.0, 1.0],
            objective=name,
        )
        for name in (None, "env", None)
    ]
    [[micro]] = pack_samples(samples, 16)
    assert micro.objectives == tuple(samples[i].objective for i in micro.sample_ids)
    assert micro.to_tensors(num_tokens=64).objectives == micro.objectives
    config = TrainConfig(loss={"type": "ppo", "teacher_tau": 0.3}, env_loss={"env": {"type": "cispo"}})
    loss = build_loss(config.loss, LIMIT, config.env_loss)
    assert loss.others["env"] == replace(preset("cispo"), teacher_tau=0.3, student_tau=0.3)
    annealing = config.loss.model_copy(update={"anneal": AnnealConfig(after=0, steps=1, factor=0.5)})
    annealed = build_loss_schedule(annealing, LIMIT, {}, config.env_loss)
    assert annealed.loss_for_step(5, [])[0].others["env"].teacher_tau == pytest.approx(0.15)
    check_batch(samples, LossConfig(), 9, {"env"})
    with pytest.raises(ValueError, match=r"set env_loss\.env to the keys of orchestrator\.env\.loss"):
        check_batch(samples, LossConfig(), 9)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ({"teacher_tau": 0.5}, r"env_loss\.x\.teacher_tau applies to whole runs only: set loss\.teacher_tau"),
        ({"entropy_coef": 0.5}, r"env_loss\.x\.entropy_coef applies"),
        ({"type": "dapo", "delta": 2.0}, "delta has no effect with type dapo"),
        ({"type": "sdpo"}, "type sdpo is possible for whole runs only"),
    ],
)
def test_options_of_whole_runs_are_rejected_for_environments(loss: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TrainConfig(env_loss={"x": loss})


# --- from a config ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_config_that_names_a_preset_is_the_preset(name: str) -> None:
    config = LossConfig(type=name)  # type: ignore[arg-type]
    assert build_objective(config, LIMIT) == preset(name)
    assert LossConfig(**config.model_dump()) == config, "a resolved config is unchanged when it is read again"


def test_options_and_what_switches_them_off() -> None:
    objective = build_objective(
        LossConfig(type="ppo", clip_high=None, dual_clip=5.0, loss_aggregation="seq-mean-token-mean"), LIMIT
    )
    assert (objective.clip_low, objective.clip_high, objective.dual_clip) == (0.2, None, 5.0)
    assert objective.loss_aggregation == "seq-mean-token-mean" and objective.max_tokens is None
    assert build_objective(LossConfig(delta=None), LIMIT).ratio_cap is None
    assert build_objective(LossConfig(ratio="geometric"), LIMIT).ratio == "geometric"
    unset = LossConfig(type="dr_grpo", ratio=None, kl_tau=None, loss_aggregation=None)
    assert build_objective(unset, LIMIT) == preset("dr_grpo"), "None follows the preset where it is not a choice"
    assert build_objective(LossConfig(type="dr_grpo", max_tokens=99), LIMIT).max_tokens == 99
    for name, row in PRESETS.items():
        for option in ("delta", "clip_low", "clip_high", "dual_clip", "gate_pos", "gate_neg", "max_prob_diff"):
            if {"delta": "ratio_cap"}.get(option, option) not in row.bounds:
                with pytest.raises(ValueError, match=f"{option} has no effect with type {name}"):
                    more = {"import_path": "math:exp"} if name == "custom" else {}
                    LossConfig(**{"type": name, option: 1.0 if option != "dual_clip" else 2.0, **more})


def weighted_squares(inputs: LossInputs, scale: float = 1.0) -> Tensor:
    return scale * inputs.advantages * inputs.trainer_logprobs.square()


def test_a_loss_of_your_own() -> None:
    config = LossConfig(type="custom", import_path=f"{__name__}:weighted_squares", kwargs={"scale": 3.0}, adv_tau=0.5)
    loss = build_loss(config, LIMIT)
    assert isinstance(loss, PolicyLoss) and loss.mean_over == "token"
    inputs = pack([[-1.0, -2.0]], [[-1.0, -2.0]], [[1.0, 2.0]])
    assert loss(inputs).loss_sum.item() == pytest.approx(3.0 * 0.5 * (1 + 8))
    for path in ("math", "math:nothing", "no.such.module:x", "math:pi"):
        with pytest.raises(ValueError, match="import_path"):
            build_loss(LossConfig(type="custom", import_path=path), LIMIT)
    with pytest.raises(ValueError, match="one loss per token"):
        policy_loss(inputs, PRESETS["custom"], lambda streams: streams.trainer_logprobs.sum())
