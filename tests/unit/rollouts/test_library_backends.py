"""Backends of the library: accumulation, exact continuation, atomic checkpoints, one rank equals two."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from tiny_hf import build_batch, build_tiny_hf
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, MultiStepLR, ReduceLROnPlateau, SequentialLR

from prime_rl.transport.weights import check_directory
from rollouts.training import steps
from rollouts.training.backends import checkpoint as files
from rollouts.training.backends import latest_checkpoint
from rollouts.training.backends.fsdp import FSDPConfig, FSDPTrainingBackend, find_units
from rollouts.training.backends.loss_fn import as_loss_fn
from rollouts.training.backends.pytorch import PyTorchTrainingBackend
from rollouts.training.backends.pytorch_factory import (
    compute_device_map_single_gpu,
    create_adamw_optimizer,
    create_backend_with_scheduler,
    create_cross_entropy_loss,
    create_pytorch_backend,
    create_warmup_cosine_scheduler,
    parse_dtype,
)
from rollouts.training.rl_losses import LossInputs, LossOutput, compute_label_logprobs, grpo_loss, nll_loss, ppo_loss
from rollouts.training.types import ImmediateTrainFuture, TrainFuture

LOOPS = ("asyncio", "trio")


def build_backend(path: Path, loss_fn: Any = None, seed: int = 0, **options: Any) -> PyTorchTrainingBackend:
    model = build_tiny_hf(seed)
    optimizer = create_adamw_optimizer(model, 1e-2)
    return PyTorchTrainingBackend(model, optimizer, loss_fn or create_cross_entropy_loss(), path, **options)


def weights_of(backend: PyTorchTrainingBackend) -> dict[str, torch.Tensor]:
    return backend.get_weights().wait()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[name], b[name], atol=2e-6) for name in a)


def step(backend: Any, *batches: dict[str, Any]) -> dict[str, float]:
    for batch in batches:
        backend.forward_backward(batch)
    return backend.optim_step().wait()


def rows(batch: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    return {name: value[start:stop] for name, value in batch.items()}


@pytest.mark.parametrize("loop", LOOPS)
def test_futures_can_be_awaited_in_every_documented_way(tmp_path: Path, loop: str) -> None:
    pytest.importorskip(loop)

    async def main() -> None:
        backend, batch = build_backend(tmp_path), build_batch()
        future = backend.forward_backward(batch)
        assert {"loss", "grad_norm"} <= (await future.result()).keys()
        assert (await future)["loss"] == (await future.result())["loss"]
        assert (await backend.optim_step().result())["step"] == 1
        backend.forward_backward(batch)
        assert (await backend.optim_step())["step"] == 2
        assert await backend.load_weights(await backend.get_weights()) is None
        path = await backend.save_checkpoint(2, {"loss": 1.0})
        assert path == tmp_path / "step_2" and (await backend.load_checkpoint(path))["step"] == 2

    anyio.run(main, backend=loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_future_ends_once_with_a_value_none_or_an_error(loop: str) -> None:
    pytest.importorskip(loop)

    async def main() -> None:
        future: TrainFuture[None] = TrainFuture("sync")
        seen: list[Any] = []

        async def wait() -> None:
            seen.append(await future)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            tasks.start_soon(wait)
            await anyio.lowlevel.checkpoint()
            assert not future.done()
            future.set_result(None)
        assert seen == [None, None] and future.done()
        with pytest.raises(RuntimeError, match="sync has its result already"):
            future.set_exception(ValueError())
        failed: TrainFuture[int] = TrainFuture()
        failed.set_exception(KeyError("why"))
        for _ in range(2):
            with pytest.raises(KeyError, match="why"):
                await failed.result()
        with anyio.move_on_after(0.01) as scope:
            await TrainFuture()
        assert scope.cancelled_caught
        assert await ImmediateTrainFuture(3) == 3

    anyio.run(main, backend=loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_waiting_in_the_loop_while_a_task_awaits_does_not_lock(tmp_path: Path, loop: str) -> None:
    pytest.importorskip(loop)
    backend, batch, seen = build_backend(tmp_path), build_batch(), []

    async def main() -> None:
        async def wait(future: TrainFuture[dict[str, float]]) -> None:
            seen.append(await future)

        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(wait, backend.forward_backward(batch))
                    await anyio.lowlevel.checkpoint()
                    backend.get_weights().wait()

    anyio.run(main, backend=loop)
    assert len(seen) == 3


def test_one_call_is_plain_torch(tmp_path: Path) -> None:
    backend, batch = build_backend(tmp_path, grpo_loss), build_batch()
    model = build_tiny_hf()
    optimizer = create_adamw_optimizer(model, 1e-2)
    for _ in range(2):
        output = model(batch["input_ids"], attention_mask=batch["attention_mask"], position_ids=batch["position_ids"])
        loss = grpo_loss(output.logits, batch["labels"], batch["loss_mask"], batch["advantages"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert step(backend, batch)["loss"] == loss.item()
    assert same(weights_of(backend), model.state_dict())


@pytest.mark.parametrize(
    "loss_fn",
    [
        create_cross_entropy_loss(),
        grpo_loss,
        partial(ppo_loss, clip_range=0.1),
        partial(ppo_loss, aggregation="constant", max_tokens=20),
    ],
    ids=["cross_entropy", "grpo", "ppo_token", "ppo_constant"],
)
def test_accumulated_parts_equal_the_whole_batch(tmp_path: Path, loss_fn: Callable[..., Any]) -> None:
    batch = build_batch(6)
    batch["old_log_probs"] = torch.full_like(batch["loss_mask"], -4.2)
    whole, parts = build_backend(tmp_path / "a", loss_fn), build_backend(tmp_path / "b", loss_fn)
    for backend in (whole, parts):  # SGD shows the gradient as it is
        backend.optimizer = torch.optim.SGD(backend.model.parameters(), 0.1)
        backend._stepper.optimizer = backend.optimizer
    a = step(whole, batch)
    b = step(parts, rows(batch, 0, 1), rows(batch, 1, 4), rows(batch, 4, 6))
    assert a["loss"] == pytest.approx(b["loss"], abs=1e-6) and a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)
    assert close(weights_of(whole), weights_of(parts))


def by_sum(logits: torch.Tensor, batch: dict[str, Any]) -> LossOutput:
    mask = batch["loss_mask"].flatten()
    logp = compute_label_logprobs(logits, batch["labels"]).flatten()
    zeros = torch.zeros_like(mask)
    return nll_loss(LossInputs(logp, zeros, zeros, mask, zeros.long()))


@pytest.mark.parametrize("loss_fn", [create_cross_entropy_loss(), ppo_loss, by_sum], ids=["nll", "ppo", "sum"])
def test_weights_below_one_do_not_shrink_the_loss(tmp_path: Path, loss_fn: Callable[..., Any]) -> None:
    batch = build_batch(2)
    batch["old_log_probs"] = torch.full_like(batch["loss_mask"], -4.2)
    light = batch | {"loss_mask": batch["loss_mask"] * 0.01}
    losses = [step(build_backend(tmp_path, loss_fn), weighted)["loss"] for weighted in (batch, light)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_sums_and_counts_are_taken_as_losses(tmp_path: Path) -> None:
    backend, reference, batch = build_backend(tmp_path / "a", by_sum), build_backend(tmp_path / "b"), build_batch()
    assert step(backend, batch)["loss"] == pytest.approx(step(reference, batch)["loss"], rel=1e-6)
    assert close(weights_of(backend), weights_of(reference))


def test_padding_and_temperature() -> None:
    from tiny_hf import build_samples

    from rollouts.training.batching import pad_samples

    model, samples = build_tiny_hf().eval(), build_samples(3)
    wide = pad_samples(samples, multiple=16)
    assert wide["input_ids"].shape == (3, 16)
    whole = model(wide["input_ids"], attention_mask=wide["attention_mask"], position_ids=wide["position_ids"]).logits
    for i, sample in enumerate(samples):
        alone = pad_samples([sample])
        n = len(sample.tokens)
        assert torch.allclose(model(alone["input_ids"]).logits[0], whole[i, :n], atol=1e-5)
        assert alone["labels"][0].tolist() == [*sample.tokens[1:], 0]
        assert alone["loss_mask"][0].tolist() == [*sample.loss_mask[1:], 0.0]
    samples[1].temperature = 0.5
    samples[1].inference_logprobs = [-float(k) for k in range(len(samples[1].tokens))]
    assert pad_samples(samples)["temperature"].tolist() == [1.0, 0.5, 1.0]
    assert "old_log_probs" not in pad_samples(samples)
    assert pad_samples(samples[1:2])["old_log_probs"][0, 0] == -1.0
    samples[1].temperature = 0.0
    with pytest.raises(ValueError, match="temperature 0"):
        pad_samples(samples)


def test_temperature_divides_the_logits(tmp_path: Path) -> None:
    batch = build_batch()
    cold = {**batch, "temperature": torch.full((4,), 0.5)}
    backend = build_backend(tmp_path)
    model = build_tiny_hf()
    with torch.no_grad():
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits / 0.5
        expected = create_cross_entropy_loss()(logits, batch)
    assert backend.forward_backward(cold).wait()["loss"] == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (lambda logits, batch: 0, "logits batch"),
        (lambda x, batch, scale=2: 0, "x batch"),
        (lambda logits, labels, loss_mask=None: 0, "streams"),
        (lambda **everything: 0, "keywords"),
        (grpo_loss, "grpo"),
        (ppo_loss, "ppo"),
        (partial(ppo_loss, clip_range=0.3), "partial"),
        (create_cross_entropy_loss(), "cross entropy"),
    ],
)
def test_loss_functions_that_are_accepted(function: Callable[..., Any], names: str) -> None:
    assert callable(as_loss_fn(function))


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (lambda logits: 0, "does not take the batch"),
        (lambda logits, target: 0, "'target'"),
        (lambda logits, batch, weight: 0, "'weight'"),
        (lambda: 0, "no logits"),
        (torch.nn.functional.cross_entropy, "'target'"),
        (3, "not callable"),
    ],
)
def test_loss_functions_that_are_refused_at_construction(tmp_path: Path, function: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        build_backend(tmp_path, function)


def test_schedulers_that_are_refused_at_construction(tmp_path: Path) -> None:
    class Decay:
        def __init__(self) -> None:
            self.peak = torch.ones(1)

        def __call__(self, step: int) -> float:
            return 1.0

    for build, sentence in (
        (ReduceLROnPlateau, "ReduceLROnPlateau needs a metric"),
        (lambda optimizer: LambdaLR(optimizer, Decay()), "the state of LambdaLR does not fit into metadata.json"),
    ):
        optimizer = create_adamw_optimizer(model := build_tiny_hf(), 1e-2)
        with pytest.raises(ValueError, match=sentence):
            PyTorchTrainingBackend(model, optimizer, grpo_loss, tmp_path, scheduler=build(optimizer))


def test_bad_batches_are_refused_and_do_no_harm(tmp_path: Path) -> None:
    backend, batch = build_backend(tmp_path), build_batch()
    with pytest.raises(ValueError, match="lacks labels"):
        backend.forward_backward({"input_ids": batch["input_ids"], "loss_mask": batch["loss_mask"]})
    with pytest.raises(ValueError, match=r"labels \[4, 3\]"):
        backend.forward_backward({**batch, "labels": batch["labels"][:, :3]})
    with pytest.raises(ValueError, match="cu_seqlens"):
        backend.forward_backward({**batch, "cu_seqlens": torch.tensor([0, 3])})
    with pytest.raises(ValueError, match="call forward_backward before it"):
        backend.optim_step().wait()
    assert step(backend, batch)["step"] == 1


def test_an_error_in_a_step_poisons_until_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    backend, batch = build_backend(tmp_path), build_batch()
    path = anyio.run(backend.save_checkpoint, 0, {})
    before = weights_of(backend)
    bad = {**batch, "input_ids": batch["input_ids"] + 1000}
    with pytest.raises(RuntimeError, match="Training step failed"):
        backend.forward_backward(bad).wait()
    for operation in (lambda: backend.forward_backward(batch), backend.optim_step, backend.get_weights):
        with pytest.raises(RuntimeError, match="poisoned"):
            operation().wait()
    with pytest.raises(RuntimeError, match="poisoned"):
        anyio.run(backend.save_checkpoint, 1, {})
    anyio.run(backend.load_checkpoint, path)
    assert same(weights_of(backend), before)
    assert step(backend, batch)["step"] == 1


def test_a_gradient_that_is_not_finite_is_skipped(tmp_path: Path) -> None:
    backend, batch = build_backend(tmp_path, grpo_loss), build_batch()
    before = weights_of(backend)
    report = step(backend, {**batch, "advantages": batch["advantages"] * torch.nan})
    assert report["skipped"] == 1.0 and same(weights_of(backend), before) and backend.weight_version == 0
    assert step(backend, {**batch, "loss_mask": batch["loss_mask"] * 0})["skipped"] == 0.0  # grpo counts sequences
    assert backend.weight_version == 1


def test_clipping_bounds_the_step(tmp_path: Path) -> None:
    batch = build_batch()
    backend = build_backend(tmp_path, max_grad_norm=1e-3)
    report = step(backend, batch)
    assert report["grad_norm"] > 1e-3  # of the gradient as it was
    moments = [state["exp_avg"] for state in backend.optimizer.state.values()]
    total = torch.stack([m.norm() for m in moments]).norm() / (1 - 0.9)
    assert float(total) == pytest.approx(1e-3, rel=1e-3)


def test_save_load_continue_is_the_uninterrupted_run(tmp_path: Path) -> None:
    def build(path: Path, seed: int) -> PyTorchTrainingBackend:
        backend = build_backend(path, dropping, seed=seed)
        backend.scheduler = create_warmup_cosine_scheduler(backend.optimizer, 2, 8)
        return backend

    def dropping(logits: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:  # draws from torch's generator
        return torch.nn.functional.dropout(logits, 0.5).float().logsumexp(-1).mean()

    batches = [build_batch(seed=seed) for seed in range(6)]
    torch.manual_seed(7)
    straight = build(tmp_path / "a", 0)
    torch.manual_seed(7)
    reports = [step(straight, batch) for batch in batches[:3]]
    straight.data_state["sft"] = {"position": 12}
    path = anyio.run(straight.save_checkpoint, 3, {"loss": 1.5, "bad": float("nan")})
    reports += [step(straight, batch) for batch in batches[3:]]

    resumed = build(tmp_path / "b", 1)
    metadata = anyio.run(resumed.load_checkpoint, path)
    assert metadata["metrics"] == {"loss": 1.5, "bad": None} and resumed.data_state == {"sft": {"position": 12}}
    again = [step(resumed, batch) for batch in batches[3:]]
    assert again == reports[3:] and [r["lr"] for r in reports][:3] == pytest.approx([1e-3, 5.5e-3, 1e-2])
    assert same(weights_of(straight), weights_of(resumed))
    assert (resumed.current_step, resumed.weight_version) == (6, 6)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: MultiStepLR(optimizer, [3, 4]),
        lambda optimizer: SequentialLR(optimizer, [ConstantLR(optimizer), MultiStepLR(optimizer, [1, 2])], [2]),
    ],
)
def test_milestones_survive_a_resume(tmp_path: Path, schedule: Callable[[Any], Any]) -> None:
    def build(path: Path) -> PyTorchTrainingBackend:
        backend = build_backend(path)
        backend.scheduler = schedule(backend.optimizer)
        return backend

    straight, resumed, batch = build(tmp_path / "a"), build(tmp_path / "b"), build_batch()
    for _ in range(2):
        step(straight, batch)
    resumed.start_from(anyio.run(straight.save_checkpoint, 2, {}))
    rates = [[step(backend, batch)["lr"] for _ in range(4)] for backend in (straight, resumed)]
    assert rates[0] == rates[1] and rates[0][-1] == pytest.approx(1e-4)


def test_saved_milestones_replace_those_of_the_program(tmp_path: Path) -> None:
    saving, resumed = (build_backend(tmp_path / name) for name in "ab")
    saving.scheduler, resumed.scheduler = MultiStepLR(saving.optimizer, [2]), MultiStepLR(resumed.optimizer, [3])
    step(saving, batch := build_batch())
    resumed.start_from(anyio.run(saving.save_checkpoint, 1, {}))
    rates = [[step(backend, batch)["lr"] for _ in range(3)] for backend in (saving, resumed)]
    assert rates[0] == rates[1] and rates[0][-1] < rates[0][0]


def test_numpy_settings_of_an_optimizer_can_be_loaded(tmp_path: Path) -> None:
    saving, resumed = (build_backend(tmp_path / name) for name in "ab")
    saving.optimizer.param_groups[0].update(lr=np.float64(2e-2), betas=(np.float64(0.5), 0.95))
    resumed.start_from(anyio.run(saving.save_checkpoint, 0, {}))
    group = resumed.optimizer.param_groups[0]
    assert (group["lr"], group["betas"]) == (2e-2, (0.5, 0.95)) and type(group["lr"]) is float


@pytest.mark.parametrize(
    ("dtype", "lr", "warns"), [("bfloat16", 1e-5, True), ("bfloat16", 1e-4, False), ("float32", 1e-5, False)]
)
def test_updates_that_bfloat16_loses_are_named(
    dtype: str, lr: float, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = anyio.run(build_backend(tmp_path).save_checkpoint, 1, {})
    create_pytorch_backend(str(path), tmp_path / "next", device_type="cpu", dtype=dtype, learning_rate=lr)
    assert ('set dtype="float32"' in caplog.text) == warns


def test_checkpoint_layout_is_documented(tmp_path: Path) -> None:
    backend = build_backend(tmp_path)
    backend.model.generation_config.eos_token_id = [1, 7]
    step(backend, build_batch())
    path = anyio.run(backend.save_checkpoint, 1, {"loss": 0.5})
    names = {p.name for p in path.iterdir()}
    configs = {"config.json", "generation_config.json"}
    assert {"pytorch_model.bin", "optimizer.bin", "metadata.json", "STABLE"} | configs == names
    metadata = json.loads((path / "metadata.json").read_text())
    assert {"step", "weight_version", "timestamp", "metrics", "format"} <= metadata.keys()
    reloaded = create_pytorch_backend(str(path), tmp_path / "next", device_type="cpu", dtype="float32")
    assert same(weights_of(reloaded), weights_of(backend))
    published = anyio.run(backend.publish_weights, 1)
    assert check_directory(published)[0] == 1, "servers verify it"
    reloaded = create_pytorch_backend(str(published), tmp_path / "last", device_type="cpu", dtype="float32")
    assert reloaded.model.generation_config.eos_token_id == [1, 7]
    assert same(weights_of(reloaded), weights_of(backend))
    for number in (2, 3):
        anyio.run(backend.publish_weights, number)
    assert steps.complete_steps(tmp_path / "weights") == [2, 3]
    steps.publish_step(tmp_path / "weights", 9, lambda directory: None)
    anyio.run(backend.publish_weights, 4)
    assert steps.complete_steps(tmp_path / "weights") == [3, 4, 9], "later weights are of another run"


def test_saving_removes_what_a_crash_left(tmp_path: Path) -> None:
    backend = build_backend(tmp_path)
    left = [tmp_path / ".tmp-step_1-abc", tmp_path / "weights" / ".tmp-step_1-abc"]
    for path in left:
        path.mkdir(parents=True)
    anyio.run(backend.save_checkpoint, 2, {})
    anyio.run(backend.publish_weights, 2)
    assert not any(path.exists() for path in left)


def test_a_compiled_model_has_the_files_of_the_model(tmp_path: Path) -> None:
    model = build_tiny_hf()
    compiled: Any = torch.compile(model)
    backend = PyTorchTrainingBackend(
        compiled, create_adamw_optimizer(compiled, 1e-2), create_cross_entropy_loss(), tmp_path / "a"
    )
    plain, batch = build_backend(tmp_path / "b"), build_batch()
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][:, :3] = 0
    with torch.compiler.set_stance("force_eager"):
        assert step(backend, batch) == step(plain, batch)
    assert same(weights_of(backend), weights_of(plain))
    path = anyio.run(backend.save_checkpoint, 1, {})
    for directory in (path, anyio.run(backend.publish_weights, 1)):
        reloaded = create_pytorch_backend(str(directory), tmp_path / "next", device_type="cpu", dtype="float32")
        assert same(weights_of(reloaded), weights_of(plain))
    for name in ("pytorch_model.bin", "optimizer.bin"):  # as earlier versions wrote it
        content = torch.load(path / name)
        for names in (content, content.get("state", {})):
            for key in [key for key in names if "." in key]:
                names[f"_orig_mod.{key}"] = names.pop(key)
        for group in content.get("param_groups", []):
            group["params"] = [f"_orig_mod.{key}" for key in group["params"]]
        torch.save(content, path / name)
    plain.start_from(path)
    assert same(weights_of(plain), weights_of(backend))


def test_the_latest_checkpoint_is_numeric_and_complete(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "none") is None
    for name in ("step_9999", "step_10000", "step_20000", "notes"):
        (tmp_path / name).mkdir()
    for name in ("step_9999", "step_10000"):
        (tmp_path / name / steps.STABLE).touch()
    assert latest_checkpoint(tmp_path) == tmp_path / "step_10000"


class _Killed(BaseException):
    """As if the process had ended here."""


def test_a_crash_at_any_write_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, batch = build_backend(tmp_path), build_batch()
    step(backend, batch)
    path = anyio.run(backend.save_checkpoint, 1, {})
    expected = weights_of(backend)
    step(backend, batch)
    points = {
        (files.torch, "save"): 2,
        (Path, "write_text"): 3,
        (steps, "_fsync"): 6,
        (steps.os, "rename"): 1,
    }
    crashes = 0
    for (owner, name), calls in points.items():
        real = getattr(owner, name)
        for nth in range(calls):
            count = iter(range(1000))

            def killed(*args: Any, _real: Any = real, _nth: int = nth, _count: Any = count, **kw: Any) -> Any:
                if next(_count) == _nth:
                    raise _Killed
                return _real(*args, **kw)

            with monkeypatch.context() as patch:
                patch.setattr(owner, name, killed)
                patch.setattr(steps.shutil, "rmtree", lambda *a, **k: None)  # the dead do not tidy up
                with pytest.raises(_Killed):
                    anyio.run(backend.save_checkpoint, 2, {})
            crashes += 1
            assert latest_checkpoint(tmp_path) == path
    assert crashes == 12
    other = build_backend(tmp_path, seed=5)
    anyio.run(other.load_checkpoint, path)
    assert same(weights_of(other), expected)
    assert anyio.run(backend.save_checkpoint, 2, {}) == latest_checkpoint(tmp_path)


class _Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


def test_checkpoints_that_are_refused(tmp_path: Path) -> None:
    backend = build_backend(tmp_path)
    step(backend, build_batch())
    path = anyio.run(backend.save_checkpoint, 1, {})
    with pytest.raises(ValueError, match="not a directory"):
        anyio.run(backend.load_checkpoint, tmp_path / "step_7")
    (path / steps.STABLE).unlink()
    with pytest.raises(ValueError, match="not a complete checkpoint"):
        anyio.run(backend.load_checkpoint, path)
    (path / steps.STABLE).touch()
    metadata = json.loads((path / "metadata.json").read_text())
    (path / "metadata.json").write_text(json.dumps({**metadata, "format": 99}))
    with pytest.raises(ValueError, match="format 99, this version reads format 1"):
        anyio.run(backend.load_checkpoint, path)
    (path / "metadata.json").write_text(json.dumps(metadata))
    with pytest.raises(ValueError, match="written with no scheduler"):
        other = build_backend(tmp_path)
        other.scheduler = create_warmup_cosine_scheduler(other.optimizer, 1, 4)
        anyio.run(other.load_checkpoint, path)
    anyio.run(partial(other.load_checkpoint, parameters_only=True), path)  # a new stage has its own schedule
    assert same(weights_of(other), weights_of(backend)) and not other.optimizer.state and other.current_step == 1
    other_model = build_tiny_hf(tie=False)
    other = PyTorchTrainingBackend(
        torch.nn.Sequential(other_model), torch.optim.SGD(other_model.parameters(), 0.1), grpo_loss, tmp_path
    )
    with pytest.raises(ValueError, match="another model"):
        anyio.run(other.load_checkpoint, path)
    before = weights_of(backend)
    for name in ("pytorch_model.bin", "optimizer.bin"):
        content = (path / name).read_bytes()
        torch.save({"x": _Bomb()}, path / name)
        with pytest.raises(ValueError, match=rf"{name} cannot be read as tensors"):
            anyio.run(backend.load_checkpoint, path)
        (path / name).write_bytes(content[: len(content) // 2])
        with pytest.raises(ValueError, match=rf"{name} cannot be read as tensors"):
            anyio.run(backend.load_checkpoint, path)
        (path / name).write_bytes(content)
    assert same(weights_of(backend), before)
    with pytest.raises(ValueError, match="call optim_step before saving"):
        backend.forward_backward(build_batch())
        anyio.run(backend.save_checkpoint, 2, {})
    with pytest.raises(ValueError, match="step -1"):
        anyio.run(backend.save_checkpoint, -1, {})
    with pytest.raises(ValueError, match="does not have"):
        PyTorchTrainingBackend(build_tiny_hf(), torch.optim.SGD(build_tiny_hf().parameters(), 0.1), grpo_loss, tmp_path)
    with pytest.raises(ValueError, match="cannot be used here"):
        build_backend(tmp_path, device="cuda:99")


def test_factory(tmp_path: Path) -> None:
    build_tiny_hf().save_pretrained(str(tmp_path / "model"))
    backend, scheduler = create_backend_with_scheduler(
        str(tmp_path / "model"), tmp_path / "ckpt", 10, 0.2, device_type="cpu", dtype="float32", learning_rate=1e-3
    )
    assert backend.scheduler is scheduler and backend.optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    lrs = [step(backend, build_batch())["lr"] for _ in range(10)]
    assert lrs[:3] == pytest.approx([1e-4, 5.5e-4, 1e-3]) and lrs == [*sorted(lrs[:3]), *sorted(lrs[3:], reverse=True)]
    assert scheduler.get_last_lr()[0] == pytest.approx(1e-4)
    assert parse_dtype("bfloat16") is torch.bfloat16 and compute_device_map_single_gpu("cpu", 3) is None
    for call, sentence in [
        (lambda: parse_dtype("int8"), "dtype 'int8'"),
        (lambda: parse_dtype("float16"), "dtype 'float16' is not one of bfloat16, float32"),
        (lambda: compute_device_map_single_gpu("tpu", 0), "device_type 'tpu'"),
        (lambda: compute_device_map_single_gpu("cuda", 99), "gpu_rank 99"),
        (lambda: compute_device_map_single_gpu("cpu", -1), "gpu_rank -1"),
        (lambda: create_adamw_optimizer(backend.model, 2.0), "lr 2.0"),
        (lambda: create_warmup_cosine_scheduler(backend.optimizer, 5, 5), "num_warmup_steps 5"),
        (lambda: create_pytorch_backend(str(tmp_path / "no"), tmp_path, "cpu"), "cannot be loaded"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            call()


def test_fsdp_units_and_flags() -> None:
    model = build_tiny_hf()
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    assert find_units(model, layer + 1) == []
    assert find_units(model, layer) == list(model.model.layers)
    assert find_units(build_tiny_hf(tie=False), 64 * 32)[-1].weight.shape == (64, 32)  # the untied head
    inner = torch.nn.Linear(4, 4, bias=False)
    outer = torch.nn.Sequential(inner, torch.nn.Linear(3, 5, bias=False))
    assert find_units(torch.nn.Sequential(outer), 16) == [inner]  # what is left of `outer` is one parameter short
    for fields, sentence in [
        ({"sharding_strategy": "HYBRID_SHARD"}, "FULL_SHARD, SHARD_GRAD_OP, NO_SHARD"),
        ({"clip_grad": 0.0}, "clip_grad"),
        ({"auto_wrap_min_params": 0}, "auto_wrap_min_params"),
        ({"cpu_offload": True, "sharding_strategy": "NO_SHARD"}, "NO_SHARD has none"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            FSDPConfig(**fields)
    with pytest.raises(ValueError, match="init_process_group"):
        FSDPTrainingBackend(model, torch.optim.AdamW, grpo_loss, Path("unused"), FSDPConfig())
