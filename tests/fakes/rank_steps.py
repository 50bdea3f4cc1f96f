"""One rank of `test_two_ranks`: trains three steps in several ways and, as rank 0, writes parameters and statistics."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from forked_ranks import run_ranks
from safetensors.torch import save_file

from prime_rl.runtime.tokenizer import ASSETS_DIR
from prime_rl.trainer.backend import Backend, build_backend
from prime_rl.trainer.ckpt import load_checkpoint, save_checkpoint
from prime_rl.trainer.config import SFTConfig, TrainConfig
from prime_rl.trainer.parallel_dims import destroy_process_group
from prime_rl.trainer.rl.data import build_batches
from prime_rl.trainer.rl.loss import build_loss
from prime_rl.trainer.rl.updates import run_updates
from prime_rl.trainer.sft.data import Position, build_sft_batches
from rollouts.training.batching import Share, pack_share
from rollouts.training.rl_losses import nll_loss
from rollouts.training.types import Sample

MODEL = {"name": "tiny-qwen3", "debug": {"random_init": True}, "dtype": "float64", "seq_len": 48}
SPARING = {"ac": {"freq": 2}, "ac_offloading": {}, "optim_cpu_offload": True, "reshard_after_forward": False}
NUM_STEPS = 3


def rl_config(**changes: Any) -> TrainConfig:
    """A small policy on fake samples; clipping and decay take part."""
    values = {
        "model": MODEL,
        "optim": {"lr": 1e-2, "weight_decay": 0.1, "max_norm": 0.01},
        "data": {"fake": {"batch_size": 7}},
    }
    return TrainConfig.model_validate({**values, **changes})


def narrow_config() -> TrainConfig:
    """In bfloat16, and by an optimizer whose steps are as small as the differences of gradients."""
    optim = {"type": "sgd", "lr": 0.1, "max_norm": None}
    return rl_config(model={**MODEL, "dtype": "bfloat16"}, optim=optim)


def narrow_lora_config() -> TrainConfig:
    """Frozen matrices in bfloat16."""
    optim = {"type": "sgd", "lr": 1.0, "max_norm": None}
    return rl_config(model={**MODEL, "dtype": "bfloat16", "lora": {"rank": 4}}, optim=optim)


def sequences_config() -> TrainConfig:
    """A loss that is a mean over sequences, with a term on the entropy, and plain gradient steps."""
    return rl_config(optim={"type": "sgd", "lr": 1e-2}, loss={"type": "grpo", "entropy_coef": 0.1})


def muon_config() -> TrainConfig:
    """By an optimizer that needs whole matrices."""
    return rl_config(optim={"type": "muon", "lr": 1e-2})


def lora_config() -> TrainConfig:
    """An adapter and a head of its own, before frozen matrices."""
    return rl_config(model={**MODEL, "lora": {"rank": 4, "modules_to_save": ["lm_head"]}})


def critic_config(**changes: Any) -> TrainConfig:
    """A critic with a backbone and a rate of its own, trained alone in the first step."""
    return rl_config(critic={"lr": 3e-2, "warmup_steps": 1}, loss={"type": "ppo"}, **changes)


def critic_lora_config() -> TrainConfig:
    """A critic on the hidden states of an adapter, and old log-probs recomputed in the same pass."""
    loss = {"type": "ppo", "old_logprobs": "recomputed"}
    return rl_config(model={**MODEL, "lora": {"rank": 4}}, critic={"backbone": "shared"}, loss=loss, num_epochs=2)


def moe_config(root: Path) -> TrainConfig:
    """A mixture of experts, whose stacked matrices do not divide by two."""
    shape = json.loads((ASSETS_DIR / "tiny-qwen3" / "config.json").read_text(encoding="utf-8"))
    experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [0]}
    directory = root / "moe_model"
    directory.mkdir(exist_ok=True)
    text = json.dumps({**shape, **experts, "model_type": "qwen3_moe"})
    if not (directory / "config.json").exists():
        (directory / "config.json").write_text(text)
    return rl_config(model={**MODEL, "name": str(directory)})


def sft_config(**changes: Any) -> SFTConfig:
    """A small model on random rows."""
    model = {key: value for key, value in MODEL.items() if key != "seq_len"}
    data = {"type": "fake", "batch_size": 3, "seq_len": 48, "length": "variable"}
    return SFTConfig.model_validate({"model": model, "optim": {"lr": 1e-2}, "data": data, **changes})


def pack(backend: Backend, samples: list[Sample], rows: int) -> Share:
    """This rank's part."""
    return pack_share(samples, 48, backend.ranks.size, backend.ranks.rank, rows=rows)


def run_rl(backend: Backend, config: TrainConfig, rows: int = 1) -> Iterator[dict[str, float]]:
    """Statistics and gradient norm of each step; in the second only one sample has loss, in the fourth none."""
    loss, batches = build_loss(config.loss, 48), build_batches(config, backend.model.config.vocab_size)
    for step in range(1, NUM_STEPS + 2):
        samples = batches.receive(step)
        if step == 2:
            for sample in samples[1:]:
                sample.loss_mask = [0.0] * len(sample.tokens)
        if step == 4:
            samples[0].loss_mask = [0.0] * len(samples[0].tokens)
            samples = samples[:1]
        stats = backend.forward_backward(pack(backend, samples, rows).micros, loss)
        report = backend.optim_step(stats)
        yield {**stats.summary(), "grad_norm": report.grad_norm, "skipped": float(report.skipped is not None)}


def run_critic(backend: Backend, config: TrainConfig) -> Iterator[dict[str, float]]:
    """The same for several updates per batch, with a critic; in the second step one sample has loss."""
    loss, batches = build_loss(config.loss, 48), build_batches(config, backend.model.config.vocab_size)
    for step in range(1, NUM_STEPS + 1):
        samples = batches.receive(step)
        for sample in samples[1:] if step == 2 else ():
            sample.loss_mask = [0.0] * len(sample.tokens)
        micros = pack(backend, samples, 1).micros
        report, stats = run_updates(backend, [micros], loss, 2, critic=config.critic, step=step)
        yield {**stats.summary(), "grad_norm": report.grad_norm}


def run_sft(backend: Backend, config: SFTConfig) -> Iterator[dict[str, float]]:
    """The same for fine-tuning, with an evaluation before each step."""
    batches, position = build_sft_batches(config, backend.model.config.vocab_size, None), Position()
    for _ in range(NUM_STEPS):
        samples, position = batches.take(position)
        micros = pack(backend, samples, 2).micros
        before = backend.evaluate(micros, nll_loss).summary()
        stats = backend.forward_backward(micros, nll_loss)
        report = backend.optim_step(stats)
        yield {**stats.summary(), "grad_norm": report.grad_norm, "evaluated": before["loss/mean"]}


def run_all(root: Path) -> None:
    """Every way, each with a backend of its own."""
    ways = {
        "rl": (rl_config(), run_rl),
        "sequences": (sequences_config(), run_rl),
        "replicated": (rl_config(parallel={"dp_replicate": 2}), run_rl),
        "narrow": (narrow_config(), run_rl),
        "narrow_lora": (narrow_lora_config(), run_rl),
        "sparing": (rl_config(model={**MODEL, **SPARING}), run_rl),
        "muon": (muon_config(), run_rl),
        "lora": (lora_config(), run_rl),
        "critic": (critic_config(), run_critic),
        "critic_lora": (critic_lora_config(), run_critic),
        "moe": (moe_config(root), run_rl),
        "sft": (sft_config(), run_sft),
    }
    for name, (config, run) in ways.items():
        backend = build_backend(config)
        rows = list(run(backend, config))
        tensors = backend.export_state_dict()
        if backend.ranks.rank == 0:
            save_file(tensors, root / f"{name}.safetensors")
            (root / f"{name}.json").write_text(json.dumps(rows))


def reshard(root: Path) -> None:
    """Load what one rank has saved, save it at once as step 2 and after another step as step 3."""
    config = rl_config()
    backend = build_backend(config)
    progress = load_checkpoint(root, 1, backend.parameters, backend.stepper, backend.ranks)
    save_checkpoint(root, 2, backend.parameters, backend.stepper, progress, backend.ranks)
    train_another(backend, config)
    save_checkpoint(root, 3, backend.parameters, backend.stepper, progress, backend.ranks)


def train_another(backend: Backend, config: TrainConfig) -> None:
    """The step after those of `run_rl`."""
    samples = build_batches(config, backend.model.config.vocab_size).receive(9)
    backend.optim_step(backend.forward_backward(pack(backend, samples, 1).micros, build_loss(config.loss, 48)))


def run_rank(rank: int) -> None:
    """All that this rank does."""
    torch.set_num_threads(1)
    run_all(Path(sys.argv[1]))
    reshard(Path(sys.argv[1]))
    destroy_process_group()


if __name__ == "__main__":
    raise SystemExit(run_ranks(2, run_rank))
