"""Several optimizer steps on one batch: partition, learning rate, old log-probs, statistics."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.telemetry.health_checks import TrainerHealthChecks
from prime_rl.trainer.backend import Backend, build_backend
from prime_rl.trainer.config import TrainConfig
from prime_rl.trainer.rl.data import build_batches
from prime_rl.trainer.rl.loss import build_loss
from prime_rl.trainer.rl.train import train
from prime_rl.trainer.rl.updates import pack_minibatches, prepare_streams, run_updates, split_batch
from prime_rl.transport.batches import FilesystemBatchSender
from prime_rl.utils.pydantic_config import parse_argv
from rollouts.training.batching import pack_share
from rollouts.training.metrics import load_jsonl
from rollouts.training.steps import complete_steps
from rollouts.training.types import Sample


def make_config(output_dir: Path, **changes: Any) -> TrainConfig:
    values = {
        "model": {"name": "tiny-qwen3", "seq_len": 32, "debug": {"random_init": True}},
        "optim": {"lr": 3e-3},
        "scheduler": {"type": "linear", "warmup_steps": 3, "decay_steps": 0},
        "loss": {"type": "ppo"},
        "data": {"fake": {"batch_size": 8}},
        "max_steps": 3,
        "num_minibatches": 4,
        "output_dir": output_dir,
        "log": {"file": False},
    }
    return TrainConfig.model_validate({**values, **changes})


def with_loss(*masks: list[float]) -> list[Sample]:
    return [Sample(prompt="", tokens=list(range(len(mask))), loss_mask=mask) for mask in masks]


@settings(deadline=None, max_examples=50)
@given(flags=st.lists(st.booleans(), min_size=1, max_size=20), num=st.integers(1, 25), seed=st.text(max_size=3))
def test_a_batch_is_partitioned_evenly(flags: list[bool], num: int, seed: str) -> None:
    parts = split_batch(samples := with_loss(*[[0.0, float(flag)] for flag in flags]), num, seed)
    assert sorted(i for part in parts for i in part) == list(range(len(samples)))
    assert len(parts) == max(1, min(num, sum(flags)))
    sizes, num_with_loss = [len(part) for part in parts], [sum(flags[i] for i in part) for part in parts]
    assert max(sizes) - min(sizes) <= 1 and max(num_with_loss) - min(num_with_loss) <= 1
    assert parts == split_batch(samples, num, seed)


def test_the_partition_depends_on_the_step() -> None:
    samples = with_loss(*[[0.0, 1.0]] * 16)
    assert split_batch(samples, 4, "42:1") != split_batch(samples, 4, "42:2")
    assert split_batch(samples, 1, "42:1") == [list(range(16))], "one update keeps the order of the batch"


def test_packed_minibatches_refer_to_samples_of_the_batch() -> None:
    samples = [Sample(prompt="", tokens=[i, i], loss_mask=[0.0, 1.0]) for i in range(5)]
    minibatches, share = pack_minibatches(samples, [[4, 0], [3, 1, 2]], lambda part: pack_share(part, 4))
    found = [Counter(i for micro in micros for i in micro.sample_ids) for micros in minibatches]
    assert found == [Counter([4, 0]), Counter([3, 1, 2])] and share.lengths == [2] * 5
    for micro in share.micros:
        assert [micro.input_ids[2 * k] for k in range(len(micro.sample_ids))] == micro.sample_ids


def test_updates_are_the_optimizer_steps_of_the_minibatches(tmp_path: Path) -> None:
    """Equal to single updates on the minibatches in turn, at a constant learning rate."""
    config = make_config(tmp_path, scheduler={"type": "constant"})
    samples = build_batches(config, 320).receive(1)
    loss = build_loss(config.loss, 32)
    ours, expected = build_backend(config), build_backend(config)
    parts = split_batch(samples, 4, "x")
    minibatches, _ = pack_minibatches(samples, parts, lambda part: pack_share(part, 32))
    before = [p.clone() for p in ours.parameters.values()]
    changed: list[bool] = []

    def record() -> None:
        changed.append(not all(map(torch.equal, before, ours.parameters.values())))

    report, stats = run_updates(ours, minibatches, loss, 2, before_update=record)
    assert not changed[0] and len(changed) == 8, "called before the parameters change"
    norms = []
    for _ in range(2):
        for part in parts:
            micros = pack_share([samples[i] for i in part], 32).micros
            norms.append(expected.optim_step(expected.forward_backward(micros, loss)).grad_norm)
    assert all(torch.equal(p, expected.parameters[name]) for name, p in ours.parameters.items())
    assert (ours.stepper.num_steps, expected.stepper.num_steps) == (1, 8)
    assert report.step == 1 and report.grad_norm == pytest.approx(sum(norms) / 8)
    num_tokens = sum(sum(mask > 0 for mask in sample.loss_mask) for sample in samples)
    assert sum(map(len, stats.values["loss"])) == 2 * num_tokens


def with_advantages(samples: list[Sample], values: list[float]) -> list[Sample]:
    return [
        msgspec.structs.replace(sample, advantages=[value] * len(sample.tokens))
        for sample, value in zip(samples, values, strict=True)
    ]


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("advantages", [[0, 1, 0, 0, -0.5, 0, 2, 0], [0] * 8], ids=["some", "none"])
def test_skipped_samples_do_not_change_the_update(tmp_path: Path, aggregation: str, advantages: list[float]) -> None:
    config = make_config(tmp_path, loss={"type": "aipo", "loss_aggregation": aggregation})
    samples = with_advantages(build_batches(config, 320).receive(1), advantages)
    loss, parts = build_loss(config.loss, 32), [[6, 0, 3, 1], [2, 5, 4, 7]]
    whole, skipping = build_backend(config), build_backend(config)
    computed, norms, losses = list[list[list[int]]](), list[float](), list[float]()
    for backend, has_gradient in ((whole, lambda _: True), (skipping, loss.has_gradient)):
        minibatches, share = pack_minibatches(samples, parts, lambda part: pack_share(part, 32), has_gradient)
        computed.append([sorted(i for micro in micros for i in micro.sample_ids) for micros in minibatches])
        report, stats = run_updates(backend, minibatches, loss, 1)
        assert report.skipped is None and (report.grad_norm > 0) == any(advantages)
        norms.append(report.grad_norm)
        losses.append(stats.summary()["loss/policy"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-4) and losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert computed == [[[0, 1, 3, 6], [2, 4, 5, 7]], [[1, 6], [4]] if any(advantages) else [[6], [2]]]
    used = sum(len(samples[i].tokens) for part in computed[1] for i in part)
    assert share.skipped_ratio == pytest.approx(1 - used / sum(share.lengths))
    for name, parameter in whole.parameters.items():
        torch.testing.assert_close(skipping.parameters[name], parameter, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "changes", "has_gradient"),
    [
        ({}, {}, False),
        ({}, {"advantages": [0.0, -1.0]}, True),
        ({}, {"reference_weight": 0.5}, True),
        ({"entropy_coef": 0.01}, {}, True),
        ({"kl_tau": 0.1}, {}, True),
        ({"inference_kl_coef": 0.1}, {}, True),
        ({"teacher_tau": 0.5}, {}, True),
        ({"observation_coef": 0.5}, {}, True),
    ],
)
def test_samples_with_a_gradient(options: dict[str, Any], changes: dict[str, Any], has_gradient: bool) -> None:
    loss = build_loss(make_config(Path("x"), loss={"type": "aipo", **options}).loss, 32)
    plain = Sample(prompt="", tokens=[1, 2], loss_mask=[0.0, 1.0], advantages=[0.0, 0.0])
    assert loss.has_gradient(msgspec.structs.replace(plain, **changes)) == has_gradient


def test_skipping_needs_a_loss_without_a_critic(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not possible with critic"):
        make_config(tmp_path, critic={}, skip_zero_advantage=True)


@pytest.fixture
def stale(tmp_path: Path) -> tuple[Backend, list[Sample]]:
    """A backend, and samples of another policy: every token was half as likely."""
    config = make_config(tmp_path)
    backend, samples = build_backend(config), build_batches(config, 320).receive(1)
    loss = build_loss(config.loss.model_copy(update={"old_logprobs": "recomputed"}), 32)
    prepared, _ = prepare_streams(backend, [pack_share(samples, 1000).micros], loss, None)
    [(order, streams)] = prepared.items()
    values = iter((streams["old_logprobs"] - math.log(2)).tolist())
    for i in order:
        sample = samples[i]
        sample.inference_logprobs = [next(values) if mask > 0 else 0.0 for mask in sample.loss_mask]
        sample.advantages = [1.0 if mask > 0 else 0.0 for mask in sample.loss_mask]
    return backend, samples


def first_grad_norm(backend: Backend, samples: list[Sample], **loss: Any) -> tuple[float, dict[str, float]]:
    built = build_loss(make_config(Path("x"), loss={"type": "ppo", **loss}).loss, 32)
    report, stats = run_updates(backend, [pack_share(samples, 1000).micros], built, 1)
    return report.grad_norm, stats.summary()


def test_stale_tokens_are_clipped_only_against_the_sampler(stale: tuple[Backend, list[Sample]]) -> None:
    backend, samples = stale
    norm, metrics = first_grad_norm(backend, samples)
    assert norm == 0.0 and metrics["is_clipped/mean"] == 1.0, "all have moved from the sampler by more than clip_high"
    assert not {"proximal_ratio/mean", "behavior_weight/mean", "is_behavior_capped/mean"} & metrics.keys()


def test_recomputed_logprobs_center_the_trust_region(stale: tuple[Backend, list[Sample]]) -> None:
    backend, samples = stale
    norm, metrics = first_grad_norm(backend, samples, old_logprobs="recomputed", behavior_cap=1.5)
    assert norm > 0 and metrics["is_clipped/mean"] == 0.0
    assert metrics["proximal_ratio/min"] == metrics["proximal_ratio/max"] == 1.0, "the same forward pass"
    assert metrics["importance_ratio/min"] == pytest.approx(2) == metrics["importance_ratio/max"], "to the sampler"
    assert metrics["behavior_weight/max"] == 1.5 and metrics["is_behavior_capped/mean"] == 1.0
    assert metrics["loss/mean"] == pytest.approx(-1.5), "weighted by the capped ratio to the sampler, 2"


@pytest.mark.parametrize("old_logprobs", ["inference", "recomputed"])
def test_a_run_has_one_version_and_rate_per_batch(tmp_path: Path, old_logprobs: str) -> None:
    loss = {"type": "ppo", "old_logprobs": old_logprobs}
    assert train(make_config(tmp_path, loss=loss, num_epochs=2, logprob_dump_interval=1, max_async_level=1)) == 0
    assert complete_steps(tmp_path / "weights") == [1, 2, 3]
    rows = [row for row in load_jsonl(tmp_path / "metrics.jsonl") if "loss/mean" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["optim/lr"] for row in rows] == pytest.approx([1e-3, 2e-3, 3e-3]), "the schedule counts batches"
    assert [row["optim/num_updates"] for row in rows] == [8, 8, 8] and rows[-1]["batch/samples"] == 8
    assert rows[-1]["progress/total_tokens"] == sum(row["batch/tokens"] for row in rows)
    dumped = [row for row in load_jsonl(tmp_path / "trainer_logprobs.jsonl") if row["step"] == 2]
    batch = build_batches(make_config(tmp_path), 320).receive(2)
    expected = {(s.group_index, s.index): [bool(mask) for mask in s.loss_mask] for s in batch}
    assert {(r["group_index"], r["index"]): [x != 0 for x in r["trainer_logprobs"]] for r in dumped} == expected


def test_a_minibatch_without_loss_is_never_an_update(tmp_path: Path) -> None:
    taught = Sample(prompt="", tokens=[1, 2], loss_mask=[0, 1], inference_logprobs=[0, -5.0], advantages=[0, 1.0])
    silent = msgspec.structs.replace(taught, loss_mask=[0, 0])
    FilesystemBatchSender(tmp_path / "rollouts").send(1, [silent] * 6 + [taught] * 2)
    train(make_config(tmp_path, data={"timeout_s": 20}, max_steps=1))
    [row] = [row for row in load_jsonl(tmp_path / "metrics.jsonl") if "optim/lr" in row]
    assert row["optim/num_updates"] == 2 and row["optim/skipped_steps"] == 0


@pytest.mark.parametrize(("num_updates", "num_warnings"), [(1, 1), (4, 0)])
def test_drift_by_own_updates_is_no_failed_delivery(num_updates: int, num_warnings: int) -> None:
    lines: list[str] = []
    checks = TrainerHealthChecks(0, log=lines.append)
    sample = Sample(prompt="", tokens=[1, 2], loss_mask=[0, 1], versions=[(0, 0)])
    metrics = {"mismatch_kl/mean": 1.0, "optim/lr": 1.0, "optim/num_updates": float(num_updates)}
    checks.check(1, metrics, [sample])
    assert len(lines) == num_warnings


def test_one_update_per_batch_may_recompute_logprobs() -> None:
    config, _ = parse_argv(TrainConfig, ["--loss.type", "ppo", "--loss.old_logprobs", "recomputed"], "trainer", {})
    assert (config.num_minibatches, config.num_epochs, config.loss.old_logprobs) == (1, 1, "recomputed")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--num_minibatches", "9", "--data.fake.batch_size", "8"], "above data.fake.batch_size 8"),
        (["--loss.kl_coef", "0.1", "--loss.kl_estimator", "k1"], "use k2 or k3"),
        (["--loss.behavior_cap", "2"], "no effect with old_logprobs inference"),
        (
            ["--loss.type", "reinforce", "--loss.old_logprobs", "recomputed", "--num_epochs", "2"],
            "type reinforce has no importance ratio",
        ),
    ],
)
def test_options_without_effect_are_rejected(argv: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_argv(TrainConfig, argv, "trainer", environ={})
