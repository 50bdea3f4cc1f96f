"""The other trainers on the device: the library's backend with its checkpoints, and nanochat's."""

from __future__ import annotations

from functools import partial

import anyio
import torch
from dev.gpu.context import Context, Measured, measure_error, small_shape, write_model
from dev.gpu.training import build_samples

from nanochat.gpt import GPT, GPTConfig
from nanochat.learner import NanochatTrainer
from nanochat.optim import build_optimizer
from rollouts.training.backends.pytorch import PyTorchTrainingBackend
from rollouts.training.backends.pytorch_factory import create_pytorch_backend
from rollouts.training.backends.ranks import Ranks
from rollouts.training.batching import pad_samples
from rollouts.training.rl_losses import nll_loss

LENGTHS = [40, 7, 33, 12]


def compare_backend(context: Context) -> Measured:
    """Losses of `create_pytorch_backend` in fp32 against the CPU, continued from a checkpoint after two steps.

    Not in bf16: without fp32 masters its small updates are lost.
    """
    directory = write_model(context.folder("model"), small_shape(context.tiny))
    batch = pad_samples(build_samples(LENGTHS, 500))

    def build(folder: str, device: str) -> PyTorchTrainingBackend:
        return create_pytorch_backend(str(directory), context.folder(folder), device, "float32")

    def train(backend: PyTorchTrainingBackend, num_steps: int) -> list[float]:
        losses = []
        for _ in range(num_steps):
            backend.forward_backward(batch)
            losses.append(backend.optim_step().wait()["loss"])
        return losses

    first, second = (build(folder, context.device.type) for folder in ("saved", "restored"))
    losses = train(first, 2)
    anyio.run(second.load_checkpoint, anyio.run(partial(first.save_checkpoint, 2, {})))
    losses += train(second, 2)
    expected = train(build("cpu", "cpu"), 4)
    return Measured(max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True)))


def compare_nanochat(context: Context) -> Measured:
    """Weights of a nanochat model after three steps of Muon and AdamW against the CPU, as a share of their change."""
    width, layers = (64, 2) if context.tiny else (512, 4)
    config = GPTConfig(256, 500, layers, 4, 2, width)
    samples = build_samples(LENGTHS, 500)
    models: list[list[torch.Tensor]] = []
    for device, dtype in ((context.device, context.dtype), (torch.device("cpu"), torch.float32)):
        model = GPT(config)
        model.init_weights(0)
        start = torch.cat([p.detach().flatten() for p in model.parameters()])
        model = model.to(device)
        optimizer = build_optimizer(model)
        trainer = NanochatTrainer(
            model, optimizer, nll_loss, ranks=Ranks(device=device), micro_batch_size=2, dtype=dtype
        )
        for _ in range(3):
            trainer.learn(samples)
        models.append([torch.cat([p.detach().cpu().flatten() for p in model.parameters()]) - start])
    return Measured(measure_error(*models))
