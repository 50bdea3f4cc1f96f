"""Supports of truncated sampling: encoding, and log-probs and gradients over them."""

import itertools
import random

import pytest
import torch
from token_filters import filter_logprobs
from torch import Tensor

from prime_rl.inference.engine import SamplingParams
from rollouts.kernels.log_softmax import log_softmax
from rollouts.training.batching import pack_samples, pad_samples
from rollouts.training.objectives import Objective
from rollouts.training.rl_losses import LossInputs, PolicyLoss, compute_head_logprobs, compute_logprobs
from rollouts.training.sampling_support import (
    Support,
    check_supports,
    decode_supports,
    encode_supports,
    join_supports,
)
from rollouts.training.types import UNFILTERED, Sample

FILTERS = [{"top_p": 0.6}, {"top_k": 3}, {"min_p": 0.3}, {"top_p": 0.8, "top_k": 6, "min_p": 0.05}]


def keep(logprobs: Tensor, **filters: float) -> Tensor:
    """Which tokens the engine's sampler may draw."""
    params = SamplingParams(max_tokens=1, **filters)  # type: ignore[arg-type]
    return filter_logprobs(logprobs, [params] * len(logprobs)) > float("-inf")


def build_support(kept: Tensor) -> Support:
    return decode_supports(b"".join(encode_supports(kept)), len(kept))


@pytest.mark.parametrize("vocab", [1, 7, 320, 40_000])
def test_supports_survive_encoding(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    shares = torch.tensor([0.0, 1e-3, 0.1, 0.5, 0.9, 0.999, 1.0])
    kept = torch.rand(7, vocab, generator=generator) < shares[:, None]
    kept[torch.arange(7), torch.randint(vocab, (7,), generator=generator)] = True
    encoded = encode_supports(kept)
    support = decode_supports(UNFILTERED.join(encoded), 13)
    renormalized = support.select(torch.arange(0, 13, 2)).renormalize(torch.zeros(7, vocab))
    assert torch.equal(renormalized > -100, kept)
    assert torch.equal(support.headers[1::2], torch.zeros(6, dtype=torch.int64)), "tokens in between are unfiltered"
    assert encoded[-1] == b"\x01", "the whole vocabulary takes a byte"
    assert max(map(len, encoded)) <= max(4, vocab // 2 * 1.05 + 4)


def test_the_documented_bytes() -> None:
    kept = torch.zeros(2, 320, dtype=torch.bool)
    kept[0, [3, 4, 9]] = True
    kept[1] = torch.arange(320) != 2
    assert encode_supports(kept) == [bytes([6, 3, 0, 4]), bytes([3, 2])]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x00", "1 tokens, not of 2"),
        (b"\x00\x00\x00", "3 tokens, not of 2"),
        (b"\x00\x06\x03", "2 tokens, not of 2"),
        (b"\x00\x80", "ends within a number"),
        (b"\x00\x80\x80\x80\x80\x01", "more than 28 bits"),
        (b"\x00\x02\x09", "does not contain the sampled token"),
        (b"\x00\x02\xc0\x02", "id 320, but the vocabulary size is 320"),
        (b"\x02\x07\x00", "does not contain"),
    ],
)
def test_invalid_supports_are_rejected(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_supports(data, [8, 300], 320)


def test_a_first_token_has_no_support() -> None:
    with pytest.raises(ValueError, match="first token"):
        join_supports([b"\x02\x08\x00"], [2], 4)


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("per_chunk", [1 << 20, 3 * 40])
def test_head_logprobs_have_the_samplers_bits(filters: dict[str, float], per_chunk: int) -> None:
    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(16, 8), torch.randn(40, 8), torch.randint(40, (16,))
    temperature = torch.rand(16) + 0.5
    logprobs = log_softmax((hidden @ weight.T).float() / temperature[:, None])
    params = [SamplingParams(max_tokens=1, **filters)] * 8  # type: ignore[arg-type]
    expected = logprobs.clone()
    expected[::2] = log_softmax(filter_logprobs(logprobs[::2], params))
    support = build_support(expected[::2] > float("-inf"))
    headers = torch.zeros(16, dtype=torch.int64)
    headers[::2] = support.headers
    labels[::2] = expected[::2].argmax(-1)
    support = Support(headers, support.ids)
    for found, entropy in (
        compute_logprobs(hidden @ weight.T, labels, temperature, support),
        compute_head_logprobs(hidden, weight, labels, temperature, per_chunk, support=support),
    ):
        assert torch.equal(found, expected.gather(1, labels[:, None]).squeeze(1))
        exact = torch.distributions.Categorical(logits=expected).entropy()
        torch.testing.assert_close(entropy, exact, atol=1e-5, rtol=0)


@pytest.mark.parametrize("per_chunk", [1 << 20, 5 * 7])
def test_head_gradcheck_over_supports(per_chunk: int) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(20, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    temperature = torch.rand(20, dtype=torch.float64) + 0.5
    logprobs = torch.log_softmax(hidden @ weight.T / temperature[:, None], -1)
    support = build_support(keep(logprobs.float(), top_k=3))
    labels = logprobs.argmax(-1)

    def head(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return compute_head_logprobs(hidden, weight, labels, temperature, per_chunk, support=support)

    assert torch.autograd.gradcheck(head, (hidden.requires_grad_(), weight.requires_grad_()))
    only = torch.autograd.grad(head(hidden, weight)[0].sum(), weight)[0]
    plain = compute_logprobs(hidden @ weight.T, labels, temperature, support)[0]
    assert torch.allclose(only, torch.autograd.grad(plain.sum(), weight)[0], atol=1e-12)


VOCAB = 5
REWARDS = torch.randn(VOCAB, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def compute_pairs(logits: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Log-probs of all sequences of two tokens over given supports: `logits[0]` of the first, `logits[1 + a]` of the
    second after `a`."""
    kept = torch.cat((first[None], second))
    table = torch.log_softmax(torch.log_softmax(logits, -1).masked_fill(~kept, float("-inf")), -1)
    return table[0][:, None] + table[1:]


def compute_gradient(logits: Tensor, sampler: Tensor, supports: tuple[Tensor, Tensor], replay: bool) -> Tensor:
    """Exact expectation of the gradient: every sequence, weighted by its probability under the sampler."""
    probable = compute_pairs(sampler, *supports) > -99
    pairs = [(a, b) for a, b in itertools.product(range(VOCAB), repeat=2) if probable[a, b]]
    kept = torch.stack([row for a, _ in pairs for row in (supports[0], supports[1][a])])
    rows = torch.tensor([row for a, _ in pairs for row in (0, 1 + a)])
    labels = torch.tensor([token for pair in pairs for token in pair])
    support, ones = build_support(kept), torch.ones(len(rows), dtype=torch.float64)
    probs = torch.tensor([compute_pairs(sampler, *supports)[pair].exp() for pair in pairs], dtype=torch.float64)
    inference, _ = compute_logprobs(sampler[rows], labels, ones, support)
    logits = logits.detach().requires_grad_()
    trainer, _ = compute_logprobs(logits[rows], labels, ones, support if replay else None)
    rewards = torch.tensor([REWARDS[pair].item() for pair in pairs], dtype=torch.float64)
    inputs = LossInputs(
        trainer_logprobs=trainer,
        inference_logprobs=inference,
        advantages=rewards.repeat_interleave(2),
        loss_mask=probs.repeat_interleave(2),
        sequence=torch.arange(len(pairs)).repeat_interleave(2),
    )
    objective = Objective("exact", ratio="product", loss_aggregation="seq-mean-token-sum")
    [gradient] = torch.autograd.grad(PolicyLoss(objective)(inputs).loss_sum, logits)
    return -gradient


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("moved", [0.0, 0.3])
def test_policy_gradient_equals_finite_differences(filters: dict[str, float], moved: float) -> None:
    """Of the expected reward over the supports, on and off policy; without replay it is biased."""
    generator = torch.Generator().manual_seed(0)
    sampler = torch.randn(1 + VOCAB, VOCAB, dtype=torch.float64, generator=generator)
    logits = sampler + moved * torch.randn(sampler.shape, dtype=torch.float64, generator=generator)
    kept = keep(torch.log_softmax(sampler, -1).float(), **filters)
    supports = kept[0], kept[1:]

    def expected_reward(logits: Tensor) -> float:
        probs = compute_pairs(logits, *supports).exp()
        return float((probs * REWARDS).sum())

    differences, eps = torch.zeros_like(logits), 1e-6
    for place in itertools.product(*map(range, logits.shape)):
        up, down = logits.clone(), logits.clone()
        up[place] += eps
        down[place] -= eps
        differences[place] = (expected_reward(up) - expected_reward(down)) / (2 * eps)
    gradient = compute_gradient(logits, sampler, supports, replay=True)
    torch.testing.assert_close(gradient, differences, atol=1e-8, rtol=0)
    biased = compute_gradient(logits, sampler, supports, replay=False)
    assert (biased - differences).abs().max() > 0.02


def test_packing_aligns_supports_with_labels() -> None:
    rng, vocab = random.Random(0), 30
    samples, kept_of = [], {}
    for number in range(7):
        num_prompt, num_sampled = rng.randint(1, 5), rng.randint(1, 6)
        kept = torch.rand(num_sampled, vocab, generator=torch.Generator().manual_seed(number)) < 0.4
        tokens = [rng.randrange(vocab) for _ in range(num_prompt + num_sampled)]
        kept[torch.arange(num_sampled), torch.tensor(tokens[num_prompt:])] = True
        support = UNFILTERED * num_prompt + b"".join(encode_supports(kept)) if number else b""
        mask = [0.0] * num_prompt + [1.0] * num_sampled
        samples.append(Sample(prompt="", tokens=tokens, loss_mask=mask, sampling_support=support))
        kept_of[number] = kept if number else torch.ones_like(kept)
    for micro in pack_samples(samples, 24)[0]:
        batch = micro.to_tensors(num_tokens=64)
        chosen = batch.loss_mask.nonzero().squeeze(1)
        assert batch.support is not None and len(batch.support.headers) == len(batch.input_ids)
        found = batch.support.select(chosen).renormalize(torch.zeros(len(chosen), vocab)) > -100
        assert torch.equal(found, torch.cat([kept_of[i] for i in micro.sample_ids]))
        assert bool(batch.support.contains(batch.labels).all())


def test_batches_without_truncation_carry_no_supports() -> None:
    sample = Sample(prompt="", tokens=[1, 2], loss_mask=[0.0, 1.0])
    assert pack_samples([sample], 4)[0][0].to_tensors().support is None


def test_padded_batches_refuse_truncated_samples() -> None:
    sample = Sample(prompt="", tokens=[1, 2], loss_mask=[0.0, 1.0], sampling_support=b"\x00\x02\x02")
    with pytest.raises(ValueError, match="sample without them, or train with pack_samples"):
        pad_samples([sample])
