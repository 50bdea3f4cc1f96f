"""Test environment for distillation; reward: share of letters a to d in the completion."""

from __future__ import annotations

from typing import Any


def load_world(num_train: int = 32, num_eval: int = 8) -> dict[str, Any]:
    """Questions of one turn; evaluation questions are others than those of training."""
    train = [{"prompt": f"Say {number:b}"} for number in range(num_train)]
    held_out = [{"prompt": f"Tell {number:b}"} for number in range(num_eval)]
    return {"dataset": train, "eval_dataset": held_out, "rewards": few_letters}


def few_letters(completion: str) -> float:
    """Share of characters a to d."""
    return sum(letter in "abcd" for letter in completion) / max(len(completion), 1)
