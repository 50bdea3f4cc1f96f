"""Delta weight sync: encoding, sources of a version, simulated faults, and which files a run keeps."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from prime_rl.inference.config import InferenceConfig
from prime_rl.inference.embedded.engine import EmbeddedEngine
from prime_rl.inference.embedded.loading import WeightReader
from prime_rl.runtime.run_dir import RunDir
from prime_rl.runtime.tokenizer import resolve_model_dir
from prime_rl.trainer.config import TrainConfig
from prime_rl.trainer.models.causal_lm import tensor_names
from prime_rl.trainer.models.registry import load_decoder, read_files
from prime_rl.trainer.publisher import Publisher, Retention
from prime_rl.trainer.rl.train import train
from prime_rl.transport.canary import build_canary
from prime_rl.transport.deltas import DeltaPublisher, apply_changes, encode_changes, read_version
from prime_rl.transport.weights import ModelFiles, publish_weights, verify_tensors
from rollouts.training import steps
from rollouts.training.backends.ranks import Ranks
from rollouts.training.manifests import read_manifest
from rollouts.training.steps import complete_steps, parse_step, prune_steps, step_path

TINY = resolve_model_dir("tiny-qwen3")
CANARY = build_canary(0, [], [], "bfloat16", False)
LEVEL, ANCHORS, KEPT = 1, 4, 6


# Encoding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int8], ids=str)
@pytest.mark.parametrize("share", [0, 1e-5, 0.01, 1], ids=lambda share: f"{share:g}")
def test_changed_elements_are_restored_to_the_bit(dtype: torch.dtype, share: float) -> None:
    rng = torch.Generator().manual_seed(0)
    size = torch.iinfo({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    words = torch.randint(size.min, size.max, (3, 70_001), generator=rng).to(getattr(torch, f"int{size.bits}"))
    at = torch.rand(words.shape, generator=rng) < share
    old, new = words.view(dtype), torch.where(at, words.flip(0).roll(7), words).view(dtype)
    assert share == 0 or not torch.equal(old.view(words.dtype), new.view(words.dtype))
    changes, built = encode_changes(new, old), old.clone()
    apply_changes(built, changes) if changes else None
    assert torch.equal(built.view(words.dtype), new.view(words.dtype)), "also NaN and the sign of zero"
    assert (changes == b"") == (share == 0) and (share > 0.01 or len(changes) < 0.1 * new.numel() * dtype.itemsize)


def test_scalars_and_empty_tensors_are_encoded() -> None:
    for old in (torch.tensor(1.5), torch.zeros(0, 4)):
        new = old + 1
        changes, built = encode_changes(new, old), old.clone()
        apply_changes(built, changes) if changes else None
        assert torch.equal(built, new) and bool(changes) == bool(old.numel())


def test_damaged_changes_raise_value_errors_or_fit() -> None:
    rng, old = random.Random(0), torch.zeros(1000)
    changes = encode_changes((torch.rand(1000) < 0.1) * torch.randn(1000), old)
    errors = Counter[str]()
    for _ in range(500):
        damaged = bytearray(changes)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        try:
            apply_changes(old.clone(), bytes(damaged[: rng.choice([len(damaged), rng.randrange(len(damaged))])]))
        except ValueError as error:
            errors[str(error).split(" ")[1]] += 1
    assert sum(errors.values()) > 400 and len(errors) >= 2, "anything else is left to the digests"
    with pytest.raises(ValueError, match="changes reach element 99 of 50"):
        apply_changes(torch.zeros(50), encode_changes(torch.tensor([0.0] * 99 + [1.0]), torch.zeros(100)))


# Faults


class Simulation:
    """A trainer, an engine and the files between them; `wrong` counts loads of anything but the requested version."""

    def __init__(self, root: Path, seed: int) -> None:
        self.rng, self.run = random.Random(seed), RunDir(root)
        self.generator = torch.Generator().manual_seed(seed)
        self.initial = {"a": self.random(6, 8), "b": self.random(5)}
        self.versions = {0: self.initial}
        self.held, self.step, self.wrong = (0, self.initial), 0, 0
        self.outcomes = Counter[str]()
        self.publisher: Publisher | None = None
        self.faults = (
            *(self.lose, self.lose_file, self.truncate, self.corrupt, self.swap, self.swap_files, self.duplicate),
            *(self.restart_engine, self.corrupt_engine, self.restart_trainer, self.lose_anchors, self.request_again),
        )
        self.start_trainer(0)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).bfloat16()

    def start_trainer(self, step: int) -> None:
        if self.publisher is not None:
            self.publisher.close()
        self.step = step
        backend: Any = SimpleNamespace(ranks=Ranks(0, 1), average=None, adapter_config=None, num_layers=None)
        backend.compute_canary = lambda step, texts: CANARY
        backend.export_state_dict = lambda: self.versions[self.step]
        backend.model = SimpleNamespace(config=SimpleNamespace(tie_word_embeddings=True))
        self.publisher = Publisher(
            self.run,
            cast(Any, backend),
            ModelFiles({}, {}),
            retention=Retention(LEVEL, KEPT, None, step),
            deltas=DeltaPublisher(self.run.broadcasts, ANCHORS),
        )
        prune_steps(self.run.broadcasts, lambda version: False)
        if step:
            self.publisher.publish(step)

    def train(self) -> None:
        old, self.step = self.versions[self.step], self.step + 1
        changed = {n: torch.rand(t.shape, generator=self.generator) < 0.1 for n, t in old.items()}
        self.versions[self.step] = {n: torch.where(changed[n], self.random(*t.shape), t) for n, t in old.items()}
        assert self.publisher is not None
        self.publisher.publish(self.step)

    def load(self, step: int) -> None:
        """Load a version in the engine; it stays with the one before if that is refused."""
        try:
            directory = step_path(self.run.broadcasts, step)
            tensors, version = read_version(directory, self.held, self.run.weights, read_files)
        except (ValueError, OSError):
            self.outcomes["refused"] += 1
            return
        truth = self.versions[step]
        self.wrong += version != step or any(not torch.equal(tensors[n], truth[n]) for n in truth)
        self.outcomes["loaded"] += 1
        self.held = (version, {name: tensor.float() for name, tensor in tensors.items()})

    def fail(self) -> None:
        """One version, one fault, one load."""
        self.train()
        for path in (*self.run.broadcasts.iterdir(), *self.run.weights.iterdir()):
            if (parse_step(path.name) or 0) < self.step - 30:
                shutil.rmtree(path)  # without STABLE, which no process removes
        self.rng.choice(self.faults)()
        candidates = complete_steps(self.run.broadcasts) or [self.step]
        self.load(candidates[-1] if self.rng.random() < 0.8 else self.rng.choice(candidates))

    def pick(self) -> Path:
        """A published version, mostly a recent one."""
        paths = [p for p in (*self.run.broadcasts.iterdir(), *self.run.weights.iterdir()) if (p / "STABLE").exists()]
        newest = step_path(self.run.broadcasts, self.step)
        return newest if self.rng.random() < 0.4 or not paths else self.rng.choice(sorted(paths))

    def pick_file(self) -> Path:
        return self.rng.choice(sorted(self.pick().iterdir()))

    def lose(self) -> None:
        shutil.rmtree(self.pick())

    def lose_file(self) -> None:
        self.pick_file().unlink()

    def truncate(self) -> None:
        path = self.pick_file()
        path.write_bytes(path.read_bytes()[: self.rng.randrange(path.stat().st_size or 1)])

    def corrupt(self) -> None:
        path = self.pick_file()
        data = bytearray(path.read_bytes() or b" ")
        data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        path.write_bytes(data)

    def swap(self) -> None:
        one, other = self.pick(), self.pick()
        if one != other:
            aside = one.rename(one.with_name("aside"))
            other.rename(one)
            aside.rename(other)

    def swap_files(self) -> None:
        one, other = self.pick_file(), self.pick_file()
        ours, theirs = one.read_bytes(), other.read_bytes()
        one.write_bytes(theirs)
        other.write_bytes(ours)

    def duplicate(self) -> None:
        source, target = self.pick(), self.pick()
        for path in source.iterdir():
            shutil.copy(path, target / path.name) if source != target else None

    def restart_engine(self) -> None:
        self.held = (0, self.initial)

    def corrupt_engine(self) -> None:
        held = {name: tensor.clone() for name, tensor in self.held[1].items()}
        held["a"][self.rng.randrange(6), 0] += 1
        self.held = (self.held[0], held)

    def restart_trainer(self) -> None:
        """Continue after an earlier version, on another path; later versions are moved away, as by `rl --resume`."""
        step = self.rng.randint(max(self.step - 5, 1), self.step)
        self.run.archive_steps(dict.fromkeys(self.run.step_dirs, step))
        shutil.rmtree(self.run.attempts, ignore_errors=True)
        self.start_trainer(step)

    def lose_anchors(self) -> None:
        shutil.rmtree(self.run.weights)
        self.run.weights.mkdir()

    def request_again(self) -> None:
        self.load(self.step)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_faults", [100, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_fault_leads_to_a_wrong_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_faults: int) -> None:
    monkeypatch.setattr(steps, "_fsync", lambda path: None)
    simulation = Simulation(tmp_path, seed=num_faults)
    for _ in range(num_faults):
        simulation.fail()
    outcomes = simulation.outcomes
    assert simulation.wrong == 0
    assert outcomes["loaded"] > 0.3 * num_faults and outcomes["refused"] > 0.05 * num_faults, outcomes
    for _ in range(ANCHORS + 1):  # the next anchor repairs whatever is left
        simulation.train()
    outcomes.clear()
    simulation.restart_engine()
    simulation.load(simulation.step)
    simulation.train()
    simulation.load(simulation.step)
    assert outcomes == {"loaded": 2} and simulation.wrong == 0


# Sources of a version


@pytest.fixture(params=[False, True], ids=["shared", "owned"])
def published(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[RunDir, EmbeddedEngine, WeightReader]:
    """Versions 1 to 4 in bfloat16, of which 1 is complete, and an engine in float32."""
    run, model = RunDir(tmp_path), load_decoder(TINY, random_init=True)
    tensors = {name: tensor.bfloat16() for name, tensor in tensor_names(model).items()}
    deltas = DeltaPublisher(run.broadcasts, 10)
    for step in range(1, 5):
        tensors["model.norm.weight"] += 1
        tensors["model.embed_tokens.weight"][step] *= 2
        is_anchor = deltas.needs_anchor(step)
        if is_anchor:
            publish_weights(run.weights, step, tensors, TINY)
        deltas.publish(step, tensors, CANARY, is_anchor=is_anchor)
    engine = EmbeddedEngine(model, max_model_len=64, max_cache_tokens=256, owns_model=request.param)
    return run, engine, WeightReader(InferenceConfig(output_dir=tmp_path), TINY, engine)


def load(run: RunDir, engine: EmbeddedEngine, reader: WeightReader, step: int) -> None:
    path = step_path(run.broadcasts, step)
    digests = engine.load_weights(*reader.read_step(path))()
    assert digests == {name: entry.digest for name, entry in read_manifest(path).tensors.items()}
    assert engine.version == step


def test_an_engine_applies_deltas_to_what_it_holds(published: tuple[RunDir, EmbeddedEngine, WeightReader]) -> None:
    run, engine, reader = published
    assert complete_steps(run.weights) == [1] and complete_steps(run.broadcasts) == [1, 2, 3, 4]
    load(run, engine, reader, 1)
    shutil.rmtree(run.weights)
    for step in (2, 2, 4):  # again, and two versions at once
        load(run, engine, reader, step)
    before = {name: tensor.clone() for name, tensor in engine.tensors().items()}
    with pytest.raises(ValueError, match=r"version 3 cannot be built: no weights in .*weights"):
        reader.read_step(step_path(run.broadcasts, 3))  # backward: from full weights only
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.tensors().items())


def test_a_restarted_engine_starts_from_the_anchor(published: tuple[RunDir, EmbeddedEngine, WeightReader]) -> None:
    run, engine, reader = published
    load(run, engine, reader, 4)
    with torch.no_grad():
        tensor_names(engine.model)["model.norm.weight"].add_(1)  # not what version 4 was
    load(run, engine, reader, 4)
    elsewhere = InferenceConfig(weight_dirs=[run.broadcasts])
    with pytest.raises(ValueError, match=r"version 3 .*weights/step_1 is not below inference\.output_dir"):
        WeightReader(elsewhere, TINY).read_step(step_path(run.broadcasts, 3))


# The trainer's loop


def config_of(out: Path, **ckpt: Any) -> TrainConfig:
    model = {"name": "tiny-qwen3", "seq_len": 48, "dtype": "bfloat16", "debug": {"random_init": True}}
    broadcast = {"delta": True, "anchor_interval": 3}
    given = {"model": model, "data": {"fake": {"batch_size": 2}}, "max_steps": 8, "weight_broadcast": broadcast}
    more = {"output_dir": out, "log": {"file": False}, "max_async_level": 0, "ckpt": {"interval": 5, **ckpt}}
    return TrainConfig.model_validate({**given, **more, "optim": {"lr": 1e-5}})


def test_a_run_keeps_chains_and_resumes(tmp_path: Path) -> None:
    """Anchors 1, 4, 5 (checkpoint), 8 (final); a resumed run begins a new chain and publishes the same versions."""
    run = RunDir(tmp_path)
    assert train(config_of(tmp_path)) == 0
    assert complete_steps(run.weights) == [5, 8] and complete_steps(run.broadcasts) == [5, 6, 7, 8]
    manifests = {step: read_manifest(step_path(run.broadcasts, step)) for step in (6, 7, 8)}
    for step, manifest in manifests.items():
        tensors, version = read_version(step_path(run.broadcasts, step), None, run.weights, read_files)
        assert version == step
        verify_tensors(tensors, manifest)
    assert read_manifest(step_path(run.weights, 8)) == manifests[8]
    assert train(config_of(tmp_path, resume_step=5)) == 0
    assert complete_steps(run.weights) == [5, 8] and complete_steps(run.broadcasts) == [5, 6, 7, 8]
    assert {step: read_manifest(step_path(run.broadcasts, step)) for step in (6, 7, 8)} == manifests


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"weight_broadcast": {"delta": True}, "model": {"dtype": "float32"}}, "delta with float32 weights"),
        (
            {"weight_broadcast": {"delta": True}, "model": {"dtype": "bfloat16", "lora": {}}},
            "no use for an adapter",
        ),
        ({"weight_broadcast": {"delta": True, "type": "gloo"}}, 'type = "gloo": deltas are files'),
    ],
)
def test_settings_without_use_are_rejected(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig.model_validate(given)


def test_weights_of_another_dtype_are_rejected(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "auto"})})
    with pytest.raises(ValueError, match=r'delta with float32 weights.*: set model\.dtype = "bfloat16"'):
        train(config)


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_other_engines_refuse_deltas(backend: str) -> None:
    given = {"backend": backend, "weight_broadcast": {"delta": True}, "sglang": {"base_url": "http://127.0.0.1:1"}}
    if backend == "vllm":
        del given["sglang"]
    with pytest.raises(ValueError, match=f'"{backend}": only the embedded engine applies deltas'):
        InferenceConfig.model_validate(given)
