"""From prompts to batches of scored groups."""

from __future__ import annotations

from rollouts.training.rollout_gen.async_rollout_manager import AsyncRolloutManager

__all__ = ["AsyncRolloutManager"]
