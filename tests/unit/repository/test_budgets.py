"""Work that is counted, not timed: operations, passes, bytes and Python calls, each with a budget.

A count is the same on any machine, so a change that makes something more expensive fails here however fast the machine
is. Lower the budget when you make it cheaper.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated_run import Faults, World, make_world
from torch.utils._python_dispatch import TorchDispatchMode
from virtual_time import run

from prime_rl.inference.embedded.engine import EmbeddedEngine
from prime_rl.inference.engine import GenerationRequest, SamplingParams
from prime_rl.trainer.backend import build_backend
from prime_rl.trainer.config import TrainConfig
from prime_rl.trainer.models.causal_lm import CausalLM, init_weights, tensor_names
from prime_rl.trainer.models.decoder_config import DecoderConfig
from prime_rl.trainer.rl.config import LossConfig
from prime_rl.trainer.rl.data import build_batches
from prime_rl.trainer.rl.loss import build_loss
from prime_rl.transport import digests
from rollouts.kernels import native
from rollouts.training import manifests
from rollouts.training.batching import pack_samples

SHAPE = {
    "model_type": "qwen3",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


class Operations(TorchDispatchMode):
    """Counts torch operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def python_calls(work: Callable[[], object]) -> int:
    """Calls of Python functions while `work` runs."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    gc.disable()  # finalizers of what earlier tests have left would count
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
        gc.enable()
    return count


def build_engine(num_layers: int, exact: bool) -> EmbeddedEngine:
    model = CausalLM(DecoderConfig.from_hf(SHAPE | {"num_hidden_layers": num_layers}))
    init_weights(model, 0)
    return EmbeddedEngine(model, exact=exact)


def add(engine: EmbeddedEngine, num: int, prompt: list[int]) -> None:
    for seed in range(num):
        engine.add(GenerationRequest(prompt, SamplingParams(max_tokens=60, seed=seed, ignore_eos=True)))


def decoding(num_layers: int, exact: bool, num: int = 8) -> EmbeddedEngine:
    """An engine whose next steps draw one token for each of `num` sequences."""
    engine = build_engine(num_layers, exact)
    add(engine, num, list(range(3, 20)))
    while engine.stats().generated_tokens < 2 * num:
        engine.step()
    return engine


@pytest.fixture(params=["kernels", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """A step is one call of a kernel, or torch's operations where there is no compiler."""
    if request.param == "torch":
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip("no C compiler; cure: apt-get install gcc")
    return bool(request.param == "kernels")


@pytest.mark.parametrize("exact", [True, False])
def test_operations_of_a_decode_step(exact: bool, kernels: bool) -> None:
    counts = {}
    for num_layers in (2, 4):
        engine = decoding(num_layers, exact)
        with Operations() as operations:
            engine.step()
        counts[num_layers] = operations.count
    assert (counts[4] - counts[2]) / 2 <= (0 if kernels else 42 if exact else 40)
    beside = 2 * counts[2] - counts[4]
    assert beside <= (29 if kernels else 47), "embedding, masks, head and sampling, whatever the depth"


def test_python_calls_of_a_decode_step(kernels: bool) -> None:
    """A constant, and at most one for each token that is drawn."""
    few, many = (python_calls(decoding(2, True, num).step) for num in (8, 40))
    assert (many - few) / 32 <= 1.0
    assert few <= (72 if kernels else 220), "two for each of 8 sequences add its token and look for a draft"


def test_a_groups_prompt_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, rows = build_engine(2, True), []
    decoder = engine._runner.decoder
    monkeypatch.setattr(engine._runner, "decoder", Noted(decoder, rows))
    prompt = [3 + i % 100 for i in range(384)]  # more than a decode step would compute
    add(engine, 16, prompt)
    engine.step()
    assert engine.stats().generated_tokens == 16
    assert rows == [len(prompt)]


class Noted:
    """A decoder that notes how many tokens go through it."""

    def __init__(self, decoder: Any, rows: list[int]) -> None:
        self._decoder, self._rows = decoder, rows

    def __call__(self, tokens: Any, *arguments: Any, **options: Any) -> Any:
        self._rows.append(len(tokens))
        return self._decoder(tokens, *arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)


def test_bytes_of_a_weight_update(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each byte is digested once where it is published and once where it is held."""
    digested: list[int] = []

    def counting(tensor: torch.Tensor) -> str:
        digested.append(tensor.numel() * tensor.element_size())
        return digest(tensor)

    digest = manifests.digest_tensor
    monkeypatch.setattr(manifests, "digest_tensor", counting)
    monkeypatch.setattr(digests, "digest_tensor", counting)
    engine = build_engine(2, True)
    tensors = {name: tensor.clone() for name, tensor in tensor_names(engine.model).items()}
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    engine.load_weights(tensors, 1)()
    assert sum(digested) == size
    manifests.describe_tensors(tensors)
    assert sum(digested) == 2 * size


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Tokens of every forward pass of a decoder."""
    seen: list[int] = []
    forward = CausalLM.forward

    def noted(self: CausalLM, input_ids: torch.Tensor, *arguments: Any) -> Any:
        seen.append(len(input_ids))
        return forward(self, input_ids, *arguments)

    monkeypatch.setattr(CausalLM, "forward", noted)
    yield seen


def test_passes_of_a_training_step(passes: list[int], tmp_path: Path) -> None:
    """One for each micro-batch, without a token of padding between samples."""
    config = TrainConfig.model_validate(
        {
            "model": {"name": "tiny-qwen3", "seq_len": 64, "debug": {"random_init": True}},
            "data": {"fake": {"batch_size": 24}},
            "output_dir": tmp_path,
            "log": {"file": False},
        }
    )
    backend = build_backend(config)
    samples = build_batches(config, 320).receive(1)
    [micros] = pack_samples(samples, 64, 1)
    passes.clear()
    backend.forward_backward(micros, build_loss(LossConfig(), 64))
    assert len(passes) == len(micros)
    assert sum(passes) <= sum(len(sample.tokens) for sample in samples)


def test_python_calls_of_the_orchestrator_for_a_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing, accounting, scoring, packing for the wire, checkpoints; the simulated world included, not its checks."""
    monkeypatch.setattr(World, "check", lambda self: None)
    calls = {}
    for steps in (2, 6):
        world = make_world(tmp_path / str(steps), 0, Faults(), max_steps=steps, batch_size=64, rollouts_per_example=8)
        calls[steps] = python_calls(lambda world=world: run(lambda: world.run(monkeypatch)))
    rollouts = 4 * world.config.batch_size
    assert (calls[6] - calls[2]) / rollouts <= 600
