"""Test environments with rewards for an untrained model, by a share of letters of the completion."""

from __future__ import annotations

from typing import Any


def load_environment(num_examples: int = 64) -> Any:
    """One turn; reward: share of the completion's characters that are among a to h."""
    import verifiers as vf  # takes longer than all else that a short run does
    from datasets import Dataset

    prompts = [[{"role": "user", "content": f"{number:b}"}] for number in range(num_examples)]
    rows = Dataset.from_dict({"prompt": prompts, "answer": [""] * num_examples, "task": ["letters"] * num_examples})
    return vf.SingleTurnEnv(dataset=rows, eval_dataset=rows, rubric=vf.Rubric(funcs=[early_letters]), env_id="letters")


def early_letters(completion: list[dict[str, Any]]) -> float:
    """Share of characters a to h."""
    return share_early(completion[-1]["content"])


def load_plain(num_examples: int = 64) -> dict[str, Any]:
    """The same in plain Python."""
    rows = [{"prompt": f"{number:b}"} for number in range(num_examples)]
    return {"dataset": rows, "rewards": share_early}


def share_early(completion: str) -> float:
    """Share of characters a to h."""
    return sum(letter in "abcdefgh" for letter in completion) / max(len(completion), 1)


def load_loud(num_examples: int = 32) -> dict[str, Any]:
    """The opposite, and a hundred times as loud: each letter i to z earns 100 / length."""
    rows = [{"prompt": f"loud {number:b}"} for number in range(num_examples)]
    return {"dataset": rows, "rewards": late_letters}


def late_letters(completion: str) -> float:
    """100 times the share of characters i to z."""
    return 100.0 * sum("i" <= letter <= "z" for letter in completion) / max(len(completion), 1)
