"""Public API of the training library; names are imported lazily."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Name -> module.
_MODULES = {
    "Sample": "types",
    "Status": "types",
    "RolloutBatch": "types",
    "RolloutConfig": "types",
    "MetricsLogger": "metrics",
    "JSONLLogger": "metrics",
    "TrainFuture": "types",
    "TrainingBackend": "types",
    "SFTTrainingConfig": "types",
    "RLTrainingConfig": "types",
    "PyTorchTrainingBackend": "backends.pytorch",
    "ModelEngine": "backends.model_engine",
    "run_sft_training": "loops.sft_loop",
    "run_rl_training": "loops.rl_loop",
    "DataBuffer": "datasets.data_buffer",
    "AsyncRolloutManager": "rollout_gen.async_rollout_manager",
    "load_sft_dataset": "datasets.sft",
    "generate_rollout_batches": "rollout_gen.rollout_generation",
    "agent_rollout_to_sample": "agent_integration",
    "generate_rollout_batch": "agent_integration",
    "trajectory_to_sample": "agent_integration",
    "check_reward_nonzero_std": "filters",
    "check_min_reward": "filters",
    "check_response_diversity": "filters",
    "check_reasonable_length": "filters",
    "check_any_success": "filters",
    "check_quality_and_diversity": "filters",
    "make_threshold_filter": "filters",
    "make_length_filter": "filters",
}

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers: {', '.join(sorted(_MODULES))}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
