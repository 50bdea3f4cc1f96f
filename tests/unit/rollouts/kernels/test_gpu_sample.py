"""The Triton kernels that sample tokens, in Triton's interpreter on a CPU, against probabilities in fp64."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("triton") is None:
    pytest.skip("no triton; cure: make test-extras", allow_module_level=True)

from rollouts.kernels.gpu_sample import COLUMNS, sample

VOCABS = [1, 37, COLUMNS, COLUMNS + 1, 3 * COLUMNS + 100]


def find_tokens(logits: Tensor, noise: Tensor) -> Tensor:
    """The first token of each row whose cumulative probability exceeds the noise."""
    cdf = logits.double().softmax(-1).cumsum(-1)
    return torch.searchsorted(cdf, noise[:, None] * cdf[:, -1:], right=True).squeeze(1)


@pytest.mark.parametrize("vocab", VOCABS)
def test_drawn_tokens(vocab: int) -> None:
    logits, noise = 3 * torch.randn(16, vocab), torch.rand(16, dtype=torch.float64)
    tokens, logprobs = sample(logits, noise)
    assert tokens.dtype == torch.int64 and logprobs.dtype == torch.float32
    assert torch.equal(tokens, find_tokens(logits, noise))
    expected = logits.double().log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("vocab", VOCABS)
def test_most_likely_tokens(vocab: int) -> None:
    """The first of equal ones; in all rows without noise, and in those whose noise is negative."""
    logits = torch.randint(5, (8, vocab)).float()
    tokens, logprobs = sample(logits, None)
    first = (logits == logits.amax(-1, keepdim=True)).double().argmax(-1)
    assert torch.equal(tokens, first)
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).amax(-1), rtol=1e-6, atol=2e-6)
    noise = torch.rand(8, dtype=torch.float64)
    noise[::2] = -1
    mixed, _ = sample(logits, noise)
    assert torch.equal(mixed[::2], first[::2]) and torch.equal(mixed[1::2], sample(logits, noise.abs())[0][1::2])


def test_tokens_without_probability_are_never_drawn() -> None:
    """Whole chunks of them, at the ends of the noise."""
    logits = torch.full((6, 4 * COLUMNS + 10), -torch.inf)
    logits[:, COLUMNS + 7], logits[:, 2 * COLUMNS + 1] = 0.0, -3.0
    noise = torch.tensor([0.0, 0.5, 0.95, 0.96, 1 - 2**-53, -1.0], dtype=torch.float64)
    tokens, logprobs = sample(logits, noise)
    first, second = COLUMNS + 7, 2 * COLUMNS + 1
    assert tokens.tolist() == [first, first, first, second, second, first]
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1))


def test_rows_of_other_lengths_and_strides() -> None:
    """A column slice, and a row does not depend on those beside it."""
    logits, noise = torch.randn(9, 600), torch.rand(9, dtype=torch.float64)
    tokens, logprobs = sample(logits[:, 50:550], noise)
    assert torch.equal(tokens, find_tokens(logits[:, 50:550], noise))
    for row in range(9):
        alone = sample(logits[row : row + 1, 50:550], noise[row : row + 1])
        assert alone[0] == tokens[row] and alone[1] == logprobs[row]


@pytest.mark.parametrize("vocab", [*VOCABS, 3 * COLUMNS])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_without_any_number_has_a_token_of_the_vocabulary(vocab: int, value: float) -> None:
    """Also a greedy one: the next step embeds it before its log-prob is seen."""
    logits = torch.full((2, vocab), value)
    tokens, logprobs = sample(logits, torch.tensor([-1.0, 0.9], dtype=torch.float64))
    assert ((tokens >= 0) & (tokens < vocab)).all() and not logprobs.isfinite().any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("is_greedy", [True, False])
def test_rows_that_are_not_finite_fail(value: float, is_greedy: bool) -> None:
    logits = torch.randn(3, COLUMNS + 50)
    logits[0, 5] = logits[1, COLUMNS + 20] = value
    noise = None if is_greedy else torch.rand(3, dtype=torch.float64)
    tokens, logprobs = sample(logits, noise)
    assert logprobs.isfinite().tolist() == [False, False, True]
    assert ((tokens >= 0) & (tokens < logits.shape[1])).all()
