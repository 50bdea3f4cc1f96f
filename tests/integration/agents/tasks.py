"""Tasks for agents: the reward is the share of letters a to h, which an untrained model can learn."""

from __future__ import annotations

from typing import Any


def load_environment(num_examples: int = 64) -> dict[str, Any]:
    """Prompts without answers."""
    return {"dataset": [{"prompt": f"{number:b}"} for number in range(num_examples)], "rewards": early_letters}


def early_letters(state: dict[str, Any]) -> float:
    """Share of characters a to h in the answers to all requests."""
    text = "".join(messages[-1]["content"] for messages in state["conversations"])
    return sum(letter in "abcdefgh" for letter in text) / max(len(text), 1)
