"""nanochat trainer: the gradient equals the explicit loss and is independent of ranks and micro-batches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from nanochat.gpt import GPT, GPTConfig
from nanochat.learner import NanochatTrainer
from rollouts.training.backends.ranks import Ranks
from rollouts.training.objectives import PRESETS
from rollouts.training.rl_losses import PolicyLoss
from rollouts.training.types import Sample


@dataclass(frozen=True)
class Part(Ranks):
    """One rank of several, whose own share of the gradient is looked at."""

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]


@pytest.fixture(scope="module")
def model() -> GPT:
    built = GPT(GPTConfig(32, 40, 1, 2, 2, 16))
    built.init_weights(0)
    torch.nn.init.normal_(built.lm_head.weight, 0, 0.5, generator=torch.Generator().manual_seed(1))
    return built


def make_samples() -> list[Sample]:
    samples = []
    for i in range(7):
        n, advantage = 4 + i, [1.0, -0.5, 0.0][i % 3]
        mask = [0.0, 0.0, *[1.0] * (n - 2)]
        ids = [(3 * i + 5 * j) % 40 for j in range(n)]
        samples.append(
            Sample(
                "", tokens=ids, loss_mask=mask, advantages=[advantage * m for m in mask], inference_logprobs=[-1.0] * n
            )
        )
    return samples


def gradient(model: GPT, ranks: Ranks, micro_batch_size: int, objective: str, top_k: int | None) -> Tensor:
    """Of one step with plain gradient descent at rate 1, as one vector."""
    mine = deepcopy(model)
    optimizer = torch.optim.SGD(mine.parameters(), lr=1.0)
    loss = PolicyLoss(PRESETS[objective])
    NanochatTrainer(mine, optimizer, loss, ranks=ranks, micro_batch_size=micro_batch_size, top_k=top_k).learn(
        make_samples()
    )
    pairs = zip(model.parameters(), mine.parameters(), strict=True)
    return torch.cat([(before - after).detach().flatten() for before, after in pairs])


@pytest.mark.parametrize(("objective", "top_k"), [("reinforce", None), ("grpo", 5)])
def test_ranks_and_micro_batches_change_nothing(model: GPT, objective: str, top_k: int | None) -> None:
    whole = gradient(model, Ranks(), 7, objective, top_k)
    torch.testing.assert_close(gradient(model, Ranks(), 2, objective, top_k), whole, rtol=1e-4, atol=1e-6)
    parts = [gradient(model, Part(rank, 3), 2, objective, top_k) for rank in range(3)]
    torch.testing.assert_close(torch.stack(parts).sum(0), whole, rtol=1e-4, atol=1e-6)
    assert float(whole.norm()) > 0.01


def test_gradient_equals_the_explicit_policy_gradient(model: GPT) -> None:
    mine, samples = deepcopy(model), make_samples()
    count = sum(sample.response_length for sample in samples)
    loss = torch.zeros(())
    for sample in samples:
        ids = torch.tensor([sample.tokens])
        logits = mine(ids)[0, :-1]
        kept = logits.topk(6, dim=-1).indices
        allowed = torch.full_like(logits, float("-inf")).scatter(1, kept, 0.0)
        allowed = allowed.scatter(1, ids[0, 1:, None], 0.0)  # what was drawn counts, whatever the policy is now
        logprobs = (logits + allowed).log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        weight = torch.tensor(sample.advantages[1:])  # type: ignore[index]
        loss = loss - (logprobs * weight).sum() / count
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in mine.parameters() if p.grad is not None])
    torch.testing.assert_close(gradient(model, Ranks(), 3, "reinforce", 6), expected, rtol=1e-4, atol=1e-6)


def test_a_step_reports_how_long_ranks_synchronized(model: GPT) -> None:
    mine, began = deepcopy(model), time.perf_counter()
    learner = NanochatTrainer(
        mine,
        torch.optim.SGD(mine.parameters(), lr=1.0),
        PolicyLoss(PRESETS["grpo"]),
        ranks=Ranks(),
        micro_batch_size=2,
        top_k=50,
    )
    assert 0 <= learner.learn(make_samples()).sync_s <= time.perf_counter() - began


@pytest.mark.parametrize("objective", ["reinforce", "grpo"])
def test_the_reported_loss_is_the_minimized_one(model: GPT, objective: str) -> None:
    mine = deepcopy(model)
    optimizer, loss = torch.optim.SGD(mine.parameters(), lr=1.0), PolicyLoss(PRESETS[objective])
    learner = NanochatTrainer(mine, optimizer, loss, ranks=Ranks(), micro_batch_size=2)
    samples = make_samples()  # a third of them has no advantage
    minimized = learner.measure_loss(samples)
    assert learner.learn(samples).stats["loss/policy"] == pytest.approx(minimized, rel=1e-4)


def test_steps_without_advantages_do_not_end_a_run(model: GPT) -> None:
    mine = deepcopy(model)
    learner = NanochatTrainer(
        mine,
        torch.optim.SGD(mine.parameters(), lr=1.0),
        PolicyLoss(PRESETS["reinforce"]),
        ranks=Ranks(),
        micro_batch_size=8,
    )
    samples = make_samples()
    for sample in samples:
        sample.advantages = [0.0] * len(sample.tokens)
    reports = [learner.learn(samples).report for _ in range(8)]
    assert [report.step for report in reports] == list(range(1, 9)) and all(report.skipped for report in reports)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), mine.parameters(), strict=True))
