"""The critic of the trainer: what it learns, what its loss reaches, checkpoints, publishing and configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from prime_rl.runtime.tokenizer import ASSETS_DIR
from prime_rl.trainer import backend as backend_module
from prime_rl.trainer.backend import Backend, build_backend
from prime_rl.trainer.config import TrainConfig
from prime_rl.trainer.models.value import without_critic
from prime_rl.trainer.rl.data import build_batches
from prime_rl.trainer.rl.logprob_recorder import RecordingLoss, recorded_rows
from prime_rl.trainer.rl.loss import build_loss
from prime_rl.trainer.rl.off_policy import MeasuredLoss
from prime_rl.trainer.rl.train import train
from prime_rl.trainer.rl.updates import pack_minibatches, prepare_streams, run_updates
from rollouts.training.batching import MicroBatch, pack_share
from rollouts.training.metrics import load_jsonl
from rollouts.training.rl_losses import reference_samples
from rollouts.training.types import Sample


def make_config(**changes: Any) -> TrainConfig:
    debug = {"random_init": True, "num_layers": 1}
    values: dict[str, Any] = {
        "model": {"name": "tiny-qwen3", "seq_len": 32, "debug": debug},
        "optim": {"lr": 3e-3},
        "loss": {"type": "ppo"},
        "data": {"fake": {"batch_size": 8}},
        "max_steps": 4,
        "log": {"file": False},
    }
    lora = changes.pop("lora", None)
    values["model"] |= {} if lora is None else {"lora": lora}
    return TrainConfig.model_validate({**values, "critic": {}, **changes})


def draw(config: TrainConfig) -> list[Sample]:
    return build_batches(config, 320).receive(1)


def update(backend: Backend, config: TrainConfig, micros: list[MicroBatch], step: int = 1) -> dict[str, float]:
    loss = build_loss(config.loss, 32)
    _, stats = run_updates(backend, [micros], loss, config.num_epochs, critic=config.critic, step=step)
    return stats.summary()


@pytest.mark.parametrize("backbone", ["own", "shared", "detached"])
def test_values_learn_the_returns_of_a_batch(backbone: str) -> None:
    """Rewards of a prompt differ by its first token, so that the value is a function of the state."""
    config = make_config(critic={"backbone": backbone, "warmup_steps": 40, "gae_lambda": 1.0, "value_clip": None})
    samples = draw(config)
    for i, sample in enumerate(samples):
        sample.tokens[0] = 7 + 50 * (i % 2)
        sample.advantages = [float(i % 2) if mask else 0.0 for mask in sample.loss_mask]
    backend, micros = build_backend(config), pack_share(samples, 32, rows=8).micros
    before = {name: tensor.clone() for name, tensor in backend.export_state_dict().items()}
    rows = [update(backend, config, micros) for _ in range(25)]
    assert rows[0]["values/max"] == rows[0]["values/min"] == 0.0, "a new head is 0"
    assert rows[0]["explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert rows[-1]["explained_variance"] > 0.5 and rows[-1]["value_loss/mean"] < rows[0]["value_loss/mean"] / 2
    after = backend.export_state_dict()
    assert not any("value" in name for name in after), "published weights are those of the policy"
    assert all(torch.equal(after[name], before[name]) for name in before), "the warm-up trains the critic only"


@pytest.mark.parametrize(("backbone", "reaches"), [("own", False), ("detached", False), ("shared", True)])
def test_the_value_loss_reaches_the_policy_only_if_shared(backbone: str, reaches: bool) -> None:
    """By the policy's gradients under two weights of the value loss."""
    found = []
    for coef in (1.0, 50.0):
        optim = {"type": "sgd", "lr": 1.0, "max_norm": None}
        config = make_config(critic={"backbone": backbone, "coef": coef}, optim=optim)
        backend, micros = build_backend(config), pack_share(draw(config), 32, rows=8).micros
        assert backend.critic is not None
        with torch.no_grad():
            backend.critic.head.weight.fill_(0.1)
        update(backend, config, micros)
        found.append({name: tensor.clone() for name, tensor in backend.export_state_dict().items()})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0]) != reaches


def test_packing_changes_no_value_and_no_gradient() -> None:
    config = make_config(optim={"type": "sgd", "lr": 1e-2, "max_norm": None})
    tensors, rows = [], []
    for num_rows in (1, 3, 8):
        backend = build_backend(config)
        rows.append(update(backend, config, pack_share(draw(config), 32, rows=num_rows).micros))
        tensors.append(backend.parameters)
    for other in (1, 2):
        for name in ("value_loss/mean", "advantages/max", "returns/mean", "loss/policy"):
            assert rows[other][name] == pytest.approx(rows[0][name], abs=1e-6), name
        for name, parameter in tensors[0].items():
            torch.testing.assert_close(tensors[other][name], parameter, atol=1e-6, rtol=0)


def draw_taught(config: TrainConfig) -> tuple[list[Sample], list[Sample]]:
    """Samples with teacher log-probs: six with rewards, and two reference samples."""
    samples = [msgspec.structs.replace(one, teacher_logprobs=[-1.0] * len(one.tokens)) for one in draw(config)]
    return samples[:6], reference_samples(samples[6:], 1.0)


def test_reference_samples_have_no_critic_advantages() -> None:
    config = make_config(loss={"type": "ppo", "teacher_tau": 0.5})
    plain, references = draw_taught(config)
    backend, loss = build_backend(config), build_loss(config.loss, 32)
    assert backend.critic is not None
    with torch.no_grad():
        backend.critic.head.bias.fill_(0.3)
    found = []
    for samples in (plain, [*plain, *references]):
        parts = [[i] for i in range(len(samples))]
        minibatches, _ = pack_minibatches(samples, parts, lambda part: pack_share(part, 32))
        streams, stats = prepare_streams(backend, minibatches, loss, config.critic)
        found.append(({i: one["advantages"] for [i], one in streams.items()}, stats.summary()))
    (alone, metrics), (mixed, mixed_metrics) = found
    assert metrics["explained_variance"] == pytest.approx(mixed_metrics["explained_variance"])
    assert not any(mixed[i].any() for i in (6, 7))
    for i, advantages in alone.items():
        torch.testing.assert_close(mixed[i], advantages)


def test_reference_samples_do_not_train_the_critic() -> None:
    optim = {"type": "sgd", "lr": 1.0, "max_norm": None, "weight_decay": 0.0}
    config = make_config(loss={"type": "ppo", "teacher_tau": 0.5}, optim=optim)
    _, references = draw_taught(config)
    backend = build_backend(config)
    assert backend.critic is not None
    with torch.no_grad():
        backend.critic.head.bias.fill_(0.3)
    before = {name: tensor.clone() for name, tensor in backend.parameters.items()}
    metrics = update(backend, config, pack_share(references, 32, rows=2).micros)
    assert "value_loss/mean" not in metrics and "explained_variance" not in metrics
    policy = without_critic(before)
    assert all(torch.equal(backend.parameters[name], before[name]) for name in before if name not in policy)
    assert any(not torch.equal(backend.parameters[name], before[name]) for name in policy)


def test_streams_find_their_micro_batch_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advantages, old log-probs and origins belong to micro-batches, not to the order in which a backend runs them."""
    config = make_config(loss={"type": "ppo", "old_logprobs": "recomputed"}, num_epochs=2, critic={"warmup_steps": 0})
    samples = draw(config)
    for i, sample in enumerate(samples):
        sample.versions = [(1, -(i % 3))]
    micros, loss = pack_share(samples, 32).micros, build_loss(config.loss, 32)
    assert len({len(micro.input_ids) for micro in micros}) > 1

    def run(order: int) -> tuple[float, dict[str, float], list[dict[str, Any]]]:
        backend = build_backend(config)
        run_micros = backend.run_micros
        monkeypatch.setattr(
            backend, "run_micros", lambda micros, finish, *, train: run_micros(micros[::order], finish, train=train)
        )
        recording = RecordingLoss(loss)
        first = MeasuredLoss(recording, samples, 1)
        report, stats = run_updates(backend, [micros[:2], micros[2:]], loss, 2, first, critic=config.critic)
        rows = recorded_rows(samples, {ids: values.tolist() for ids, values in recording.recorded.items()})
        return report.grad_norm, stats.summary(), sorted(rows, key=lambda row: (row["group_index"], row["index"]))

    (norm, metrics, rows), (other_norm, others, other_rows) = run(1), run(-1)
    # Sums of gradients in another order differ by rounding.
    assert other_norm == pytest.approx(norm, rel=1e-4) and others == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    assert "importance_ratio/staleness_2/max" in metrics
    for row, other in zip(rows, other_rows, strict=True):
        assert row["trainer_logprobs"] == pytest.approx(other["trainer_logprobs"], rel=1e-5)


def test_an_adapter_is_published_without_its_critic() -> None:
    config = make_config(lora={"rank": 4})
    backend = build_backend(config)
    update(backend, config, pack_share(draw(config), 32, rows=8).micros)
    names = set(backend.export_state_dict())
    assert names and all("lora_" in name and "value" not in name for name in names)
    own = set(backend.parameters) - set(without_critic(backend.parameters))
    assert any("lora_" in name for name in own) and {"value.head.weight", "value.head.bias"} <= own


def test_router_metrics_are_those_of_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = json.loads((ASSETS_DIR / "tiny-qwen3" / "config.json").read_text(encoding="utf-8"))
    experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    (tmp_path / "config.json").write_text(json.dumps({**shape, **experts, "mlp_only_layers": []}))
    config = make_config(model={"name": str(tmp_path), "seq_len": 32, "debug": {"random_init": True, "num_layers": 1}})
    backend = build_backend(config)
    update(backend, config, pack_share(draw(config), 32, rows=8).micros)
    measured: list[set[str]] = []
    monkeypatch.setattr(backend_module, "compute_imbalance", lambda loads: measured.append(set(loads)))
    backend.pop_expert_load()
    assert measured == [{"model.layers.0.mlp"}]


def test_the_critic_has_a_rate_of_its_own() -> None:
    backend = build_backend(make_config(critic={"lr": 0.5}))
    rates = {id(p): group["lr"] for group in backend.stepper.optimizer.param_groups for p in group["params"]}
    policy = without_critic(backend.parameters)
    assert {name: rates[id(p)] for name, p in backend.parameters.items()} == {
        name: 3e-3 if name in policy else 0.5 for name in backend.parameters
    }


def test_a_resumed_run_with_a_critic_has_the_same_bits(tmp_path: Path) -> None:
    straight, parts = tmp_path / "straight", tmp_path / "parts"
    options: dict[str, Any] = {"critic": {"warmup_steps": 1}, "num_minibatches": 2}
    assert train(make_config(output_dir=straight, ckpt={"interval": 2}, **options)) == 0
    assert train(make_config(output_dir=parts, ckpt={"interval": 2}, **{**options, "max_steps": 2})) == 0
    assert train(make_config(output_dir=parts, ckpt={"interval": 2, "resume_step": -1}, **options)) == 0
    files = [
        {path.name: path.read_bytes() for path in (root / "checkpoints" / "step_4" / "trainer").iterdir()}
        for root in (straight, parts)
    ]
    assert files[0] == files[1]
    published = load_file(straight / "weights" / "step_4" / "model.safetensors")
    assert not any(name.startswith("value") for name in published)
    rows = [row for row in load_jsonl(straight / "metrics.jsonl") if "explained_variance" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and "is_value_clipped/mean" in rows[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"parallel": {"tp": 2}}, r"critic does not support parallel\.tp"),
        ({"optim": {"type": "muon"}}, r"critic does not support optim\.type muon"),
        ({"loss": {"teacher_tau": 0.5, "distill": {"estimator": "sequence"}}}, r"estimator sequence adds to"),
        ({"loss": {"teacher_tau": 0.5, "distill": {"gate": "positive"}}}, r"set loss\.distill\.gate = \"none\""),
    ],
)
def test_combinations_without_sense_are_rejected(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_config(**options)
