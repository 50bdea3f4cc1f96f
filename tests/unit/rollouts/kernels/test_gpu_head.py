"""Triton kernels of the output head, in Triton's interpreter on a CPU, against torch operations in fp64."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("triton") is None:
    pytest.skip("no triton; cure: make test-extras", allow_module_level=True)

from rollouts.kernels import gpu_head, select
from rollouts.training.rl_losses import compute_head_logprobs, logprobs

TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
ROWS = 5
VOCABS = [1, 37, gpu_head.COLUMNS, gpu_head.COLUMNS + 4, 2 * gpu_head.COLUMNS + 1000]


def compute_in_fp64(logits: Tensor, labels: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies and log-sum-exps."""
    scaled = logits.double() / temperature.double()[:, None]
    table = scaled.log_softmax(-1)
    entropy = -torch.where(table > -torch.inf, table.exp() * table, 0.0).sum(-1)
    return table.gather(-1, labels[:, None]).squeeze(-1), entropy, scaled.logsumexp(-1)


def draw(vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels and temperatures; the labels include the first and the last token."""
    labels = torch.randint(vocab, (ROWS,))
    labels[0], labels[1] = 0, vocab - 1
    return (4 * torch.randn(ROWS, vocab)).to(dtype), labels, torch.rand(ROWS) + 0.5


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("vocab", VOCABS)
def test_forward(vocab: int, dtype: torch.dtype) -> None:
    inputs = draw(vocab, dtype)
    found = gpu_head.head_forward(*inputs)
    for a, b in zip(found, compute_in_fp64(*inputs), strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("has_entropy", [True, False])
def test_backward(has_entropy: bool, vocab: int, dtype: torch.dtype) -> None:
    logits, labels, temperature = draw(vocab, dtype)
    of_logprob, of_entropy = torch.randn(2, ROWS)
    wide = logits.double().requires_grad_()
    logprob, entropy, _ = compute_in_fp64(wide, labels, temperature)
    loss = (logprob * of_logprob).sum() + (entropy * of_entropy).sum() * has_entropy
    [expected] = torch.autograd.grad(loss, wide)
    _, entropy, lse = gpu_head.head_forward(logits, labels, temperature)
    rest = (labels, temperature, lse, entropy, of_logprob)
    of_entropies = of_entropy if has_entropy else None
    narrow = gpu_head.head_backward(logits.clone().float(), *rest, of_entropies, dtype)
    found = gpu_head.head_backward(logits, *rest, of_entropies, dtype)
    assert found is logits and narrow.dtype == dtype and torch.equal(narrow, found)
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_tokens_without_probability() -> None:
    """Logits of -inf, a whole tile of them first, have no share in the entropy and no gradient."""
    logits, _, temperature = draw(2 * gpu_head.COLUMNS + 3, torch.float32)
    logits[:, : gpu_head.COLUMNS] = -torch.inf
    logits[0, -1] = -torch.inf
    labels = torch.full((ROWS,), gpu_head.COLUMNS + 1)
    logprob, entropy, lse = gpu_head.head_forward(logits, labels, temperature)
    for a, b in zip((logprob, entropy, lse), compute_in_fp64(logits, labels, temperature), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    grad = gpu_head.head_backward(logits, labels, temperature, lse, entropy, *torch.ones(2, ROWS), logits.dtype)
    assert grad.isfinite().all() and not grad[:, : gpu_head.COLUMNS].any() and not grad[0, -1]


def test_entropy_of_an_almost_certain_token_keeps_its_digits() -> None:
    logits = torch.full((1, 50), 1000.0)
    logits[0, 7] = 1012.0
    inputs = (logits, torch.tensor([7]), torch.ones(1))
    found, expected = gpu_head.head_forward(*inputs)[1], compute_in_fp64(*inputs)[1]
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_rows_do_not_depend_on_the_batch() -> None:
    logits, labels, temperature = draw(5000, torch.float32)
    whole = gpu_head.head_forward(logits, labels, temperature)
    part = gpu_head.head_forward(logits[:2], labels[:2], temperature[:2])
    assert all(torch.equal(a[:2], b) for a, b in zip(whole, part, strict=True))


class Head:
    """An output head and the losses of its log-probs and entropies."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.hidden = torch.randn(18, 16).to(dtype).requires_grad_()
        self.weight = (torch.randn(50, 16) / 2).to(dtype).requires_grad_()
        self.labels, self.temperature = torch.randint(50, (18,)), torch.rand(18) + 0.5

    def compute(self, logits_per_chunk: int | None) -> tuple[Tensor, Tensor]:
        inputs = (self.hidden, self.weight, self.labels, self.temperature)
        return compute_head_logprobs(*inputs, logits_per_chunk)

    def differentiate(self, logits_per_chunk: int | None, uses: tuple[bool, bool]) -> list[Tensor]:
        """Both outputs, then the gradients of the loss of those in use."""
        outputs = self.compute(logits_per_chunk)
        loss = sum((x * x.detach().cos()).sum() for x, is_used in zip(outputs, uses, strict=True) if is_used)
        return [*outputs, *torch.autograd.grad(loss, (self.hidden, self.weight))]  # type: ignore[arg-type]


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The kernels for tensors on the CPU."""
    monkeypatch.setattr(logprobs, "find_head_kernels", lambda *_: gpu_head)
    return monkeypatch


USES = [(torch.float32, (True, False)), (torch.float32, (False, True)), *((dtype, (True, True)) for dtype in TOLERANCE)]


@pytest.mark.parametrize(("dtype", "uses"), USES)
@pytest.mark.parametrize("logits_per_chunk", [None, 50 * 7], ids=["one", "many"])
def test_head(
    logits_per_chunk: int | None, uses: tuple[bool, bool], dtype: torch.dtype, forced: pytest.MonkeyPatch
) -> None:
    head = Head(dtype)
    found = head.differentiate(logits_per_chunk, uses)
    forced.undo()
    expected = head.differentiate(logits_per_chunk, uses)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        scale = max(float(b.detach().abs().max()), 1.0)
        torch.testing.assert_close(a / scale, b / scale, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("has_backward", [True, False])
def test_no_logits_are_kept(has_backward: bool, forced: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    head = Head(torch.float32)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x.numel()), x)[1], lambda x: x)
    with hooks, torch.set_grad_enabled(has_backward):
        head.compute(None)
    assert 18 * 50 not in saved and bool(saved) == has_backward


def test_a_head_on_a_cpu_has_other_kernels() -> None:
    assert select.find_head_kernels(torch.zeros(2, 3), torch.zeros(4, 3)) is not gpu_head
