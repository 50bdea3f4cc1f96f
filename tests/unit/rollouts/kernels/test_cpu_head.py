"""CPU kernels of the output head against torch operations in fp64, and in the head of the losses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rollouts.kernels import cpu as cpu_kernels
from rollouts.kernels import native
from rollouts.kernels.log_softmax import log_softmax
from rollouts.training.rl_losses import compute_head_logprobs, logprobs

pytestmark = [
    pytest.mark.skipif(native.library() is None, reason="no C compiler; cure: apt-get install gcc"),
    pytest.mark.usefixtures("one_thread"),
]
ROWS = 6
SIZES = [(torch.float32, 1), (torch.float32, 37), (torch.float32, 4100), (torch.bfloat16, 64), (torch.bfloat16, 4096)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def draw(dtype: torch.dtype, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels and temperatures; the labels include the first and the last token, a temperature is 1."""
    labels = torch.randint(vocab, (ROWS,))
    labels[0], labels[1] = 0, vocab - 1
    temperature = torch.rand(ROWS) + 0.5
    temperature[0] = 1
    return (4 * torch.randn(ROWS, vocab)).to(dtype), labels, temperature


def compute_in_fp64(logits: Tensor, labels: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    table = torch.log_softmax(logits.double() / temperature.double()[:, None], -1)
    entropy = -torch.where(table > -torch.inf, table.exp() * table, 0.0).sum(-1)
    return table.gather(-1, labels[:, None]).squeeze(-1), entropy


@pytest.mark.parametrize(("dtype", "vocab"), SIZES)
def test_forward(dtype: torch.dtype, vocab: int) -> None:
    """Close to fp64, with the bits of the sampler, and independent of the batch."""
    logits, labels, temperature = draw(dtype, vocab)
    found, entropy, _ = cpu_kernels.head_forward(logits, labels, temperature)
    for a, b in zip((found, entropy), compute_in_fp64(logits, labels, temperature), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=2e-6)
    table = log_softmax(logits.float() / temperature[:, None])
    assert torch.equal(found, table.gather(1, labels[:, None]).squeeze(1))
    part = cpu_kernels.head_forward(logits[2:4], labels[2:4], temperature[2:4])
    assert torch.equal(part[0], found[2:4]) and torch.equal(part[1], entropy[2:4])


@pytest.mark.parametrize("has_entropy", [True, False])
@pytest.mark.parametrize(("dtype", "vocab"), SIZES)
def test_backward(dtype: torch.dtype, vocab: int, has_entropy: bool) -> None:
    logits, labels, temperature = draw(dtype, vocab)
    of_logprob, of_entropy = torch.randn(2, ROWS)
    wide = logits.double().requires_grad_()
    logprob, entropy = compute_in_fp64(wide, labels, temperature)
    (expected,) = torch.autograd.grad((logprob * of_logprob).sum() + (entropy * of_entropy).sum() * has_entropy, wide)
    _, found_entropy, norms = cpu_kernels.head_forward(logits, labels, temperature)
    rest = (labels, temperature, norms, found_entropy, of_logprob, of_entropy if has_entropy else None)
    found = cpu_kernels.head_backward(logits, *rest, dtype)
    assert found is logits
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] / 10)


def test_tokens_without_probability() -> None:
    logits, labels, temperature = draw(torch.float32, 100)
    labels[:], logits[:, :64], logits[0, -1] = 70, -torch.inf, -torch.inf
    found, entropy, norms = cpu_kernels.head_forward(logits, labels, temperature)
    for a, b in zip((found, entropy), compute_in_fp64(logits, labels, temperature), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=2e-6)
    grad = cpu_kernels.head_backward(logits, labels, temperature, norms, entropy, *torch.ones(2, ROWS), torch.float32)
    assert grad.isfinite().all() and not grad[:, :64].any() and not grad[0, -1]


def test_logits_that_are_not_finite_spoil_their_row_only() -> None:
    logits, labels, temperature = draw(torch.float32, 100)
    logits[2, 3], logits[4, 5] = torch.nan, torch.inf
    found, entropy, _ = cpu_kernels.head_forward(logits, labels, temperature)
    assert (found + entropy).isnan().tolist() == [False, False, True, False, True, False]


@pytest.mark.parametrize("label", [-100, -1, 50])
def test_labels_outside_of_the_vocabulary_are_errors(label: int) -> None:
    hidden, weight, labels = torch.randn(8, 16), torch.randn(50, 16), torch.zeros(8, dtype=torch.long)
    labels[3] = label
    with pytest.raises(IndexError, match="the vocabulary has 50"):
        compute_head_logprobs(hidden, weight, labels, torch.ones(8))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("per_chunk", [None, 64 * 16], ids=["kept", "recomputed"])
@pytest.mark.parametrize("uses", [(True, True), (True, False), (False, True)])
def test_head(
    uses: tuple[bool, bool], per_chunk: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and gradients equal those of torch operations, also of a second backward pass."""
    hidden = torch.randn(80, 16).to(dtype).requires_grad_()
    weight = (torch.randn(64, 16) / 2).to(dtype).requires_grad_()
    labels, temperature = torch.randint(64, (80,)), torch.rand(80) + 0.5

    def compute() -> list[Tensor]:
        outputs = compute_head_logprobs(hidden, weight, labels, temperature, per_chunk)
        loss = sum((x * x.detach().cos()).sum() for x, is_used in zip(outputs, uses, strict=True) if is_used)
        first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)  # type: ignore[arg-type]
        second = torch.autograd.grad(loss, (hidden, weight))  # type: ignore[arg-type]
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        return [*outputs, *first]

    found = compute()
    monkeypatch.setattr(logprobs, "find_head_kernels", lambda *_: None)
    for a, b in zip(found, compute(), strict=True):
        assert a.dtype == b.dtype
        scale = max(float(b.detach().abs().max()), 1.0)
        torch.testing.assert_close(a / scale, b / scale, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
