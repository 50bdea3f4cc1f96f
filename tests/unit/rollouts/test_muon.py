"""Muon against torch's implementation, for stacks and for AdamW parameters; saving and resuming."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from group_of_one import group_of_one
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from prime_rl.trainer.backend import build_backend
from prime_rl.trainer.config import TrainConfig
from prime_rl.trainer.optim import build_optimizer
from prime_rl.trainer.optim_config import MuonConfig
from prime_rl.trainer.rl.train import train
from rollouts.training.backends.muon import MatrixMuon, is_matrix, orthogonalize
from rollouts.training.manifests import read_manifest


def run_steps(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], num: int = 4) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(num):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize("adjust_lr", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_matrices_step_as_with_torch(adjust_lr: str, nesterov: bool) -> None:
    start = [torch.randn(24, 16), torch.randn(16, 40)]
    ours, theirs = ([p.clone().requires_grad_() for p in start] for _ in range(2))
    shared = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9, "nesterov": nesterov}
    run_steps(MatrixMuon(ours, {**shared, "adjust_lr": adjust_lr}), ours)
    run_steps(torch.optim.Muon(theirs, adjust_lr_fn=adjust_lr, **shared), theirs)
    for mine, other, before in zip(ours, theirs, start, strict=True):
        change = (other - before).norm()
        assert (mine - other).norm() < 0.02 * change, "bfloat16 is all that differs"


def test_offloaded_shards_stay_in_host_memory() -> None:
    """Of `model.optim_cpu_offload` on several GPUs: the mesh is of GPUs, and parameters and gradients are not."""
    start, gradient = torch.randn(24, 16), torch.randn(24, 16)
    shared = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9, "nesterov": True, "adjust_lr": "original"}
    plain = start.clone().requires_grad_()
    plain.grad = gradient
    MatrixMuon([plain], shared).step()
    with group_of_one() as mesh:
        spec = DTensor.from_local(start, mesh, [Shard(0)])._spec
        spec.mesh = DeviceMesh.from_group(dist.group.WORLD, "cuda")
        shard = DTensor(start.clone(), spec, requires_grad=True)
        shard.grad = DTensor(gradient, spec, requires_grad=False)
        MatrixMuon([shard], shared).step()
        assert torch.equal(shard.to_local(), plain)


def test_orthogonalize_is_batched_with_unit_singular_values() -> None:
    stack = torch.randn(3, 32, 48)
    values = torch.linalg.svdvals(orthogonalize(stack).float())
    assert 0.5 < values.min() and values.max() < 1.4
    for one, whole in zip(stack, orthogonalize(stack), strict=True):
        torch.testing.assert_close(orthogonalize(one), whole, atol=0.02, rtol=0.02)
        torch.testing.assert_close(orthogonalize(one.T).T, whole, atol=0.02, rtol=0.02)


def test_non_matrices_use_adamw() -> None:
    names = ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", "model.layers.0.self_attn.q_proj.bias"]
    shapes = [(12, 8), (12, 8), (8,), (8,)]
    assert not any(is_matrix(name, torch.zeros(shape)) for name, shape in zip(names, shapes, strict=True))
    assert is_matrix("model.layers.0.mlp.experts.down_proj", torch.zeros(4, 8, 8))
    start = [torch.randn(shape) for shape in shapes]
    ours, theirs = ([p.clone().requires_grad_() for p in start] for _ in range(2))
    matrix = torch.randn(8, 8, requires_grad=True)
    config = MuonConfig(lr=0.1)
    optimizer = build_optimizer(config, {**dict(zip(names, ours, strict=True)), "model.layers.0.mlp.up_proj": matrix})
    run_steps(optimizer, [*ours, matrix])
    grads = {"lr": 0.1, "betas": (0.9, 0.999), "weight_decay": 0.01, "fused": True}
    run_steps(torch.optim.AdamW(theirs, **grads), [*theirs, torch.zeros(8, 8)])
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("family", "embeddings"),
    [("GPTNeoX", {"gpt_neox.embed_in", "lm_head"}), ("GPT2", {"transformer.wte", "transformer.wpe"})],
)
def test_embeddings_of_any_name_use_adamw(family: str, embeddings: set[str], tmp_path: Path) -> None:
    import transformers

    shape = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = getattr(transformers, f"{family}Config")(**shape)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    for dtype in ("float32", "bfloat16"):
        values = {
            "model": {"name": str(tmp_path / "base"), "seq_len": 32, "dtype": dtype},
            "optim": {"type": "muon", "lr": 1e-2},
            "output_dir": tmp_path,
        }
        backend = build_backend(TrainConfig.model_validate(values))
        matrices, rest = backend.stepper.optimizer.param_groups
        names = {id(p): name.removesuffix(".weight") for name, p in backend.parameters.items()}
        assert embeddings == {names[id(p)] for p in rest["params"] if p.ndim > 1}
        assert len(matrices["params"]) == 4


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.mlp.experts.gate_up_proj_bias", (4, 16)),  # gpt-oss
        ("model.layers.0.self_attn.q_norm.weight", (4, 16)),  # Cohere
        ("backbone.layers.0.mixer.A_log", (16, 4)),  # Mamba
    ],
)
def test_vectors_stored_as_matrices_use_adamw(name: str, shape: tuple[int, int]) -> None:
    assert not is_matrix(name, torch.zeros(shape))


def test_an_update_is_as_large_as_adamws() -> None:
    """2502.16982: with match_rms_adamw the root mean square of an update with lr 1 is about 0.2 for any shape."""
    for shape in [(16, 64), (128, 32), (64, 64)]:
        p = torch.zeros(shape, requires_grad=True)
        run_steps(build_optimizer(MuonConfig(lr=1.0, weight_decay=0), {"w": p}), [p], num=1)
        assert 0.12 < p.detach().square().mean().sqrt() < 0.28


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    def run(name: str, **changes: object) -> None:
        config = {
            "model": {"name": "tiny-qwen3", "seq_len": 32, "debug": {"random_init": True}},
            "optim": {"type": "muon", "lr": 1e-2},
            "scheduler": {"type": "linear", "warmup_steps": 2, "decay_steps": 1},
            "data": {"fake": {"batch_size": 4}},
            "log": {"file": False},
            "max_steps": 4,
            "output_dir": tmp_path / name,
        }
        train(TrainConfig.model_validate({**config, **changes}))

    run("straight")
    run("broken", ckpt={"interval": 2}, max_steps=3)
    (tmp_path / "broken" / "checkpoints" / "step_3" / "trainer" / "STABLE").unlink()
    run("broken", ckpt={"resume_step": -1})
    first, second = (read_manifest(tmp_path / name / "weights" / "step_4") for name in ("straight", "broken"))
    assert first == second
    with pytest.raises(ValueError, match=r"optim\.type"):
        run("broken", ckpt={"resume_step": 2}, optim={"type": "sgd", "lr": 1e-2})
