"""Prefix trees: shared beginnings are computed once, with identical log-probs and the same gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.trainer.backend import Backend, build_backend
from prime_rl.trainer.config import TrainConfig
from prime_rl.trainer.forward import can_share_prefixes
from prime_rl.trainer.models import attention
from prime_rl.trainer.models.attention import PackedAttention
from prime_rl.trainer.rl.config import LossConfig
from prime_rl.trainer.rl.loss import build_loss
from rollouts.agents import Turn
from rollouts.training import batching
from rollouts.training.agent_integration import Rollout, rollout_to_samples
from rollouts.training.batching import MicroBatch, pack_samples, pack_share
from rollouts.training.numerics import MIN_TOKENS
from rollouts.training.prefix_tree import build_prefix_tree, order_by_prefix
from rollouts.training.types import UNFILTERED, Sample

SEQ_LEN = 512


def make_backend(directory: Path, critic: dict[str, Any] | None = None, **model: Any) -> Backend:
    settings = {"name": "tiny-qwen3", "seq_len": 96, "debug": {"random_init": True}} | model
    loss = {} if critic is None else {"critic": critic, "loss": {"type": "ppo"}}
    return build_backend(TrainConfig.model_validate({"model": settings, "output_dir": directory, **loss}))


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Backend:
    return make_backend(tmp_path_factory.mktemp("exact"), attn="exact")


def make_agent_rollout(num_prompt: int = 40, num_given: int = 4, num_drawn: int = 6) -> list[Sample]:
    """20 turns on 8 branches: 13 turns in a row, and 7 retries of the last ones."""
    draw = torch.Generator().manual_seed(0)

    def tokens(num: int) -> list[int]:
        return torch.randint(0, 300, (num,), generator=draw).tolist()

    history, turns, starts = tokens(num_prompt), [], []
    for number in range(20):
        starts.append(history) if number < 13 else None
        prompt = history if number < 13 else starts[12 - (number - 13) % 4]
        drawn = tokens(num_drawn)
        turns.append(Turn(prompt_ids=prompt, completion_ids=drawn, logprobs=[-5.0] * num_drawn))
        history = [*prompt, *drawn, *tokens(num_given)] if number < 13 else history
    samples = rollout_to_samples(Rollout(prompt="", turns=turns))
    for number, sample in enumerate(samples):
        sample.advantages = [0.5 + number] * len(sample.tokens)
    return samples


def pack(samples: Sequence[Sample], *, share: bool, rows: int = 100) -> list[MicroBatch]:
    [micros] = pack_samples(samples, SEQ_LEN, rows=rows, share_prefixes=share)
    return micros


def find_outputs(
    backend: Backend, samples: Sequence[Sample], *, share: bool, name: str = "trainer_logprobs"
) -> dict[int, torch.Tensor]:
    """Log-probs (or values) of the loss tokens of every sample."""
    found = {}
    for micro in pack(samples, share=share):
        assert (micro.shared is not None) == share
        with torch.no_grad():
            outputs = getattr(backend._compute(backend._prepare(micro)), name)
        bounds = list(accumulate(micro.lengths, initial=0))
        counts = [sum(mask > 0 for mask in micro.loss_mask[a:b]) for a, b in pairwise(bounds)]
        found |= dict(zip(micro.sample_ids, outputs.split(counts), strict=True))
    return dict(sorted(found.items()))


def find_gradient(backend: Backend, micros: Sequence[MicroBatch]) -> torch.Tensor:
    backend.forward_backward(micros, build_loss(LossConfig(type="aipo", entropy_coef=0.1), 96))
    gradient = torch.cat([p.grad.flatten().clone() for p in backend.parameters.values() if p.grad is not None])
    backend.stepper.optimizer.zero_grad()
    return gradient


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def draw_tree(draw: Any) -> list[Sample]:
    """Random samples that continue a prefix of an earlier one, with random streams."""
    samples: list[Sample] = []
    for _ in range(draw(st.integers(2, 7))):
        earlier = draw(st.sampled_from(samples)).tokens if samples else []
        tokens = earlier[: draw(st.integers(0, len(earlier)))]
        tokens = [*tokens, *draw(st.lists(st.integers(0, 300), min_size=1 if not tokens else 0, max_size=40))]
        n, floats = len(tokens), st.floats(-2, 2, width=32)
        mask = draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=n, max_size=n))
        advantages = draw(st.lists(floats, min_size=n, max_size=n))
        samples.append(
            Sample(
                prompt="",
                tokens=tokens,
                loss_mask=[0.0, *mask[1:]],
                advantages=advantages,
                inference_logprobs=[-5.0] * n,
                temperature=draw(st.sampled_from([0.7, 1.0])),
            )
        )
    return samples


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=30))
def test_nodes_are_the_distinct_prefixes(sequences: list[list[int]]) -> None:
    order, shared = order_by_prefix(sequences)
    assert sorted(order) == list(range(len(sequences)))
    ordered = [sequences[i] for i in order]
    tree = build_prefix_tree([len(sequence) for sequence in ordered], shared)
    pasts = [tuple(sequence[: i + 1]) for sequence in ordered for i in range(len(sequence))]
    assert len(tree.first) == max(len(set(pasts)), MIN_TOKENS)
    assert [pasts[i] for i in tree.first[tree.node].tolist()] == pasts


@pytest.mark.parametrize(("share", "fraction"), [(True, 1.0), (False, 5.0)])
def test_agent_rollout_computes_a_fifth_of_its_tokens(exact: Backend, share: bool, fraction: float) -> None:
    """20 turns on 8 branches; every drawn token has loss once, shared or not."""
    samples = make_agent_rollout()
    [micro] = pack(samples, share=share)
    distinct = {tuple(sample.tokens[: i + 1]) for sample in samples for i in range(len(sample.tokens))}
    assert len(samples) == 8 and micro.loss_count == 20 * 6
    layout = exact._prepare(micro)
    assert len(layout.pack.input_ids) >= fraction * len(distinct)
    attended = sum(bucket.queries.numel() for bucket in layout.pack.attend.buckets)
    assert (len(layout.pack.input_ids) == len(distinct) and attended < 2 * len(distinct)) == share


@pytest.mark.parametrize("attn", ["exact", "sdpa"])
def test_shared_logprobs_have_the_same_bits_in_exact_mode(tmp_path: Path, attn: str) -> None:
    samples, backend = make_agent_rollout(), make_backend(tmp_path, attn=attn)
    shared, alone = (find_outputs(backend, samples, share=share) for share in (True, False))
    for mine, expected in zip(shared.values(), alone.values(), strict=True):
        assert torch.equal(mine, expected) if attn == "exact" else torch.allclose(mine, expected, atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [{"attn": "exact"}, {"attn": "sdpa"}, {"dtype": "bfloat16"}, {"lora": {"rank": 8}}, {"impl": "hf"}],
    ids=str,
)
def test_shared_gradient_is_that_of_single_samples(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Sharing changes the gradient no more than another packing does: the order of a sum."""
    samples, backend = make_agent_rollout(), make_backend(tmp_path, **settings)
    assert backend.shares_prefixes
    if "lora" in settings:
        for name, parameter in backend.parameters.items():
            torch.nn.init.normal_(parameter.data, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    limit = 5e-3 if backend.model.rounds_inputs else 1e-6  # gradients of its products are rounded to bf16
    expected = find_gradient(backend, pack(samples, share=False))
    assert relative_error(find_gradient(backend, pack(samples, share=True)), expected) < limit
    cut = [micro for rank in pack_samples(samples, 250, 2, share_prefixes=True) for micro in rank]
    assert len(cut) > 1 and any(micro.shared for micro in cut), "each part of the tree shares its own beginnings"
    assert relative_error(find_gradient(backend, cut), expected) < limit
    assert 0 < relative_error(find_gradient(backend, pack(samples, share=False, rows=1)), expected) < limit


def test_values_of_a_critic_have_the_same_bits(tmp_path: Path) -> None:
    samples, backend = make_agent_rollout(), make_backend(tmp_path, critic={"lr": 1e-3}, attn="exact")
    shared, alone = (find_outputs(backend, samples, share=share, name="values") for share in (True, False))
    assert all(torch.equal(mine, expected) for mine, expected in zip(shared.values(), alone.values(), strict=True))


def test_fp64_gradient_rounds_to_the_same_fp32_bits(tmp_path: Path) -> None:
    """In fp32 the bits differ, because a sum over samples is taken before a product instead of after."""
    samples, backend = make_agent_rollout(), make_backend(tmp_path, attn="exact")
    backend.model.double()
    parameters, found = [p for p in backend.model.parameters() if p.requires_grad], []
    for share in (True, False):
        [micro] = pack(samples, share=share)
        inputs = backend._compute(backend._prepare(micro))
        loss = (inputs.trainer_logprobs * inputs.advantages.double()).sum()
        found.append(torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, parameters)]))
    assert found[0].dtype == torch.float64 and relative_error(*found) < 1e-14
    assert torch.equal(found[0].float(), found[1].float())


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("has_kernel", [True, False])
def test_attention_of_a_tree_equals_that_of_sequences(
    monkeypatch: pytest.MonkeyPatch, window: int | None, has_kernel: bool
) -> None:
    """Bit for bit in exact mode, with own tokens that span query blocks and duplicates that have none."""
    if not has_kernel:
        monkeypatch.setattr(attention, "runs_kernel", lambda *_: False)
    draw = torch.Generator().manual_seed(0)
    lengths, shared = [330, 340, 330, 620, 30, 9], [0, 300, 330, 310, 17, 0]
    tree = build_prefix_tree(lengths, shared)
    leaves = [torch.randn(len(tree.first), heads, 32, generator=draw, requires_grad=True) for heads in (4, 2, 2)]
    weight = torch.randn(sum(lengths), 4, 32, generator=draw)
    found = []
    for mode in ("exact", "sdpa"):
        out = PackedAttention(lengths, mode=mode, tree=tree)(0, *leaves, window)[tree.node]
        expected = PackedAttention(lengths, mode=mode)(0, *(x[tree.node] for x in leaves), window)
        assert torch.equal(out, expected) if mode == "exact" else torch.allclose(out, expected, atol=1e-5)
        found += [torch.autograd.grad((x * weight).sum(), leaves) for x in (out, expected)]
    for grads in zip(*found, strict=True):
        for grad in grads[1:]:
            torch.testing.assert_close(grad, grads[0], rtol=1e-4, atol=1e-4)


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_random_trees_have_the_gradient_of_single_samples(exact: Backend, data: st.DataObject) -> None:
    samples = draw_tree(data.draw)
    exact_grads = []
    for share in (True, False):
        micros = pack(samples, share=share)
        exact_grads.append(find_gradient(exact, micros) if any(micro.loss_count for micro in micros) else torch.ones(1))
    torch.testing.assert_close(*exact_grads, rtol=1e-4, atol=2e-6 * float(exact_grads[1].norm()))


def test_streams_stay_with_their_samples() -> None:
    samples = make_agent_rollout()
    for number, sample in enumerate(samples):
        n = len(sample.tokens)
        sample.teacher_logprobs, sample.temperature = [-float(number)] * n, 1 + number / 10
        sample.sampling_support, sample.objective = UNFILTERED * n, f"loss {number}"
    for micro in pack(samples[::-1], share=True):
        bounds = list(accumulate(micro.lengths, initial=0))
        assert micro.objectives == tuple(samples[::-1][i].objective for i in micro.sample_ids)
        assert micro.sampling_supports == [samples[::-1][i].sampling_support for i in micro.sample_ids]
        for i, (start, end) in zip(micro.sample_ids, pairwise(bounds), strict=True):
            assert micro.input_ids[start:end] == samples[::-1][i].tokens
            assert micro.advantages[start : end - 1] == samples[::-1][i].advantages[1:]
            assert micro.teacher_logprobs is not None
            assert micro.teacher_logprobs[start : end - 1] == samples[::-1][i].teacher_logprobs[1:]
            assert set(micro.temperature[start:end]) == {samples[::-1][i].temperature}


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(40, 200), st.integers(1, 3))
def test_a_tree_that_does_not_fit_is_cut(data: st.DataObject, capacity: int, num_ranks: int) -> None:
    samples = draw_tree(data.draw)
    longest = max(len(sample.tokens) for sample in samples)
    capacity = max(capacity, longest)
    packs = pack_samples(samples, capacity, num_ranks, share_prefixes=True)
    micros = [micro for rank in packs for micro in rank]
    assert sorted(i for micro in micros for i in micro.sample_ids) == list(range(len(samples)))
    assert all(micro.num_computed <= capacity for micro in micros)
    assert len({len(rank) for rank in packs}) == 1


def test_a_whole_tree_fits_where_its_samples_would_not(exact: Backend) -> None:
    samples = make_agent_rollout()
    num = sum(len(sample.tokens) for sample in samples)
    assert num > 2 * SEQ_LEN
    [micro] = pack(samples, share=True, rows=1)
    assert len(pack(samples, share=False, rows=1)) == 3 and micro.num_tokens == num
    whole, cut, alone = (
        pack_share(samples, seq_len, share_prefixes=share).shared_ratio
        for seq_len, share in ((SEQ_LEN, True), (250, True), (SEQ_LEN, False))
    )
    assert whole == pytest.approx(1 - micro.num_computed / num) and whole > cut > 0.5 and alone == 0


def test_ranks_share_trees_by_their_cost() -> None:
    """Groups stay together, and no rank has much more than the mean."""
    groups = [[100 * group + number // 50 for number in range(50)] for group in range(8)]
    sequences = [[*prompt, *[90 + number] * 20] for number in range(2) for prompt in groups]
    samples = [Sample(prompt="", tokens=tokens, loss_mask=[1.0] * 70) for tokens in sequences]
    packs = pack_samples(samples, SEQ_LEN, 4, share_prefixes=True)
    assert [sum(micro.num_computed for micro in rank) for rank in packs] == [2 * (50 + 2 * 20)] * 4


def draw_groups(num: int, group: int, num_prompt: int, num_new: int) -> list[Sample]:
    """Groups of samples with a common prompt."""
    samples = []
    for number in range(num * group):
        prompt, answer = [number // group] * num_prompt, [num + number] * num_new
        samples.append(Sample("", tokens=prompt + answer, loss_mask=[0.0] * num_prompt + [1.0] * num_new))
    return samples


@pytest.mark.parametrize(
    ("num_groups", "expected"),
    [
        pytest.param(3, [[248], [248]], id="a group is divided"),
        pytest.param(4, [[304], [304]], id="even without"),
        pytest.param(7, [[304, 248], [304, 248]], id="several micro-batches"),
    ],
)
def test_an_odd_group_is_divided_between_ranks(num_groups: int, expected: list[list[int]]) -> None:
    """Groups of 8 x 14 tokens behind 40: a half of one costs 96, two of them 40 more than the whole."""
    packs = pack_samples(draw_groups(num_groups, 8, 40, 14), 128, 2, rows=4, share_prefixes=True)
    assert [[micro.num_computed for micro in rank] for rank in packs] == expected


def test_a_long_prompt_is_not_computed_twice_for_balance() -> None:
    packs = pack_samples(draw_groups(3, 8, 110, 2), 128, 2, rows=4, share_prefixes=True)
    assert sorted(sum(micro.num_computed for micro in rank) for rank in packs) == [126, 252]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(120, 2000))
def test_evening_out_keeps_samples_and_capacity(data: st.DataObject, num_ranks: int, capacity: int) -> None:
    """Every sample is in one micro-batch, and the busiest rank has at most what whole groups would give it."""
    shapes = st.tuples(st.integers(1, 9), st.integers(1, 60), st.integers(1, 50))
    samples = [s for shape in data.draw(st.lists(shapes, min_size=1, max_size=9)) for s in draw_groups(1, *shape)]
    for i, sample in enumerate(samples):
        sample.tokens[-1] = i
    packs, costs = batching._plan_packs(samples, capacity, num_ranks, 1, 0.0, share_prefixes=True)
    assert sorted(i for rank in packs for micro in rank for i in micro) == list(range(len(samples)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "_even_out", lambda shares, capacity: None)
        whole, whole_costs = batching._plan_packs(samples, capacity, num_ranks, 1, 0.0, share_prefixes=True)
    assert max(costs) <= max(whole_costs) + 1e-9 and len(packs[0]) <= len(whole[0])


def test_flash_attention_shares_no_prefixes(exact: Backend) -> None:
    assert can_share_prefixes(exact.model, exact.placement, exact.mesh)
    flash = replace(exact.placement, attn="flash")
    assert not can_share_prefixes(exact.model, flash, exact.mesh)
    object.__setattr__(exact.model, "mixes_tokens_only_in_attend", False)
    assert not can_share_prefixes(exact.model, exact.placement, exact.mesh)
    object.__delattr__(exact.model, "mixes_tokens_only_in_attend")
