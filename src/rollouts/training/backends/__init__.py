"""Training backends: forward and backward passes, optimizer steps and checkpoints."""

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
# Name -> module below `rollouts.training`, imported lazily.
_MODULES = {
    "TrainingBackend": "types",
    "PyTorchTrainingBackend": "backends.pytorch",
    "FSDPTrainingBackend": "backends.fsdp",
    "FSDPConfig": "backends.fsdp",
    "latest_checkpoint": "backends.checkpoint",
    "as_loss_fn": "backends.loss_fn",
    **dict.fromkeys(_FACTORY, "backends.pytorch_factory"),
}

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers: {', '.join(sorted(_MODULES))}")
    return getattr(import_module(f"rollouts.training.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
