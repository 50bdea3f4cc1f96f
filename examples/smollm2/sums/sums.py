"""Add two numbers of two digits: a question in plain English, rewarded if the last number of the answer is the sum."""

from __future__ import annotations

import random
import re
from typing import Any


def load_environment(num_eval_examples: int = 256, seed: int = 0) -> dict[str, Any]:
    """All questions "What is a + b?" with 10 <= a, b <= 99; no held-out pair is a training pair in either order."""
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    random.Random(seed).shuffle(pairs)
    held_out, rest = pairs[:num_eval_examples], pairs[num_eval_examples:]
    train = rest + [(b, a) for a, b in rest if a != b]
    random.Random(seed).shuffle(train)
    return {
        "dataset": [build_row(a, b) for a, b in train],
        "eval_dataset": [build_row(a, b) for a, b in held_out],
        "rewards": [correct_sum],
    }


def build_row(a: int, b: int) -> dict[str, str]:
    """A question with its answer."""
    return {"prompt": f"What is {a} + {b}?", "answer": str(a + b)}


def correct_sum(completion: str, answer: str) -> float:
    """1 if the last number of the completion is the answer."""
    return float(re.findall(r"\d+", completion)[-1:] == [answer])
