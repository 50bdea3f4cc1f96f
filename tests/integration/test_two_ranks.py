"""Two ranks of the trainer match one rank: losses, statistics and parameters, in float64 to 1e-9."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import run_program
from rank_steps import (
    critic_config,
    critic_lora_config,
    lora_config,
    moe_config,
    muon_config,
    narrow_config,
    narrow_lora_config,
    rl_config,
    run_critic,
    run_rl,
    run_sft,
    sequences_config,
    sft_config,
    train_another,
)
from safetensors.torch import load_file

from prime_rl.trainer.backend import build_backend
from prime_rl.trainer.ckpt import load_checkpoint, save_checkpoint

DEADLINE_S = 300.0
"""Seconds when nothing else runs are 15 to 20; a machine that does many things at once takes several times as long."""
pytestmark = pytest.mark.timeout(DEADLINE_S + 60)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output of two ranks."""
    root = tmp_path_factory.mktemp("ranks")
    moe_config(root)
    one = build_backend(rl_config())
    list(run_rl(one, rl_config()))
    save_checkpoint(root, 1, one.parameters, one.stepper, {"total_tokens": 5})
    run_program("rank_steps.py", root, timeout_s=DEADLINE_S)
    return root


def assert_close(ours: list[dict[str, float]], theirs: list[dict[str, float]], tolerance: float = 1e-9) -> None:
    assert len(ours) == len(theirs)
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True), 1):
        assert mine.keys() == other.keys()
        for name, value in mine.items():
            assert value == pytest.approx(other[name], rel=tolerance, abs=tolerance), (step, name)


@pytest.mark.parametrize(
    "kind", ["rl", "replicated", "sequences", "sft", "muon", "lora", "moe", "critic", "critic_lora"]
)
def test_two_ranks_equal_one(two: Path, kind: str) -> None:
    config: Any = sft_config() if kind == "sft" else rl_config()
    builds = {"sequences": sequences_config, "muon": muon_config, "lora": lora_config}
    builds |= {"critic": critic_config, "critic_lora": critic_lora_config, "moe": lambda: moe_config(two)}
    config = builds[kind]() if kind in builds else config
    backend = build_backend(config)
    before = {name: tensor.clone() for name, tensor in backend.export_state_dict().items()}
    runs: dict[str, Any] = {"sft": run_sft, "critic": run_critic, "critic_lora": run_critic}
    rows = list(runs.get(kind, run_rl)(backend, config))
    assert_close(json.loads((two / f"{kind}.json").read_text()), rows)
    theirs = load_file(two / f"{kind}.safetensors")
    assert theirs.keys() == before.keys()
    for name, tensor in backend.export_state_dict().items():
        assert tensor.dtype == torch.float64 and not torch.equal(tensor, before[name])
        torch.testing.assert_close(theirs[name], tensor, rtol=1e-9, atol=1e-9)


def test_memory_options_are_bit_identical_on_two_ranks(two: Path) -> None:
    ours, theirs = (load_file(two / f"{name}.safetensors") for name in ("sparing", "rl"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_checkpoints_are_resharded(two: Path) -> None:
    """1 -> 2 -> 1 ranks: resharded checkpoints are bit-identical, and training continues identically."""
    files = {path.name for path in (two / "step_3" / "trainer").iterdir()}
    shards = {f"{kind}-{rank}-of-2.safetensors" for kind in ("model", "optimizer", "rng") for rank in (1, 2)}
    assert files == shards | {"state.json", "STABLE"}
    backends = {}
    for step in (1, 2, 3):
        backends[step] = build_backend(rl_config())
        progress = load_checkpoint(two, step, backends[step].parameters, backends[step].stepper)
        assert progress == {"total_tokens": 5}
    train_another(backends[1], rl_config())
    for name, parameter in backends[1].parameters.items():
        moments = backends[1].stepper.optimizer.state[parameter]
        theirs = backends[3].parameters[name]
        torch.testing.assert_close(theirs, parameter, rtol=1e-9, atol=1e-9)
        for key, value in backends[3].stepper.optimizer.state[theirs].items():
            torch.testing.assert_close(value, moments[key], rtol=1e-9, atol=1e-9)
    train_another(backends[2], rl_config())
    for name, parameter in backends[1].parameters.items():
        assert torch.equal(parameter, backends[2].parameters[name])


def test_missing_rank_file_is_reported(two: Path, tmp_path: Path) -> None:
    shutil.copytree(two / "step_3", tmp_path / "step_3")
    (tmp_path / "step_3" / "trainer" / "model-2-of-2.safetensors").unlink()
    backend = build_backend(rl_config())
    with pytest.raises(ValueError, match=r"model-2-of-2\.safetensors cannot be read"):
        load_checkpoint(tmp_path, 3, backend.parameters, backend.stepper)


@pytest.mark.parametrize("kind", ["narrow", "narrow_lora"])
def test_mixed_precision_on_two_ranks_matches_one(two: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both gather bfloat16, reduce gradients and step in float32; only the summation order differs."""
    monkeypatch.setattr("prime_rl.trainer.model.arithmetic_dtype", lambda dtype, *_: dtype)
    config = narrow_lora_config() if kind == "narrow_lora" else narrow_config()
    backend = build_backend(config)
    rows = list(run_rl(backend, config))
    theirs = json.loads((two / f"{kind}.json").read_text())
    assert_close(theirs[:1], rows[:1], 1e-2)
    tensors = load_file(two / f"{kind}.safetensors")
    for name, tensor in backend.export_state_dict().items():
        assert tensors[name].dtype == torch.bfloat16
        torch.testing.assert_close(tensors[name].float(), tensor.float(), rtol=0.02, atol=1e-3)
