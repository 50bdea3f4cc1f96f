"""Machines that hold parameters: gradients in, optimizer steps and checkpoints out."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_FACTORY = (
    "create_pytorch_backend",
    "create_backend_with_scheduler",
    "parse_dtype",
    "compute_device_map_single_gpu",
    "load_hf_model",
    "load_hf_tokenizer",
    "create_adamw_optimizer",
    "create_cross_entropy_loss",
    "create_warmup_cosine_scheduler",
)
# name -> module below `rollouts.training`, imported when the name is first asked for
_HOME = {
    "TrainingBackend": "types",
    "PyTorchTrainingBackend": "backends.pytorch",
    "FSDPTrainingBackend": "backends.fsdp",
    "FSDPConfig": "backends.fsdp",
    "latest_checkpoint": "backends.checkpoint",
    "as_loss_fn": "backends.loss_fn",
    **dict.fromkeys(_FACTORY, "backends.pytorch_factory"),
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers: {', '.join(sorted(_HOME))}")
    return getattr(import_module(f"rollouts.training.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
