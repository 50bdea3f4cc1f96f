"""Rollout generation: prompts to batches of scored groups."""

from __future__ import annotations

from rollouts.training.rollout_gen.async_rollout_manager import AsyncRolloutManager
from rollouts.training.rollout_gen.rollout_generation import (
    RolloutManager,
    convert_to_batch,
    generate_rollout_batches,
)

__all__ = ["AsyncRolloutManager", "RolloutManager", "convert_to_batch", "generate_rollout_batches"]
