"""Training steps on the device against the same steps in fp64 on the CPU."""

from __future__ import annotations

import copy
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from dev.gpu.context import Context, Measured, measure_error, small_shape, write_model
from torch import Tensor

from prime_rl.trainer.backend import Backend, build_backend
from prime_rl.trainer.config import SFTConfig, TrainConfig
from prime_rl.trainer.rl.loss import build_loss
from rollouts.training.batching import pack_samples
from rollouts.training.rl_losses import nll_loss
from rollouts.training.types import Sample

NUM_STEPS = 3


def build_samples(lengths: list[int], vocab: int, seed: int = 0) -> list[Sample]:
    """Random samples; the first quarter of each is its prompt. Log-probs are about those of a random model."""
    draw, samples = random.Random(seed), []
    for length in lengths:
        num_prompt = max(length // 4, 1)
        mask = [0.0] * num_prompt + [1.0] * (length - num_prompt)
        samples.append(
            Sample(
                prompt="",
                tokens=[draw.randrange(vocab) for _ in range(length)],
                loss_mask=mask,
                inference_logprobs=[(-math.log(vocab) + draw.uniform(-0.1, 0.1)) * m for m in mask],
                advantages=[draw.choice((-1.0, 1.0)) * m for m in mask],
            )
        )
    return samples


def build(config: dict[str, Any], kind: str) -> tuple[Backend, Any]:
    """Backend and loss of the SFT or the RL trainer."""
    if kind == "sft":
        return build_backend(SFTConfig.model_validate(config)), nll_loss
    settings = TrainConfig.model_validate(config)
    return build_backend(settings), build_loss(settings.loss, settings.model.seq_len)


@dataclass
class Steps:
    """Gradient of the first step as one vector, and the loss of every step."""

    gradients: list[Tensor]
    losses: list[float]
    attn: str


def run_steps(config: dict[str, Any], kind: str, lengths: list[int]) -> Steps:
    """A few optimizer steps on one batch, in two micro-batches."""
    backend, loss = build(config, kind)
    # The RL loss is a sum of terms of both signs: steps that bf16 weights cannot represent change it at random.
    num_steps = NUM_STEPS if kind == "sft" else 1
    samples = build_samples(lengths, backend.model.config.vocab_size)
    [micros] = pack_samples(samples, max(lengths), rows=2)
    gradients: list[Tensor] = []
    losses = []
    for _ in range(num_steps):
        stats = backend.forward_backward(micros, loss)
        if not gradients:
            parts = [p.grad.double().flatten() for p in backend.parameters.values() if p.grad is not None]
            gradients = [torch.cat(parts).cpu()]
        backend.optim_step(stats)
        losses.append(stats.summary()["loss/mean"])
    return Steps(gradients, losses, backend.placement.attn)


def settings(context: Context, directory: Path, **options: Any) -> dict[str, Any]:
    """A trainer configuration for the small model."""
    model = {"name": str(directory), "device": str(context.device), **options.pop("model", {})}
    optim = {"lr": 1e-4, "weight_decay": 0.0, **options.pop("optim", {})}
    return {"model": model, "optim": optim, "output_dir": context.scratch / "trainer", **options}


def compare_with_cpu(
    context: Context, kind: str = "sft", dtype: str = "bfloat16", model: dict[str, Any] | None = None, **options: Any
) -> Measured:
    """Error of the first gradient, and of the losses of a few optimizer steps, relative to losses of at least 1.

    A CPU computes in fp32: its bfloat16 is rounded elsewhere.
    """
    directory = write_model(context.folder("model"), small_shape(context.tiny))
    lengths = [40, 7, 33, 12] if context.tiny else [700, 3, 512, 129, 64, 300]
    changes = copy.deepcopy(model or {})
    if context.tiny and "compile" in changes:
        changes["compile"]["backend"] = "aot_eager"
    if context.device.type == "cpu":
        dtype = "float32"
        changes.setdefault("attn", "sdpa")
    found = run_steps(settings(context, directory, model={"dtype": dtype, **changes}, **options), kind, lengths)
    reference = {"device": "cpu", "dtype": "float64", "attn": "sdpa"}
    reference |= {key: value for key, value in changes.items() if key == "lora"}
    expected = run_steps(settings(context, directory, model=reference, **options), kind, lengths)
    gradient = measure_error(found.gradients, expected.gradients)
    scale = max(1.0, *map(abs, expected.losses))
    loss = max(abs(a - b) / scale for a, b in zip(found.losses, expected.losses, strict=True))
    note = f"gradient {gradient:.2g}, losses {loss:.2g}, attn {found.attn}"
    return Measured(max(gradient, loss), note, {"gradient": gradient, "losses": loss})


def compare_packing(context: Context) -> Measured:
    """Gradient of a pack with variable-length attention against padded SDPA rows, in the same data type."""
    directory = write_model(context.folder("model"), small_shape(context.tiny))
    lengths = [30, 5, 17, 6] if context.tiny else [700, 3, 512, 129, 64, 300]
    mode = "flash" if context.device.type == "cuda" else "exact"
    dtype = str(context.dtype).removeprefix("torch.")
    found, expected = (
        run_steps(settings(context, directory, model={"attn": attn, "dtype": dtype}), "sft", lengths)
        for attn in (mode, "sdpa")
    )
    return Measured(measure_error(found.gradients, expected.gradients), f"{mode} against sdpa")
