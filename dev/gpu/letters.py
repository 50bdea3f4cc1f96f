"""Environment of the RL checks, in plain Python: reward for letters a to h, which a random model can learn."""

from __future__ import annotations

from typing import Any


def load_environment(num_examples: int = 64) -> dict[str, Any]:
    """One turn; reward: share of the completion's characters that are among a to h."""
    return {"dataset": [{"prompt": f"{number:b}"} for number in range(num_examples)], "rewards": early_letters}


def early_letters(completion: str) -> float:
    """Share of characters a to h."""
    return sum(letter in "abcdefgh" for letter in completion) / max(len(completion), 1)
