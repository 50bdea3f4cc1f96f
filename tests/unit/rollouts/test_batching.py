"""Packing conserves tokens, shifts once, respects limits and balances ranks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts.training.batching import QUADRATIC_COST, MicroBatch, assign_ranks, pack_samples, pack_share
from rollouts.training.types import Sample


def make_sample(n: int, first: int = 0, **more: object) -> Sample:
    return Sample(
        prompt="",
        tokens=list(range(first, first + n)),
        loss_mask=[0.0] + [1.0] * (n - 1),
        inference_logprobs=[-0.5 * i for i in range(n)],
        advantages=[0.25 * i for i in range(n)],
        **more,
    )


def test_streams_are_aligned_to_the_label() -> None:
    sample = Sample(
        prompt="",
        tokens=[5, 9, 7, 3, 1],
        loss_mask=[0, 0, 0, 1, 1],
        inference_logprobs=[0, 0, 0, -0.2, -0.9],
        advantages=[0, 0, 0, 2, 3],
        teacher_logprobs=[0, -1, -2, -3, -4],
        temperature=0.7,
    )
    [[micro]] = pack_samples([sample], 8)
    assert micro.input_ids == [5, 9, 7, 3, 1]
    assert micro.positions == [0, 1, 2, 3, 4]
    assert micro.labels == [9, 7, 3, 1, 0]
    assert micro.loss_mask == [0, 0, 1, 1, 0], "the last position predicts nothing"
    assert micro.inference_logprobs == [0, 0, -0.2, -0.9, 0]
    assert micro.advantages == [0, 0, 2, 3, 0]
    assert micro.teacher_logprobs == [-1, -2, -3, -4, 0]
    assert micro.temperature == [0.7] * 5


def unpack(micro: MicroBatch) -> list[tuple[int, list[int], list[int]]]:
    """(sample id, tokens, labels) of each sequence of a pack."""
    out, start = [], 0
    for sample_id, n in zip(micro.sample_ids, micro.lengths, strict=True):
        assert micro.positions[start : start + n] == list(range(n))
        out.append((sample_id, micro.input_ids[start : start + n], micro.labels[start : start + n]))
        start += n
    return out


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=0, max_size=40), st.integers(40, 60), st.integers(1, 5), st.integers(1, 3))
def test_packing_conserves_every_token(lengths: list[int], seq_len: int, num_ranks: int, rows: int) -> None:
    samples = [make_sample(n, first=100 * i) for i, n in enumerate(lengths)]
    ranks = pack_samples(samples, seq_len, num_ranks, rows=rows)
    assert len(ranks) == num_ranks
    assert len({len(rank) for rank in ranks}) == 1, "ranks must run the same number of micro-batches"
    seen = []
    for micro in (micro for rank in ranks for micro in rank):
        assert len(micro.input_ids) <= rows * seq_len
        streams = (micro.labels, micro.loss_mask, micro.advantages, micro.inference_logprobs, micro.temperature)
        assert {len(stream) for stream in streams} == {len(micro.input_ids)} == {sum(micro.lengths)}
        if micro.sample_ids:
            seen += unpack(micro)
        else:
            assert micro.num_tokens == micro.loss_count == 0
    assert sorted(i for i, _, _ in seen) == list(range(len(samples))), "each sample exactly once"
    for i, tokens, labels in seen:
        assert tokens == samples[i].tokens
        assert labels == [*samples[i].tokens[1:], 0]
    assert pack_samples(samples, seq_len, num_ranks, rows=rows) == ranks, "a pure function"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=60), st.integers(1, 8))
def test_ranks_carry_nearly_equal_cost(lengths: list[int], num_ranks: int) -> None:
    cost = [n + QUADRATIC_COST * n * n for n in lengths]
    shares = assign_ranks(cost, num_ranks)
    load = [sum(cost[i] for i in share) for share in shares]
    # Longest-processing-time: no rank exceeds the lightest by more than one item.
    assert max(load) - min(load) <= max(cost) + 1e-6


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [([64] * 5, [2, 1, 1, 1]), ([40] * 8, [3, 3, 1, 1]), ([60] * 2, [1, 1]), ([60], [1])],
)
def test_threads_carry_nearly_equal_cost(lengths: list[int], expected: list[int]) -> None:
    """Samples per micro-batch of 128 tokens: as many for each thread, and none without samples."""
    samples = [make_sample(n) for n in lengths]
    share = pack_share(samples, 64, rows=2, num_threads=2)
    assert [len(micro.lengths) for micro in share.micros] == expected
    assert sorted(i for micro in share.micros for i in micro.sample_ids) == list(range(len(lengths)))
    assert (share.padding_ratio, share.imbalance) == (0.0, 0.0)


def test_counts_are_of_loss_tokens_or_of_sequences_with_loss() -> None:
    prompt_only = Sample(prompt="", tokens=[1, 2, 3], loss_mask=[0.0] * 3)
    [[micro]] = pack_samples([make_sample(6), make_sample(4), prompt_only], 16)
    assert micro.count("token") == 5 + 3 and micro.count("sequence") == 2


def test_neighbours_are_of_similar_length() -> None:
    [micros] = pack_samples([make_sample(n) for n in (2, 30, 3, 29, 2, 31)], 32)
    assert [m.lengths for m in micros] == [[31], [30], [29, 3], [2, 2]]


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (make_sample(9), "9 tokens but seq_len is 8"),
        (make_sample(4, temperature=0.0), "sampling.temperature"),
        (Sample(prompt=""), r"sample \d has no tokens"),
        (Sample(prompt="", tokens=[1, 2], loss_mask=[1.0]), "loss_mask"),
        (Sample(prompt="", tokens=[1], loss_mask=[0.0], advantages=[float("nan")]), "advantages"),
    ],
)
def test_untrainable_samples_are_refused(sample: Sample, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        pack_samples([make_sample(3), sample], 8)


def test_tensors_hold_the_same_and_are_never_tiny() -> None:
    [[micro]] = pack_samples([make_sample(3, first=7)], 8)
    batch = micro.to_tensors()
    assert batch.input_ids.tolist() == [7, 8, 9, 0]
    assert batch.lengths == [3, 1] and batch.sequence.tolist() == [0, 0, 0, 1]
    assert batch.positions.tolist() == [0, 1, 2, 0]
    assert batch.loss_mask.sum() == micro.loss_count == 2
    assert batch.temperature.tolist() == [1.0] * 4
    [[wide]] = pack_samples([make_sample(5)], 8)
    assert wide.to_tensors().lengths == [5]
