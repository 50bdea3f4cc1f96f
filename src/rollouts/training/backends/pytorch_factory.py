"""Builds a PyTorch backend from a model name."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from rollouts.training.backends.pytorch import PyTorchTrainingBackend
from rollouts.training.rl_losses import aggregate_tokens, compute_label_logprobs, mean_over

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
DEVICE_TYPES = ("cuda", "cpu", "mps")
LEAST_HALF_LR = 5e-5
"""Below it, most updates of weights in half precision are rounded away: numbers of about 0.02, usual for weights, are
1.2e-4 apart in bfloat16, and an update of Adam is about as large as the learning rate."""
WARMUP_START = 0.1
"""Initial learning rate as a fraction of the peak."""


def create_pytorch_backend(
    model_name: str,
    checkpoint_dir: Path,
    device_type: str = "cuda",
    dtype: str = "bfloat16",
    gpu_rank: int = 0,
    learning_rate: float = 1e-4,
    adam_betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.0,
    loss_fn: Callable[..., Any] | None = None,
    *,
    max_grad_norm: float | None = None,
) -> PyTorchTrainingBackend:
    """Model and tokenizer of `model_name` with AdamW on one device; `loss_fn` defaults to masked cross-entropy.

    Weights and their updates have `dtype`: a warning names a learning rate whose updates bfloat16 rounds away.
    """
    if dtype == "bfloat16" and learning_rate < LEAST_HALF_LR:
        logging.getLogger(__name__).warning(
            "learning_rate %g with weights in bfloat16: most updates are smaller than the distance of two such numbers "
            'and are lost; set dtype="float32"',
            learning_rate,
        )
    model = load_hf_model(model_name, parse_dtype(dtype), compute_device_map_single_gpu(device_type, gpu_rank))
    return PyTorchTrainingBackend(
        model=model,
        optimizer=create_adamw_optimizer(model, learning_rate, adam_betas, weight_decay=weight_decay),
        loss_fn=loss_fn or create_cross_entropy_loss(),
        checkpoint_dir=Path(checkpoint_dir),
        device=torch.device(device_type, gpu_rank) if device_type == "cuda" else torch.device(device_type),
        max_grad_norm=max_grad_norm,
        tokenizer=load_hf_tokenizer(model_name),
    )


def create_backend_with_scheduler(
    model_name: str,
    checkpoint_dir: Path,
    num_training_steps: int,
    warmup_ratio: float = 0.03,
    **backend_options: Any,
) -> tuple[PyTorchTrainingBackend, LRScheduler]:
    """`create_pytorch_backend` with warmup and cosine decay, stepped by `optim_step` and saved in checkpoints."""
    if not 0 <= warmup_ratio < 1:
        raise ValueError(f"warmup_ratio {warmup_ratio} must be at least 0 and below 1")
    backend = create_pytorch_backend(model_name, checkpoint_dir, **backend_options)
    scheduler = create_warmup_cosine_scheduler(
        backend.optimizer, int(warmup_ratio * num_training_steps), num_training_steps
    )
    backend.scheduler = scheduler
    return backend, scheduler


def parse_dtype(dtype_str: str) -> torch.dtype:
    """bfloat16 or float32. In float16 the epsilon of AdamW is 0, and weights become NaN."""
    if dtype_str not in DTYPES:
        raise ValueError(f"dtype {dtype_str!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[dtype_str]


def compute_device_map_single_gpu(device_type: str, gpu_rank: int) -> dict[str, int] | None:
    """`{"": gpu_rank}`, which places the model on one GPU; None for other devices. `ValueError` without that GPU."""
    if device_type not in DEVICE_TYPES:
        raise ValueError(f"device_type {device_type!r} is not one of {', '.join(DEVICE_TYPES)}")
    if gpu_rank < 0:
        raise ValueError(f"gpu_rank {gpu_rank} must be at least 0")
    if device_type != "cuda":
        return None
    if gpu_rank >= torch.cuda.device_count():
        raise ValueError(
            f"gpu_rank {gpu_rank} does not exist: torch has {torch.cuda.device_count()} CUDA device(s), "
            'pass device_type="cpu", or one of those'
        )
    return {"": gpu_rank}


def load_hf_model(
    model_name: str, torch_dtype: torch.dtype, device_map: dict[str, int] | None = None
) -> torch.nn.Module:
    """A causal language model of the hub, or of a directory such as a checkpoint."""
    from transformers import AutoModelForCausalLM

    try:
        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch_dtype)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"model {model_name!r} cannot be loaded: {reason}") from error
    return model if device_map is None else model.to(torch.device("cuda", device_map[""]))


def load_hf_tokenizer(model_name: str) -> Any:
    """The tokenizer of a model, or None."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_name)
    except (OSError, ValueError, KeyError):
        return None


def create_adamw_optimizer(
    model: torch.nn.Module,
    lr: float,
    betas: Sequence[float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> torch.optim.Optimizer:
    """AdamW over the parameters that require gradients."""
    if not 0 < lr < 1:
        raise ValueError(f"lr {lr} must lie between 0 and 1")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas {betas} must be two numbers of at least 0 and below 1")
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ValueError("no parameter of the model requires a gradient")
    return torch.optim.AdamW(trained, lr=lr, betas=(betas[0], betas[1]), eps=eps, weight_decay=weight_decay)


def create_cross_entropy_loss() -> Callable[[Tensor, dict[str, Any]], Tensor]:
    """`loss(logits, batch)`: mean of -logp(label) over the tokens of `loss_mask` (default: all tokens).

    Labels must be shifted.
    """

    @mean_over("token")
    def cross_entropy_loss(logits: Tensor, batch: dict[str, Any]) -> Tensor:
        nll = -compute_label_logprobs(logits, batch["labels"])
        mask = batch.get("loss_mask")
        return aggregate_tokens(nll, torch.ones_like(nll) if mask is None else mask, "token")

    return cross_entropy_loss


def create_warmup_cosine_scheduler(
    optimizer: torch.optim.Optimizer, num_warmup_steps: int, num_training_steps: int, min_lr_ratio: float = 0.1
) -> LRScheduler:
    """Linear warmup from a tenth of the peak, then cosine decay to `min_lr_ratio` of the peak."""
    if not 0 <= num_warmup_steps < num_training_steps:
        raise ValueError(
            f"num_warmup_steps {num_warmup_steps} must be at least 0 and below num_training_steps {num_training_steps}"
        )
    if not 0 <= min_lr_ratio <= 1:
        raise ValueError(f"min_lr_ratio {min_lr_ratio} must lie between 0 and 1")
    return LambdaLR(
        optimizer,
        functools.partial(_warmup_cosine, warmup=num_warmup_steps, total=num_training_steps, min_lr_ratio=min_lr_ratio),
    )


def _warmup_cosine(step: int, *, warmup: int, total: int, min_lr_ratio: float) -> float:
    """Factor on the peak learning rate after `step` steps."""
    if step < warmup:
        return WARMUP_START + (1 - WARMUP_START) * step / warmup
    progress = min(1.0, (step - warmup) / (total - warmup))
    return min_lr_ratio + (1 - min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
