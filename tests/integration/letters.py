"""An environment for tests in which an untrained model already earns something: use the letters a to h."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset


def load_environment(num_examples: int = 64) -> vf.Environment:
    """One turn; reward: share of the completion's characters that are among a to h."""
    prompts = [[{"role": "user", "content": f"{number:b}"}] for number in range(num_examples)]
    rows = Dataset.from_dict({"prompt": prompts, "answer": [""] * num_examples, "task": ["letters"] * num_examples})
    return vf.SingleTurnEnv(dataset=rows, eval_dataset=rows, rubric=vf.Rubric(funcs=[early_letters]), env_id="letters")


def early_letters(completion: list[dict[str, Any]]) -> float:
    """Share of characters a to h."""
    text = completion[-1]["content"]
    return sum(letter in "abcdefgh" for letter in text) / max(len(text), 1)
