"""Export parity: every model family, full and as adapter, with equal log-probs in transformers."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
import torch
from test_decoder import FAMILIES, build_pair
from tiny_hf import build_tiny_hf

from prime_rl.runtime.tokenizer import check_weights, fingerprint_model
from prime_rl.trainer.config import TrainConfig
from prime_rl.trainer.lora import LoraSpec, adapter_tensors, add_lora, peft_config, peft_tensors
from prime_rl.trainer.models.attention import PackedAttention
from prime_rl.trainer.models.causal_lm import CausalLM, tensor_names
from prime_rl.trainer.models.registry import load_decoder, read_tensors
from prime_rl.trainer.rl.train import train
from prime_rl.transport.weights import publish_weights
from rollouts.training.backends.pytorch import PyTorchTrainingBackend
from rollouts.training.metrics import load_jsonl
from rollouts.training.rl_losses import grpo_loss

IDS = torch.arange(40) * 7 % 320


@torch.no_grad()
def compute_logprobs(model: CausalLM) -> torch.Tensor:
    return torch.log_softmax(model.logits(model(IDS, torch.arange(40), PackedAttention([40]))), -1)


@torch.no_grad()
def compute_their_logprobs(model: torch.nn.Module) -> torch.Tensor:
    return torch.log_softmax(model.eval()(IDS[None]).logits[0], -1)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_checkpoint_round_trip(family: str, tmp_path: Path) -> None:
    import transformers

    theirs, _ = build_pair(family)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_decoder(tmp_path / "theirs")
    torch.testing.assert_close(compute_logprobs(ours), compute_their_logprobs(theirs), atol=1e-5, rtol=0)
    directory = publish_weights(tmp_path, 1, tensor_names(ours), tmp_path / "theirs")
    held = read_tensors(tmp_path / "theirs")
    assert {n: t.shape for n, t in read_tensors(directory).items()} == {n: t.shape for n, t in held.items()}
    assert all(torch.equal(tensor, held[name]) for name, tensor in read_tensors(directory).items())
    again, info = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    torch.testing.assert_close(compute_their_logprobs(again), compute_their_logprobs(theirs), atol=1e-5, rtol=0)


@pytest.mark.parametrize("tie", [False, True])
def test_a_checkpoint_of_the_library_is_a_model(tie: bool, tmp_path: Path) -> None:
    """Its weights are in torch's format only, as those of some models on the hub."""
    theirs = build_tiny_hf(tie=tie)
    backend = PyTorchTrainingBackend(theirs, torch.optim.AdamW(theirs.parameters()), grpo_loss, tmp_path)
    directory = anyio.run(backend.save_checkpoint, 1, {})
    check_weights(directory, random_init=False)
    assert fingerprint_model(str(directory))[0].startswith("pytorch_model.bin ")
    ours, named = load_decoder(directory), dict(theirs.named_parameters())
    assert all(torch.equal(tensor, named[name]) for name, tensor in tensor_names(ours).items())
    (directory / "pytorch_model.bin").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin cannot be read"):
        load_decoder(directory)
    (directory / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match="has no weights"):
        check_weights(directory, random_init=False)  # `optimizer.bin` has none of the model


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_loads_adapter_with_its_base_model(family: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    theirs, _ = build_pair(family)
    theirs.save_pretrained(tmp_path / "base")
    ours = load_decoder(tmp_path / "base")
    spec = LoraSpec(rank=4, alpha=8)
    add_lora(ours, spec, seed=1)
    with torch.no_grad():
        for tensor in adapter_tensors(ours).values():
            tensor.add_(torch.randn_like(tensor), alpha=0.1)
    config = peft_config(ours, spec, str(tmp_path / "base"))
    directory = publish_weights(tmp_path, 1, peft_tensors(ours), tmp_path / "base", adapter_config=config)
    model = peft.AutoPeftModelForCausalLM.from_pretrained(directory)
    torch.testing.assert_close(compute_their_logprobs(model), compute_logprobs(ours), atol=1e-5, rtol=0)
    merged = load_decoder(directory)
    torch.testing.assert_close(compute_logprobs(merged), compute_logprobs(ours), atol=1e-5, rtol=0)


def test_moe_is_trained_and_published_per_expert(tmp_path: Path) -> None:
    theirs, _ = build_pair("qwen3_moe")
    theirs.save_pretrained(tmp_path / "base")
    model = {"name": str(tmp_path / "base"), "seq_len": 32}
    config = {"model": model, "optim": {"lr": 1e-3}, "data": {"fake": {"batch_size": 4}}, "log": {"file": False}}
    train(TrainConfig.model_validate({**config, "max_steps": 2, "output_dir": tmp_path / "run"}))
    before, after = read_tensors(tmp_path / "base"), read_tensors(tmp_path / "run" / "weights" / "step_2")
    assert before.keys() == after.keys()
    assert all(not torch.equal(tensor, before[name]) for name, tensor in after.items() if ".experts." in name)
    [*_, row] = [row for row in load_jsonl(tmp_path / "run" / "metrics.jsonl") if "loss/mean" in row]
    assert row["router/max_violation/max"] >= row["router/max_violation/mean"] >= 0
