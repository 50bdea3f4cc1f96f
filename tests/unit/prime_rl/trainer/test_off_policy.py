"""Off-policy diagnostics: ratios by staleness, mismatch by position, effective sample size."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from test_updates import make_config

from prime_rl.trainer.rl.off_policy import MAX_STALENESS, TokenOrigin, find_origin, measure_off_policy
from prime_rl.trainer.rl.train import train
from prime_rl.transport.batches import FilesystemBatchSender
from rollouts.training.batching import pack_share
from rollouts.training.metrics import load_jsonl
from rollouts.training.rl_losses import LossInputs, TokenStats
from rollouts.training.rl_losses.stats import SubsampledStats
from rollouts.training.types import Sample


def make_inputs(ratios: list[float], sequence: list[int]) -> LossInputs:
    ones, logprobs = torch.ones(len(ratios)), torch.full((len(ratios),), -2.0)
    gaps = torch.tensor([math.log(ratio) for ratio in ratios])
    return LossInputs(logprobs + gaps, logprobs, ones, ones, torch.tensor(sequence))


def test_ratios_are_grouped_by_staleness() -> None:
    inputs = make_inputs([1.0, 1.0, 2.0, 0.5, 3.0], [0, 0, 0, 1, 1])
    origin = TokenOrigin(torch.tensor([0, 0, 1, 1, -1]), torch.tensor([0, 1, 2, 0, 1]))
    found = measure_off_policy(inputs, origin).summary()
    assert found["importance_ratio/staleness_0/p95"] == found["importance_ratio/staleness_0/ess"] == 1.0
    assert found["importance_ratio/staleness_1/p05"] == pytest.approx(0.5)
    assert found["importance_ratio/staleness_1/ess"] == pytest.approx(2.5**2 / (2 * 4.25)), "(sum r)^2 / (n sum r^2)"
    assert not any("staleness_-1" in name for name in found), "tokens of unknown age are left out"


def test_measuring_does_not_wait_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs([1.0] * 40, [0] * 40)
    streams = {f.name: x.to("meta") for f in fields(inputs) if isinstance(x := getattr(inputs, f.name), torch.Tensor)}
    measured: list[str] = []

    def measure(values: dict[str, torch.Tensor], mask: torch.Tensor) -> TokenStats:
        measured.extend(values)
        return TokenStats()

    monkeypatch.setattr(TokenStats, "measure", measure)
    origin = TokenOrigin(torch.tensor([2] * 39 + [-1]), torch.arange(40))
    measure_off_policy(replace(inputs, **streams, num_sequences=1), origin)  # values cannot be read from "meta"
    mismatches = [f"mismatch_kl/from_token_{first}" for first in (0, 16)]
    assert measured == ["importance_ratio/staleness_2", *mismatches, "first_mismatch"]


def test_mismatch_is_located() -> None:
    ratios = [1.0] * 40
    ratios[20] = ratios[35] = 2.0
    origin = TokenOrigin(torch.zeros(40, dtype=torch.int64), torch.tensor([*range(30), *range(10)]))
    found = measure_off_policy(make_inputs(ratios, [0] * 30 + [1] * 10), origin).summary()
    assert (found["first_mismatch/min"], found["first_mismatch/max"]) == (5, 20)
    k3 = 2 - 1 - math.log(2)
    assert found["mismatch_kl/from_token_0/mean"] == pytest.approx(k3 / 26)
    assert found["mismatch_kl/from_token_16/mean"] == pytest.approx(k3 / 14)
    assert "mismatch_kl/from_token_128/mean" not in found
    exact = measure_off_policy(make_inputs([1.0] * 40, [0] * 40), origin).summary()
    assert "first_mismatch/min" not in exact, "nothing differs"


def test_quantiles_of_subsampled_ranks_are_weighted() -> None:
    values = torch.arange(1.0, 101.0)
    whole = TokenStats({"importance_ratio": [values]})
    assert whole.summary()["importance_ratio/p05"] == 5 and whole.summary()["importance_ratio/p95"] == 95
    part = TokenStats.decode(whole.encode(most=50))
    assert isinstance(part.subsampled["importance_ratio"][0], SubsampledStats)
    found = part.summary()
    assert abs(found["importance_ratio/p05"] - 5) <= 2 and abs(found["importance_ratio/p95"] - 95) <= 2
    assert found["importance_ratio/ess"] == pytest.approx(whole.summary()["importance_ratio/ess"])


def test_origins_follow_the_packed_loss_tokens() -> None:
    samples = [
        Sample(prompt="", tokens=[1] * 6, loss_mask=[0, 0, 1, 1, 0, 1], versions=[(2, 3), (5, 4)]),
        Sample(prompt="", tokens=[1] * 3, loss_mask=[0, 1, 1]),
        Sample(prompt="", tokens=[1] * 4, loss_mask=[0, 0, 0, 1], versions=[(3, -9)]),
    ]
    micros = pack_share(samples, 16).micros
    origin = find_origin([samples[i] for i in micros[0].sample_ids], step=5)
    expected = {0: [(1, 0), (1, 1), (0, 2)], 1: [(-1, 0), (-1, 1)], 2: [(MAX_STALENESS, 0)]}
    pairs = list(zip(origin.staleness.tolist(), origin.position.tolist(), strict=True))
    assert pairs == [pair for i in micros[0].sample_ids for pair in expected[i]]
    assert len(pairs) == int((micros[0].to_tensors().loss_mask > 0).sum())


def test_later_updates_move_fresh_samples_off_policy(tmp_path: Path) -> None:
    """Versions count batches: all samples are fresh, and the ratio leaves 1 only by the updates of the batch."""
    fresh = [
        Sample(
            prompt="",
            tokens=[i, 7, 8, 9],
            loss_mask=[0, 1, 1, 1],
            inference_logprobs=[0.0, -5.8, -5.8, -5.8],
            advantages=[0.0, 1.0, 1.0, 1.0],
            versions=[(1, 0)],
        )
        for i in range(8)
    ]
    FilesystemBatchSender(tmp_path / "rollouts").send(1, fresh)
    train(make_config(tmp_path, data={"timeout_s": 20}, max_steps=1, num_epochs=2, optim={"lr": 3e-2}))
    [row] = [row for row in load_jsonl(tmp_path / "metrics.jsonl") if "optim/lr" in row]
    assert row["optim/num_updates"] == 8
    ages = {name.split("/")[1] for name in row if name.startswith("importance_ratio/staleness")}
    assert ages == {"staleness_0"}
    assert row["importance_ratio/staleness_0/max"] > 1.2 * row["importance_ratio/staleness_0/min"]
    assert 0 < row["importance_ratio/ess"] < 1
