"""Trains a tiny model with the library alone: python train.py config.py, modes `sft`, `rl` and `sft+rl`.

With several `gpu_ranks` it is started by torchrun --nproc-per-node=N and trains with FSDP.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import runpy
import shutil
import string
import sys
from pathlib import Path
from typing import Any

import anyio
import torch
import torch.distributed as dist
from config import Config
from engine import InProcessEngine

from prime_rl.runtime.tokenizer import load_tokenizer, resolve_model_dir
from rollouts.training.backends import (
    FSDPConfig,
    FSDPTrainingBackend,
    PyTorchTrainingBackend,
    create_adamw_optimizer,
    create_cross_entropy_loss,
    latest_checkpoint,
    load_hf_model,
)
from rollouts.training.datasets import DataBuffer
from rollouts.training.datasets.chat import TemplateRenderer
from rollouts.training.datasets.sft import Conversation, render_conversation
from rollouts.training.loops import run_rl_training, run_sft_training
from rollouts.training.metrics import JSONLLogger
from rollouts.training.rl_losses import ppo_loss
from rollouts.training.rollout_gen import AsyncRolloutManager
from rollouts.training.types import RolloutConfig, Sample

log = logging.getLogger("integration_training")


async def run_sft(config: Config, output_dir: Path) -> Path:
    """Fine-tune on demonstrations; returns the last checkpoint."""
    tokenizer = load_tokenizer(config.model)
    backend = build_backend(config, output_dir, create_cross_entropy_loss(), config.sft_learning_rate)
    samples = build_demonstrations(config, tokenizer)
    rows = await run_sft_training(backend, samples, config.sft, JSONLLogger(output_dir / "sft"))
    log.info("sft: loss %.3f -> %.3f in %d steps", rows[0]["loss"], rows[-1]["loss"], len(rows))
    return newest(output_dir)


async def run_rl(config: Config, output_dir: Path, checkpoint: Path | None = None) -> Path:
    """Reinforce right answers, from `checkpoint` or from scratch; returns the last checkpoint."""
    tokenizer = load_tokenizer(config.model)
    backend = build_backend(config, output_dir, ppo_loss, config.rl_learning_rate)
    if checkpoint is not None:
        await backend.load_checkpoint(checkpoint, parameters_only=True)
    engine = InProcessEngine(build_model(config), tokenizer, config.max_tokens, config.seed)
    n = config.samples_per_prompt

    def reward(prompt: str, response: str) -> float:
        return compute_reward(prompt, response, config.answer_length)

    buffer = DataBuffer(list(string.ascii_lowercase), seed=config.seed)
    manager = AsyncRolloutManager(
        buffer,
        RolloutConfig(batch_size=config.groups_per_batch, n_samples_per_prompt=n),
        generate_group=engine.build_generate_group(reward, n),
        seed=config.seed,
    )
    rows = await run_rl_training(backend, buffer, manager, [engine], config.rl, JSONLLogger(output_dir / "rl"))
    first, last = ([row["mean_reward"] for row in part] for part in (rows[:3], rows[-3:]))
    log.info("rl: reward %.3f -> %.3f in %d steps", sum(first) / len(first), sum(last) / len(last), len(rows))
    return newest(output_dir)


def build_model(config: Config) -> torch.nn.Module:
    """The model of the config; one that ships without weights starts from `seed`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    directory = resolve_model_dir(config.model)
    if any(directory.glob("*.safetensors")) or any(directory.glob("*.bin")):
        return load_hf_model(str(directory), torch.float32)
    torch.manual_seed(config.seed)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    return model


def build_backend(
    config: Config, output_dir: Path, loss_fn: Any, learning_rate: float
) -> PyTorchTrainingBackend | FSDPTrainingBackend:
    """One device for one of `gpu_ranks`, FSDP for more."""
    model, tokenizer = build_model(config), load_tokenizer(config.model)
    device, checkpoint_dir = own_device(config), output_dir / "checkpoints"
    if len(config.gpu_ranks) == 1:
        model = model.to(device)
        optimizer = create_adamw_optimizer(model, learning_rate)
        return PyTorchTrainingBackend(
            model, optimizer, loss_fn, checkpoint_dir, device, max_grad_norm=config.max_grad_norm, tokenizer=tokenizer
        )
    sharding = FSDPConfig(mixed_precision=False, clip_grad=config.max_grad_norm, auto_wrap_min_params=10_000)
    return FSDPTrainingBackend(
        model,
        lambda sharded: create_adamw_optimizer(sharded, learning_rate),
        loss_fn,
        checkpoint_dir,
        sharding,
        device=device,
        tokenizer=tokenizer,
    )


def build_demonstrations(config: Config, tokenizer: Any) -> list[Sample]:
    """A letter repeated, with a share of wrong letters."""
    draw, chat = random.Random(config.seed), TemplateRenderer(tokenizer)
    samples = []
    for index in range(config.num_demonstrations):
        letter = draw.choice(string.ascii_lowercase)
        answer = "".join(
            draw.choice(string.ascii_lowercase) if draw.random() < config.wrong_share else letter
            for _ in range(config.answer_length)
        )
        messages = [{"role": "user", "content": letter}, {"role": "assistant", "content": answer}]
        samples.append(render_conversation(Conversation(messages), chat, index))
    return samples


def compute_reward(prompt: str, response: str, length: int) -> float:
    """Share of right letters; missing and extra letters count as wrong."""
    right = sum(letter == prompt for letter in response[:length])
    return right / max(length, len(response))


def own_device(config: Config) -> torch.device:
    """The device of this process among `gpu_ranks`."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if config.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(config.device_type, config.gpu_ranks[local_rank])


def newest(output_dir: Path) -> Path:
    """The last complete checkpoint of the run."""
    checkpoint = latest_checkpoint(output_dir / "checkpoints")
    assert checkpoint is not None, "a loop always saves its last step"
    return checkpoint


def load_config(path: Path) -> Config:
    """`config` of a Python file."""
    if not path.is_file():
        raise ValueError(f"{path} is not a file: pass a Python file that defines `config`")
    config = runpy.run_path(str(path)).get("config")
    # By name: the class of a file that is run is another object each time.
    if type(config).__name__ != "Config":
        raise ValueError(f"{path} does not define `config = Config(...)`")
    return config


def init_process_group(config: Config) -> int:
    """Enter the process group when there are several `gpu_ranks`; returns this process's rank."""
    size, started = len(config.gpu_ranks), int(os.environ.get("WORLD_SIZE", "1"))
    if size != started:
        raise ValueError(
            f"gpu_ranks names {size} device(s) but {started} process(es) were started: "
            f"name {started} in gpu_ranks, or run torchrun --nproc-per-node={size} {' '.join(sys.argv)}"
        )
    if size == 1:
        return 0
    dist.init_process_group("gloo" if config.device_type == "cpu" else "nccl")
    return dist.get_rank()


async def train(config: Config, output_dir: Path) -> None:
    """The stages of `mode`, each from the last checkpoint of the one before."""
    checkpoint = await run_sft(config, output_dir) if "sft" in config.mode else None
    if "rl" in config.mode:
        checkpoint = await run_rl(config, output_dir, checkpoint)
    log.info("last checkpoint: %s", checkpoint)


def main() -> int:
    """Read the config and run; a fresh run replaces the one before in `output_dir`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path, help="Python file that defines `config = Config(...)`")
    parser.add_argument("--output-dir", type=Path, help="instead of the config's")
    parser.add_argument("--mode", choices=("sft", "rl", "sft+rl"), help="instead of the config's")
    args = parser.parse_args()
    try:
        config = load_config(args.config)
        rank = init_process_group(config)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(asctime)s %(message)s")
    torch.set_num_threads(1 if config.device_type == "cpu" else torch.get_num_threads())
    output_dir = args.output_dir or Path(config.output_dir)
    if rank == 0:
        for part in ("checkpoints", "sft", "rl"):
            shutil.rmtree(output_dir / part, ignore_errors=True)
    if dist.is_initialized():
        dist.barrier()
    if args.mode is not None:
        config = type(config)(**{**vars(config), "mode": args.mode})
    try:
        anyio.run(train, config, output_dir)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
