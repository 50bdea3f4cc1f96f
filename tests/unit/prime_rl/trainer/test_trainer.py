"""Optimizer steps, schedules and in-process RL training: gradients, exactness, files and metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from prime_rl.telemetry.progress import Progress
from prime_rl.trainer import model as model_module
from prime_rl.trainer.backend import Backend, build_backend, step_advice
from prime_rl.trainer.checkpointer import Checkpointer
from prime_rl.trainer.config import SFTConfig, TrainConfig
from prime_rl.trainer.model import resolve_placement
from prime_rl.trainer.optim import MasterWeights, build_schedule
from prime_rl.trainer.optim_config import SchedulerConfig
from prime_rl.trainer.perf import StepTimer
from prime_rl.trainer.rl.config import LossConfig
from prime_rl.trainer.rl.data import FakeBatches, build_batches, check_batch
from prime_rl.trainer.rl.loss import build_loss, build_objective
from prime_rl.trainer.rl.train import train
from prime_rl.transport import weights
from prime_rl.transport.batches import FilesystemBatchSender
from prime_rl.transport.weights import verify_tensors
from prime_rl.utils.pydantic_config import parse_argv
from rollouts.kernels import cpu as cpu_kernels
from rollouts.training.backends.step import OptimizerStep
from rollouts.training.batching import pack_samples
from rollouts.training.manifests import read_manifest
from rollouts.training.metrics import load_jsonl
from rollouts.training.steps import complete_steps, publish_dir
from rollouts.training.types import Sample

ROOT = Path(__file__).parents[4]
DISTILL = ("--loss.teacher_tau", "1", "--loss.distill.estimator")


def make_config(output_dir: Path, **changes: Any) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "model": {"name": "tiny-qwen3", "seq_len": 48, "debug": {"random_init": True}},
            "optim": {"lr": 1e-3},
            "data": {"fake": {"batch_size": 8}},
            "max_steps": 3,
            "output_dir": output_dir,
            "log": {"file": False},
            **changes,
        }
    )


@pytest.fixture
def backend(tmp_path: Path) -> Backend:
    return build_backend(make_config(tmp_path))


def fake_samples(num: int = 12, seed: int = 0) -> list[Sample]:
    config = make_config(Path("unused"), data={"fake": {"batch_size": num}}, seed=seed)
    return build_batches(config, 320).receive(1)


def gradients(backend: Backend, packs: list[list[Any]], loss_type: Any = "aipo") -> list[torch.Tensor]:
    """Gradient of one step over these micro-batches; resets it afterwards."""
    loss = build_loss(LossConfig(type=loss_type, entropy_coef=0.1), 48)
    backend.forward_backward([micro for rank in packs for micro in rank], loss)
    taken = [p.grad.clone() for p in backend.parameters.values() if p.grad is not None]
    backend.stepper.optimizer.zero_grad()
    return taken


def test_checkpointed_steps_have_been_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash right after a checkpoint loses no metrics: its step is not repeated."""
    logged: list[int] = []

    def save(self: Checkpointer, step: int, progress: Any) -> None:
        logged.extend(row["step"] for row in load_jsonl(tmp_path / "metrics.jsonl") if "loss/mean" in row)

    monkeypatch.setattr(Checkpointer, "save", save)
    train(make_config(tmp_path, max_steps=1, ckpt={"interval": 1}))
    assert logged == [1]


@pytest.mark.parametrize("loss_type", ["aipo", "grpo", "gspo", "rloo", "dr_grpo"])
def test_gradient_is_independent_of_packing_and_ranks(backend: Backend, loss_type: str) -> None:
    samples = fake_samples()
    whole = gradients(backend, pack_samples(samples, 48, rows=100), loss_type)
    assert len(whole) == len(backend.parameters) and all(g.abs().sum() > 0 for g in whole)
    ways = {
        "one sample per micro-batch": [pack_samples([s], 48)[0] for s in samples],
        "rows of 48": pack_samples(samples, 48),
        "three ranks": pack_samples(samples, 48, 3, rows=2),
        "another order": pack_samples(samples[::-1], 48, rows=2),
    }
    for name, packs in ways.items():
        for ours, theirs in zip(gradients(backend, packs, loss_type), whole, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-6, rtol=1e-4), name


def test_logprobs_are_bit_identical_in_any_pack(backend: Backend) -> None:
    samples = fake_samples(6)
    alone = {i: backend.compute_inputs(pack_samples([s], 48)[0][0].to_tensors()) for i, s in enumerate(samples)}
    [[together]] = pack_samples(samples, 48, rows=100)
    packed = backend.compute_inputs(together.to_tensors()).trainer_logprobs
    expected = torch.cat([alone[i].trainer_logprobs for i in together.sample_ids])
    assert torch.equal(packed, expected)


def test_logprobs_of_short_packs_are_bit_identical(backend: Backend) -> None:
    short = Sample(prompt="", tokens=[5, 9], loss_mask=[0.0, 1.0])
    long = Sample(prompt="", tokens=list(range(40)), loss_mask=[0.0] * 39 + [1.0])
    alone = backend.compute_inputs(pack_samples([short], 48)[0][0].to_tensors()).trainer_logprobs
    [[micro]] = pack_samples([long, short], 48)
    assert torch.equal(backend.compute_inputs(micro.to_tensors()).trainer_logprobs[1:], alone)


def test_fake_batches_are_deterministic_groups() -> None:
    config = make_config(Path("unused"), data={"fake": {"batch_size": 10, "group_size": 4}})
    batches = build_batches(config, 320)
    assert isinstance(batches, FakeBatches)
    first = batches.receive(1)
    assert [s.group_index for s in first] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert first == build_batches(config, 320).receive(1) != batches.receive(2)
    check_batch(first, LossConfig(), 320)
    assert all(len(s.tokens) <= 48 for s in first)


def test_fake_run_publishes_versions_and_logs_steps(tmp_path: Path) -> None:
    assert train(make_config(tmp_path, max_steps=4, max_async_level=1)) == 0
    assert complete_steps(tmp_path / "weights") == [2, 3, 4], "the last max_async_level + 2"
    from prime_rl.trainer.models.registry import read_tensors

    path = tmp_path / "weights" / "step_4"
    verify_tensors(read_tensors(path), read_manifest(path))
    rows = list(load_jsonl(tmp_path / "metrics.jsonl"))
    steps = [row for row in rows if "loss/mean" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    documented = (
        "loss/mean loss/median loss/std loss/min loss/max loss/policy entropy/mean trainer_probs/mean "
        "inference_probs/mean "
        "mismatch_kl/mean unmasked_mismatch_kl/mean is_masked/mean geo_seq_ratio/mean combined_advantage/mean "
        "optim/lr optim/grad_norm perf/throughput perf/throughput_per_gpu perf/mfu perf/peak_memory time/step "
        "time/wait_for_batch time/load_data time/forward_backward time/broadcast_weights"
    )
    for row in steps:
        assert row["process"] == "trainer" and not set(documented.split()) - set(row)
    timeline = [(row["step"], row["timeline/what"]) for row in rows if "timeline/what" in row]
    assert {(1, "wait_for_batch"), (1, "forward_backward"), (4, "broadcast_weights")} <= set(timeline)
    assert all(row["timeline/start"] <= row["timeline/end"] for row in rows if "timeline/what" in row)


@pytest.mark.parametrize(("level", "received"), [(0, [1]), (1, [1, 2])])
def test_a_failed_write_ends_the_run_before_the_next_wait(
    level: int, received: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, receive = [], FakeBatches.receive

    def record(batches: FakeBatches, step: int, timeout_s: float | None = None) -> list[Sample]:
        steps.append(step)
        return receive(batches, step, timeout_s)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(FakeBatches, "receive", record)
    monkeypatch.setattr(weights, "publish_weights", fail)
    with pytest.raises(OSError, match="no space left"):
        train(make_config(tmp_path, max_async_level=level))
    assert steps == received


def test_same_seed_gives_identical_weights(tmp_path: Path) -> None:
    for name in ("a", "b"):
        train(make_config(tmp_path / name))
    a, b = (read_manifest(tmp_path / name / "weights" / "step_3") for name in ("a", "b"))
    assert a == b


def test_on_policy_mismatch_kl_is_exactly_zero(tmp_path: Path) -> None:
    backend = build_backend(make_config(tmp_path))
    samples = fake_samples(8)
    for sample in samples:
        inputs = backend.compute_inputs(pack_samples([sample], 48)[0][0].to_tensors())
        start = sample.loss_mask.index(1.0)
        sample.inference_logprobs = [0.0] * start + inputs.trainer_logprobs.tolist()
        assert len(sample.inference_logprobs) == len(sample.tokens)
    FilesystemBatchSender(tmp_path / "rollouts").send(1, samples)
    train(make_config(tmp_path, data={"timeout_s": 20}, max_steps=1))
    [row] = [row for row in load_jsonl(tmp_path / "metrics.jsonl") if "loss/mean" in row]
    assert row["mismatch_kl/max"] == 0.0 and row["importance_ratio/min"] == row["importance_ratio/max"] == 1.0
    advantages = [a for s in samples for a, m in zip(s.advantages or [], s.loss_mask, strict=True) if m]
    assert row["advantages/mean"] == pytest.approx(sum(advantages) / len(advantages), abs=1e-6)


def test_positive_advantage_increases_logprob(tmp_path: Path) -> None:
    """End-to-end sign check: a positive advantage increases the log-prob."""
    good = Sample(
        prompt="",
        tokens=[1, 2, 3, 4, 5, 6],
        loss_mask=[0, 0, 0, 1, 1, 1],
        inference_logprobs=[0, 0, 0, -5.7, -5.7, -5.7],
        advantages=[1.0] * 6,
    )
    sender = FilesystemBatchSender(tmp_path / "rollouts")
    for step in range(1, 6):
        sender.send(step, [good])
    train(make_config(tmp_path, data={"timeout_s": 20}, max_steps=5))
    probs = [row["trainer_probs/mean"] for row in load_jsonl(tmp_path / "metrics.jsonl") if "loss/mean" in row]
    assert probs == sorted(probs) and probs[-1] > 2 * probs[0]


def test_new_run_rejects_used_directory(tmp_path: Path) -> None:
    train(make_config(tmp_path, max_steps=2))
    first = read_manifest(tmp_path / "weights" / "step_2")
    with pytest.raises(ValueError, match=r"holds an earlier run .weights up to step_2.(.|\n)*--output-dir"):
        train(make_config(tmp_path, data={"timeout_s": 1}))
    inside = make_config(tmp_path, model={"name": str(tmp_path / "weights" / "step_2"), "seq_len": 48})
    with pytest.raises(ValueError, match="holds an earlier run"):
        train(inside)
    train(make_config(tmp_path, max_steps=1))
    assert complete_steps(tmp_path / "weights") == [1]
    assert read_manifest(tmp_path / "attempts" / "1" / "weights" / "step_2") == first


def test_a_trainer_may_start_after_its_orchestrator(tmp_path: Path) -> None:
    """The orchestrator may already have published batches and checkpoint parts."""
    sample = Sample(prompt="", tokens=[1, 2], loss_mask=[0, 1], inference_logprobs=[0, -1.0], advantages=[0, 1.0])
    FilesystemBatchSender(tmp_path / "rollouts").send(1, [sample])
    publish_dir(tmp_path / "checkpoints" / "step_1" / "orchestrator", lambda directory: None)
    train(make_config(tmp_path, data={"timeout_s": 20}, max_steps=1, ckpt={"interval": 1}))
    assert complete_steps(tmp_path / "checkpoints", ("trainer", "orchestrator")) == [1]


def test_a_run_shows_its_progress_and_how_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[Progress] = []

    @contextmanager
    def show(what: str, total: int | None, done: int, **options: bool) -> Iterator[Progress]:
        shown.append(Progress(what, total, done, lines=False))
        yield shown[0]

    monkeypatch.setattr("prime_rl.trainer.run.show_progress", show)
    train(make_config(tmp_path, ckpt={"interval": 2}))
    assert (shown[0].total, shown[0].done) == (3, 3)
    out = capsys.readouterr().out
    assert f"--output-dir {tmp_path} --resume" in out
    assert re.search(r"Step 2 .*\n.* About \d+ s for the remaining 1 steps\n.* Step 3 ", out)


def test_batch_timeout_names_the_orchestrator(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="batch of step 1 from the orchestrator"):
        train(make_config(tmp_path, data={"timeout_s": 0.2}))


def test_batch_without_loss_tokens_skips_the_step(tmp_path: Path) -> None:
    sample = Sample(prompt="", tokens=[1, 2], loss_mask=[0, 0], inference_logprobs=[0, 0], advantages=[0, 0])
    for step in (1, 2):
        FilesystemBatchSender(tmp_path / "rollouts").send(step, [sample])
    train(make_config(tmp_path, data={"timeout_s": 20}, max_steps=2))
    one, two = (read_manifest(tmp_path / "weights" / f"step_{step}").tensors for step in (1, 2))
    assert one == two
    [last] = [row for row in load_jsonl(tmp_path / "metrics.jsonl") if row.get("step") == 2 and "optim/lr" in row]
    assert last["optim/skipped_steps"] == 2


@pytest.mark.parametrize(
    ("changes", "teacher_tau", "words"),
    [
        ({"teacher_logprobs": [0.0, -1.0]}, 0.0, "teacher_tau is 0"),
        ({}, 0.5, "have no teacher log-probs"),
        ({"advantages": None}, 0.0, "no `advantages`"),
        ({"inference_logprobs": None}, 0.0, "no `inference_logprobs`"),
        ({"tokens": [1, 400]}, 0.0, "the vocabulary size is 320"),
        ({"loss_mask": []}, 0.0, "0 mask entries"),
        ({"tokens": [], "loss_mask": []}, 0.0, "sample 0 of the batch has no tokens"),
        ({"tokens": [-1, 2]}, 0.0, "has token -1"),
    ],
)
def test_mismatched_batch_is_rejected(changes: dict[str, Any], teacher_tau: float, words: str) -> None:
    fields: dict[str, Any] = {
        "tokens": [1, 2],
        "loss_mask": [0, 1],
        "inference_logprobs": [0, -1],
        "advantages": [0, 1],
    }
    with pytest.raises(ValueError, match=words):
        check_batch([Sample(prompt="", **(fields | changes))], LossConfig(teacher_tau=teacher_tau), 320)


def test_student_tau_follows_teacher_tau() -> None:
    def taus(**loss: float) -> tuple[float, float, float]:
        spec = build_objective(make_config(Path("unused"), loss=loss).loss, 48)
        return spec.adv_tau, spec.teacher_tau, spec.student_tau

    assert taus() == (1.0, 0.0, 0.0)
    assert taus(teacher_tau=0.5) == (1.0, 0.5, 0.5)
    assert taus(teacher_tau=1.0, student_tau=0.5, adv_tau=0.0) == (0.0, 1.0, 0.5)


def make_stepper(**options: Any) -> tuple[nn.Parameter, OptimizerStep]:
    parameter = nn.Parameter(torch.tensor([3.0, 4.0]))
    return parameter, OptimizerStep(torch.optim.SGD([parameter], lr=0.1), **options)


def test_step_uses_global_count_and_clips_norm() -> None:
    parameter, stepper = make_stepper(max_norm=1.0)
    stepper.backward((parameter * torch.tensor([6.0, 0.0])).sum(), 2)
    stepper.backward((parameter * torch.tensor([0.0, 8.0])).sum(), 2)
    report = stepper.step()
    assert report.grad_norm == pytest.approx(5.0) and report.skipped is None
    assert parameter.tolist() == pytest.approx([3 - 0.1 * 3 / 5, 4 - 0.1 * 4 / 5], abs=1e-5)
    assert parameter.grad is None
    with pytest.raises(ValueError, match="global count"):
        stepper.backward(parameter.sum(), 0)


def test_bits_of_a_step_do_not_depend_on_threads() -> None:
    """Sizes that several threads share, in parts that do not end at whole vectors."""

    def run(num_threads: int | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.ParameterList(nn.Parameter(torch.randn(size).bfloat16().float()) for size in (300_007, 99_991, 5))
        masters = MasterWeights(model, torch.bfloat16)
        optimizer = torch.optim.AdamW(masters.by_name.values(), lr=1e-3, fused=True)
        options = {"after_step": masters.write_back, "max_norm": 0.1, "num_threads": num_threads}
        stepper = OptimizerStep(optimizer, **options)
        for _ in range(3):
            for master in masters.by_name.values():
                master.grad = torch.randn_like(master)
            stepper.step()
        return [*masters.by_name.values(), *model.parameters()]

    expected = run(None)
    for num_threads in (2, 3):
        assert all(map(torch.equal, run(num_threads), expected))
    assert torch.get_num_threads() == 1


def test_out_of_memory_error_has_advice(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(*arguments: Any, **options: Any) -> None:
        torch.empty(2**60, dtype=torch.uint8)

    monkeypatch.setattr(backend, "run_micros", run_out)
    packs = pack_samples(fake_samples(), 64, 1)[0]
    with pytest.raises(MemoryError, match=r"lower micro_bs or model.seq_len, set model.ac"):
        backend.forward_backward(packs, build_loss(LossConfig(), 32))
    with pytest.raises(MemoryError, match="CUDA out of memory"), step_advice():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
    with pytest.raises(RuntimeError, match="something else"), step_advice():
        raise RuntimeError("something else")


def test_non_finite_gradients_are_skipped_up_to_a_limit() -> None:
    parameter, stepper = make_stepper(max_norm=1.0, max_skipped=3)
    for _ in range(2):
        stepper.backward(parameter.sum() * math.nan, 1)
        report = stepper.step()
        assert report.skipped is not None and "not finite" in report.skipped
        assert parameter.tolist() == [3.0, 4.0] and parameter.grad is None
    stepper.backward(parameter.sum(), 1)
    assert stepper.step().skipped is None
    assert (stepper.num_steps, stepper.num_skipped) == (3, 2)
    stepper.skip("a"), stepper.skip("b")
    with pytest.raises(FloatingPointError, match="3 steps in a row"):
        stepper.skip("c")


def test_skipped_updates_on_one_batch_are_one_skipped_step() -> None:
    parameter, stepper = make_stepper(max_skipped=2)
    for begins_step in (True, False, False):
        stepper.backward(parameter.sum() * math.nan, 1)
        assert stepper.step(begins_step=begins_step).skipped is not None
    assert (stepper.num_steps, stepper.num_skipped) == (1, 3)
    with pytest.raises(FloatingPointError, match="2 steps in a row"):
        stepper.skip("the next batch is bad, too")


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ({"type": "constant"}, [1, 1, 1, 1, 1, 1, 1, 1]),
        ({"type": "linear", "warmup_steps": 2, "decay_steps": 4}, [0.5, 1, 1, 1, 0.75, 0.5, 0.25, 0]),
        ({"type": "linear", "warmup_steps": 0, "decay_steps": 0}, [1] * 8),
        (
            {"type": "linear", "warmup_steps": 4, "decay_steps": 4, "min_lr": 0.2},
            [0.4, 0.6, 0.8, 1, 0.8, 0.6, 0.4, 0.2],
        ),
        ({"type": "cosine", "warmup_steps": 0}, [(1 + math.cos(math.pi * n / 8)) / 2 for n in range(1, 9)]),
        ({"type": "cosine", "warmup_steps": 4, "min_lr": 0.5}, [0.625, 0.75, 0.875, 1, 0.9268, 0.75, 0.5732, 0.5]),
    ],
)
def test_schedules(scheduler: dict[str, Any], expected: list[float]) -> None:
    config: SchedulerConfig = make_config(Path("unused"), scheduler=scheduler, max_steps=8, optim={"lr": 1.0}).scheduler
    schedule = build_schedule(config, 1.0, 8)
    assert [schedule(n) for n in range(1, 9)] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_single_step_has_the_full_learning_rate(kind: str) -> None:
    config: SchedulerConfig = make_config(Path("unused"), scheduler={"type": kind}, max_steps=1).scheduler
    assert build_schedule(config, 1.0, 1)(1) == 1


def test_the_schedule_reaches_the_optimizer() -> None:
    parameter, stepper = make_stepper(schedule=lambda n: 1 / n)
    lrs = []
    for _ in range(3):
        stepper.backward(parameter.sum(), 1)
        lrs.append(stepper.step().lr)
    assert lrs == pytest.approx([0.1, 0.05, 0.1 / 3])


@pytest.mark.parametrize(("attn", "dtype"), [("sdpa", torch.bfloat16), ("exact", torch.float32)])
def test_bfloat16_models_train_with_float32_masters(
    attn: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 with instructions for it, and exactly in float32 rounded to bfloat16."""
    monkeypatch.setattr(cpu_kernels, "has_bf16_products", lambda: True)
    model = {"name": "tiny-qwen3", "dtype": "bfloat16", "attn": attn, "debug": {"random_init": True}}
    config = make_config(tmp_path, model=model)
    backend = build_backend(config)
    assert {p.dtype for p in backend.model.parameters()} == {dtype}
    assert {p.dtype for p in backend.parameters.values()} == {torch.float32}
    assert backend.model.lm_head.weight is backend.model.model.embed_tokens.weight
    wide = build_backend(make_config(tmp_path))
    for ours, theirs in zip(
        gradients(backend, pack_samples(fake_samples(), 48)),
        gradients(wide, pack_samples(fake_samples(), 48)),
        strict=True,
    ):
        assert torch.nn.functional.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0) > 0.98
    before = backend.model.lm_head.weight.clone()
    [micros] = pack_samples(fake_samples(), 48)
    backend.optim_step(backend.forward_backward(micros, build_loss(config.loss, 48)))
    assert not torch.equal(before, backend.model.lm_head.weight)
    for name, parameter in backend.model.named_parameters():
        assert torch.equal(parameter.float(), backend.parameters[name].bfloat16().float()) and parameter.grad is None


@pytest.mark.parametrize("attn", ["auto", "exact", "sdpa"])
@pytest.mark.parametrize("has_products", [True, False])
def test_only_inexact_rl_computes_with_bfloat16_instructions(
    has_products: bool, attn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_kernels, "has_bf16_products", lambda: has_products)
    model = {"dtype": "bfloat16", "device": "cpu", "attn": attn}
    placement = resolve_placement(TrainConfig.model_validate({"model": model}).model)
    assert placement.dtype == torch.bfloat16 and placement.attn == ("sdpa" if attn == "sdpa" else "exact")
    fast = has_products and attn == "sdpa"
    assert placement.arithmetic == (torch.bfloat16 if fast else torch.float32)
    sft = resolve_placement(SFTConfig.model_validate({"model": {"dtype": "bfloat16", "device": "cpu"}}).model)
    assert sft.arithmetic == (torch.bfloat16 if has_products else torch.float32)


@pytest.mark.parametrize(("dtype", "attn"), [("auto", "flash"), ("bfloat16", "flash"), ("float32", "sdpa")])
def test_attention_on_a_gpu_follows_the_data_type(dtype: str, attn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(model_module, "has_flash", lambda device: True)
    assert resolve_placement(TrainConfig.model_validate({"model": {"dtype": dtype}}).model).attn == attn


def test_masters_accumulate_small_updates() -> None:
    """Updates below the bfloat16 resolution accumulate."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    masters = MasterWeights(model, torch.bfloat16)
    stepper = OptimizerStep(torch.optim.SGD(masters.by_name.values(), lr=1e-3), after_step=masters.write_back)
    for _ in range(10):
        stepper.backward(model(torch.ones(1, 1, dtype=torch.bfloat16)).sum(), 1)
        stepper.step()
    assert masters.by_name["weight"].item() == pytest.approx(0.99, abs=1e-5)
    assert model.weight.item() == torch.tensor(0.99).bfloat16().item() != 1.0


def test_step_timer_sums_phases_and_resets() -> None:
    reported: list[str] = []
    watch = StepTimer(lambda what, start, end: reported.append(what))
    for what in ("a", "a", "b"):
        with watch(what):
            pass
    assert reported == ["a", "a", "b"] and set(watch.lap()) == {"time/a", "time/b"} and watch.lap() == {}


@pytest.mark.parametrize(
    ("argv", "steps", "changes"),
    [
        (["linear"], (1, 2), "warmup_steps 10 -> 1 and decay_steps 10 -> 2"),
        (["linear", "--scheduler.warmup_steps", "0"], (0, 3), "warmup_steps 0 -> 0 and decay_steps 10 -> 3"),
        (["cosine"], (1, None), "warmup_steps 10 -> 1"),
        (["cosine", "--scheduler.warmup_steps", "3"], (1, None), "warmup_steps 3 -> 1"),
        (["linear", "--scheduler.warmup_steps", "1", "--scheduler.decay_steps", "2"], (1, 2), None),
    ],
)
def test_schedule_of_a_short_run_is_shortened(argv: list[str], steps: tuple[int, int | None], changes: str) -> None:
    config, _ = parse_argv(TrainConfig, ["--max_steps", "3", "--scheduler.type", *argv], "trainer", {})
    assert (config.scheduler.warmup_steps, getattr(config.scheduler, "decay_steps", None)) == steps
    note = f"note: the learning-rate schedule is shortened to max_steps = 3: {changes}"
    assert config.notes == ([note] if changes else [])
    assert parse_argv(TrainConfig, ["--max_steps", "20", "--scheduler.type", "linear"], "trainer", {})[0].notes == []


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--parallel.tp", "2", "--optim.type", "muon"], "muon needs whole matrices"),
        (["--parallel.cp", "2", "--model.compile.backend", "inductor"], "does not support model.compile"),
        (["--parallel.ep", "2", "--model.impl", "hf"], "parallel.ep needs the native decoder"),
        (["--parallel.pp_stages", "2"], "set pp above 1"),
        (["--parallel.cp_style", "ring"], "set cp above 1"),
        (["--parallel.cp", "2", "--parallel.cp_style", "ring", "--model.attn", "exact"], "replaces the attention"),
        (["--parallel.tp", "2", *DISTILL, "full"], "parallel.tp splits"),
        (["--parallel.cp", "2", *DISTILL, "auto"], "parallel.cp splits"),
        (["--scheduler.type", "cosine"], "max_steps"),
        (["--optim.type", "sgd", "--optim.momentum", "0"], "nesterov"),
        (["--optim.betas3", "1"], "betas"),
        (["--loss.type", "grop"], "aipo"),
        (
            ["--loss.type", "grpo", "--loss.delta", "2"],
            r"delta has no effect with type grpo.* use one of aipo, maxrl, opo, rloo, sdpo, opsd$",
        ),
        (["--loss.type", "reinforce", "--loss.ratio", "token"], "is incompatible with type reinforce"),
        (["--loss.type", "custom"], "import_path"),
        (["--loss.max_tokens", "9"], "divisor of loss_aggregation constant"),
        ([*DISTILL, "auto", "--loss.student_tau", "0"], "no target .*adaptive"),
        ([*DISTILL, "full", "--loss.distill.direction", "jsd", "--loss.student_tau=-1"], "no target .*jsd"),
        (["--loss.distill.clip", "0"], r"loss\.distill\.clip"),
        (["--parallel.tp", "0"], r"parallel\.tp"),
        (["--model.lora.rank", "0"], r"model\.lora\.rank"),
        (["--wandb.log_extras.max_samples", "0"], r"wandb\.log_extras\.max_samples"),
        (["--ema_decay", "1"], "ema_decay"),
    ],
)
def test_invalid_configs_are_rejected(argv: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_argv(TrainConfig, argv, "trainer", environ={})


@pytest.mark.parametrize("optim", ["adamw", "sgd", "muon"])
def test_negative_learning_rate_is_rejected(optim: str) -> None:
    with pytest.raises(ValueError, match=r"optim\.lr"):
        parse_argv(TrainConfig, ["--optim.type", optim, "--optim.lr", "-0.1"], "trainer", environ={})
    parse_argv(TrainConfig, ["--optim.type", optim, "--optim.lr", "0"], "trainer", environ={})


@pytest.mark.parametrize(
    ("config_cls", "argv", "lr", "source"),
    [
        (TrainConfig, [], 1e-5, "default without LoRA"),
        (TrainConfig, ["--model.lora"], 1e-4, "default with LoRA"),
        (SFTConfig, [], 2e-5, "default without LoRA"),
        (SFTConfig, ["--model.lora", "--optim.type", "muon"], 2e-4, "default with LoRA"),
        (SFTConfig, ["--model.lora", "--optim.lr", "3e-4"], 3e-4, "CLI"),
    ],
)
def test_default_learning_rate_follows_the_method(
    config_cls: type[TrainConfig] | type[SFTConfig], argv: list[str], lr: float, source: str
) -> None:
    config, sources = parse_argv(config_cls, ["--max-steps", "9", *argv], "trainer", environ={})
    assert config.optim.lr == pytest.approx(lr) and sources["optim.lr"] == source
    assert not config.notes


def test_slow_lora_learning_rate_is_a_warning() -> None:
    slow = ["--optim.lr", "1e-5"]
    config, _ = parse_argv(TrainConfig, ["--model.lora", *slow], "trainer", environ={})
    [line] = config.notes
    assert line.startswith("warning: optim.lr = 1e-05")
    for argv in (slow, ["--model.lora", "--optim.lr", "0"], ["--model.lora", "--optim.type", "sgd", *slow]):
        assert not parse_argv(TrainConfig, argv, "trainer", environ={})[0].notes


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_missing_device_is_reported(tmp_path: Path) -> None:
    for device in ("cuda", "tpu", "mps"):
        with pytest.raises(ValueError, match=device):
            resolve_placement(make_config(tmp_path, model={"device": device}).model)
    assert resolve_placement(make_config(tmp_path).model).attn == "exact"


def test_debug_config_runs_five_fake_steps() -> None:
    config, _ = parse_argv(TrainConfig, ["@", str(ROOT / "configs/debug/rl/train.toml")], "trainer", environ={})
    assert config.max_steps == 5 and config.data.fake is not None
