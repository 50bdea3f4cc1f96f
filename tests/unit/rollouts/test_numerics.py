"""Exactness: measured minimum row counts and the padding helpers."""

from __future__ import annotations

import torch

from rollouts.training.numerics import (
    KEY_MULTIPLE,
    MIN_TOKENS,
    TESTED_ROW_COUNTS,
    _find_rows,
    count_chunks,
    pad_rows,
    padded,
    repeat_last,
    round_up,
)


def test_min_rows_are_measured() -> None:
    def rounds_differently_below_nine(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight.T + (1e-6 if len(x) < 9 else 0.0)

    assert _find_rows(rounds_differently_below_nine, 8, 0) == 9
    assert _find_rows(lambda x, weight: x + len(x), 8, 0) == TESTED_ROW_COUNTS[-1], "only the largest count passes"


def test_lengths_round_up_to_a_multiple() -> None:
    assert [round_up(n, 8) for n in (0, 1, 8, 9)] == [0, 8, 8, 16]
    assert [padded(n) for n in (1, KEY_MULTIPLE, KEY_MULTIPLE + 1)] == [KEY_MULTIPLE, KEY_MULTIPLE, 2 * KEY_MULTIPLE]


def test_padding_adds_zero_rows_or_repeats_the_last() -> None:
    x = torch.arange(1.0, 7.0).view(3, 2)
    assert pad_rows(x, 5).tolist() == [*x.tolist(), [0, 0], [0, 0]]
    assert repeat_last(x, 5).tolist() == [*x.tolist(), [5, 6], [5, 6]]
    assert pad_rows(x, 3) is x and repeat_last(x, 2) is x
    assert pad_rows(torch.zeros(0, dtype=torch.long), 4).tolist() == [0] * 4
    assert repeat_last(torch.tensor([7]), 3).tolist() == [7, 7, 7]


def test_chunks_have_enough_rows_for_exact_products() -> None:
    assert count_chunks(100, 10, 1000) == 1 and count_chunks(100, 10, 999) == 2
    assert count_chunks(100, 1000, 10) == 100 // MIN_TOKENS, "never fewer than MIN_TOKENS rows per chunk"
    assert count_chunks(1, 1000, 10) == 1
