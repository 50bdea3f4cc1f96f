"""Adapter training: only the adapter is trained, published and checkpointed."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from prime_rl.runtime.tokenizer import resolve_model_dir
from prime_rl.trainer import backend as backend_module
from prime_rl.trainer import model as model_module
from prime_rl.trainer.backend import build_backend
from prime_rl.trainer.config import TrainConfig
from prime_rl.trainer.lora import adapter_tensors, add_lora, load_adapter
from prime_rl.trainer.models.attention import PackedAttention
from prime_rl.trainer.models.causal_lm import CausalLM
from prime_rl.trainer.models.registry import load_causal_lm, load_decoder, read_tensors
from prime_rl.trainer.rl.loss import build_loss
from prime_rl.trainer.rl.train import train
from prime_rl.transport.weights import is_adapter, verify_tensors
from rollouts.training.manifests import read_manifest


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published model with weights."""
    directory = tmp_path_factory.mktemp("base")
    train(make_config(directory, "tiny-qwen3", None, max_steps=1, random_init=True))
    return directory / "weights" / "step_1"


def make_config(
    output_dir: Path, name: Path | str, lora: dict[str, Any] | None, *, random_init: bool = False, **changes: Any
) -> TrainConfig:
    model = {"name": str(name), "seq_len": 48, "debug": {"random_init": random_init}, "lora": lora}
    return TrainConfig.model_validate(
        {
            "model": {**model, **changes.pop("model", {})},
            "optim": {"lr": 1e-2},
            "data": {"fake": {"batch_size": 8}},
            "max_steps": 2,
            "output_dir": output_dir,
            "log": {"file": False},
            **changes,
        }
    )


def compute_hidden(model: CausalLM, ids: torch.Tensor) -> torch.Tensor:
    return model.logits(model(ids, torch.arange(len(ids)), PackedAttention([len(ids)])))


def test_published_adapter_is_a_valid_model_name(base: Path, tmp_path: Path) -> None:
    lora = {"rank": 4, "modules_to_save": ["lm_head"]}
    assert train(make_config(tmp_path, base, lora)) == 0
    directory = tmp_path / "weights" / "step_2"
    raw = load_file(directory / "adapter_model.safetensors")
    verify_tensors(raw, read_manifest(directory))
    assert is_adapter(directory) and not (directory / "model.safetensors").exists()
    assert any(tensor.abs().sum() > 0 for name, tensor in raw.items() if "lora_B" in name), "it has learned something"

    merged = load_decoder(directory)
    frozen = read_tensors(base)["model.layers.0.input_layernorm.weight"]
    assert torch.equal(merged.model.layers[0].input_layernorm.weight, frozen)
    adapter, trained, ids = load_adapter(directory), load_decoder(base), torch.arange(20)
    add_lora(trained, adapter.spec)
    with torch.no_grad():
        for name, tensor in adapter_tensors(trained).items():
            tensor.copy_(adapter.tensors[name])
        torch.testing.assert_close(compute_hidden(merged, ids), compute_hidden(trained, ids), atol=1e-5, rtol=1e-5)

    train(make_config(tmp_path / "more", directory, {"rank": 2}, max_steps=1))
    assert load_adapter(tmp_path / "more" / "weights" / "step_1").base_model == str(directory.resolve())


def test_adapters_of_a_random_model_are_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = {"debug": {"random_init": True, "num_layers": 1, "seed": 3}}
    train(make_config(tmp_path, "tiny-qwen3", {"rank": 4, "merge": True}, model=model))
    assert "--model.debug" not in capsys.readouterr().out, "full models need no options"
    expected = load_decoder(tmp_path / "weights" / "step_2")
    train(make_config(tmp_path / "adapter", "tiny-qwen3", {"rank": 4}, model=model))
    directory = tmp_path / "adapter" / "weights" / "step_2"
    options = " --model.debug.random-init true --model.debug.num-layers 1 --model.debug.seed 3"
    assert f"inference --model.name {directory}{options}\n" in capsys.readouterr().out
    loaded = load_decoder(directory, random_init=True, num_layers=1, seed=3)
    ids = torch.arange(20)
    with torch.no_grad():
        torch.testing.assert_close(compute_hidden(loaded, ids), compute_hidden(expected, ids), atol=1e-5, rtol=1e-5)
        random = load_decoder(resolve_model_dir("tiny-qwen3"), random_init=True, num_layers=1, seed=3)
        assert not torch.equal(compute_hidden(random, ids), compute_hidden(expected, ids)), "it has learned something"


def test_merged_versions_are_plain_models(base: Path, tmp_path: Path) -> None:
    for merge in (True, False):
        train(make_config(tmp_path / str(merge), base, {"rank": 4, "merge": merge}))
    directory = tmp_path / "True" / "weights" / "step_2"
    assert not is_adapter(directory)
    verify_tensors(read_tensors(directory), read_manifest(directory))
    again = read_tensors(tmp_path / "False" / "weights" / "step_2")
    assert all(torch.equal(tensor, again[name]) for name, tensor in read_tensors(directory).items())


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_a_tied_head_is_not_untied_for_engines(name: str, tmp_path: Path) -> None:
    """They could not load the first version."""
    lora = {"rank": 4, "modules_to_save": [name], "merge": True}
    with pytest.raises(ValueError, match="modules_to_save unties the output head of tiny-qwen3 from its embedding"):
        build_backend(make_config(tmp_path, "tiny-qwen3", lora, random_init=True))


def test_resumed_adapter_is_bit_identical_with_dropout(base: Path, tmp_path: Path) -> None:
    lora = {"rank": 4, "dropout": 0.3}
    whole = make_config(tmp_path / "whole", base, lora, max_steps=4)
    train(whole)
    part = {"ckpt": {"interval": 2}, "max_steps": 2}
    train(make_config(tmp_path / "part", base, lora, **part))
    held = load_file(tmp_path / "part" / "checkpoints" / "step_2" / "trainer" / "model.safetensors")
    assert all(".lora_" in name for name in held), "a checkpoint holds what is trained"
    train(make_config(tmp_path / "part", base, lora, max_steps=4, ckpt={"resume_step": -1}))
    first, second = (read_manifest(tmp_path / d / "weights" / "step_4") for d in ("whole", "part"))
    assert first.tensors == second.tensors


def test_adapters_resume_on_their_base_and_alpha_only(base: Path, tmp_path: Path) -> None:
    lora = {"rank": 4, "target_modules": ["q_proj"]}
    train(make_config(tmp_path / "out", base, lora, max_steps=1, ckpt={}))
    resume = {"max_steps": 2, "ckpt": {"resume_step": -1}}
    with pytest.raises(ValueError, match=r"an adapter of another model\.lora\.alpha: use the original one"):
        train(make_config(tmp_path / "out", base, lora | {"alpha": 64.0}, **resume))
    other = tmp_path / "other"
    shutil.copytree(base, other)
    tensors = load_file(other / "model.safetensors")
    save_file({name: tensor + 0.1 for name, tensor in tensors.items()}, other / "model.safetensors")
    with pytest.raises(ValueError, match=r"an adapter of another model\.name: use the original one"):
        train(make_config(tmp_path / "out", other, lora, **resume))


def test_bfloat16_masters_cover_only_the_adapter(base: Path, tmp_path: Path) -> None:
    backend = build_backend(make_config(tmp_path, base, {"rank": 2}, model={"dtype": "bfloat16"}))
    assert {p.dtype for p in backend.parameters.values()} == {torch.float32}
    assert all(".lora_" in name for name in backend.parameters)
    assert {t.dtype for t in backend.export_state_dict().values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("lora", "dtype"),
    [
        ({"rank": 4}, torch.bfloat16),
        ({"rank": 4, "modules_to_save": ["lm_head"]}, torch.float32),
        (None, torch.float32),
    ],
)
def test_frozen_weights_are_loaded_rounded(
    base: Path, lora: dict[str, Any] | None, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the precision of the model, if only an adapter is trained; in fp32 the result is the same."""
    loads: list[torch.dtype] = []

    def load(*arguments: Any, dtype: torch.dtype, **options: Any) -> CausalLM:
        loads.append(dtype)
        return load_causal_lm(*arguments, dtype=dtype, **options)

    monkeypatch.setattr(model_module, "load_causal_lm", load)
    results = []
    for has_critic in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(backend_module, "load_model", partial(load_anyway, has_critic))
            config = make_config(tmp_path / str(has_critic), base, lora, model={"dtype": "bfloat16"})
            train(config)
        results.append(read_tensors(tmp_path / str(has_critic) / "weights" / "step_2"))
    assert loads == [dtype, torch.float32]
    assert all(torch.equal(tensor, results[1][name]) for name, tensor in results[0].items())


def load_anyway(forced: bool, *arguments: Any, **options: Any) -> Any:
    return model_module.load_model(*arguments, **{**options, "has_critic": forced})


def test_missing_base_model_is_reported(tmp_path: Path) -> None:
    train(make_config(tmp_path, "tiny-qwen3", {"rank": 2}, random_init=True, max_steps=1))
    with pytest.raises(ValueError, match="random_init"):
        read_tensors(tmp_path / "weights" / "step_1")


def test_adapters_name_a_base_that_others_can_load(tmp_path: Path) -> None:
    (tmp_path / "small.gguf").touch()
    for name in ("smollm2", str(tmp_path / "small.gguf"), str(tmp_path), "tiny-qwen3"):
        assert model_module.find_base_name(name, Path("/cache/model")) == "/cache/model"
    assert model_module.find_base_name("org/model", Path("/cache/model")) == "org/model"


def test_adapter_gradients_match_the_merged_weight(base: Path, tmp_path: Path) -> None:
    """dL/dB = scale * dL/dW A^T and dL/dA = scale * B^T dL/dW, of the merged weight."""
    from prime_rl.trainer.rl.data import build_batches
    from rollouts.training.batching import pack_samples

    config = make_config(tmp_path, base, {"rank": 3})
    backend = build_backend(config)
    with torch.no_grad():
        for name, p in backend.parameters.items():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1)
    [micros] = pack_samples(build_batches(config, 320).receive(1), 48)
    backend.forward_backward(micros, build_loss(config.loss, longest=48))
    train_dir = tmp_path / "merged"
    whole = build_backend(make_config(train_dir, base, None))
    with torch.no_grad():
        from prime_rl.trainer.lora import merged_tensors

        for name, tensor in merged_tensors(backend.model).items():
            whole.parameters[name].copy_(tensor)
    whole.forward_backward(micros, build_loss(config.loss, longest=48))
    name, scale = "model.layers.0.self_attn.v_proj", 32 / 3
    gradient = whole.parameters[f"{name}.weight"].grad
    a, b = (backend.parameters[f"{name}.lora_{x}.weight"] for x in "AB")
    assert gradient is not None and a.grad is not None and b.grad is not None
    torch.testing.assert_close(b.grad, scale * gradient @ a.detach().T, atol=1e-5, rtol=1e-3)
    torch.testing.assert_close(a.grad, scale * b.detach().T @ gradient, atol=1e-5, rtol=1e-3)
