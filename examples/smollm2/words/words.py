"""Write four short words in the opposite order."""

from __future__ import annotations

import random
from typing import Any

WORDS = (
    "apple arm army baby back bag ball bank bath bed bell belt bird boat bone book box boy bread bus cake camp car "
    "card cat chair city clock cloud coat coin corn cow cup desk dish dog door dress drum duck ear egg eye face "
    "farm fire fish flag floor foot fork fox frog fruit game gate gift girl glass goat gold grass hand hat "
    "head hill home horse hotel ice ink iron island jar job judge juice key king knee knife lake lamp leaf "
    "leg lemon lion lip lock map meat milk moon mouse neck nest night nose ocean oil onion orange paint pan paper "
    "park pen pig pipe plate pond queen rain ring river rock roof room rose sail salt sand school sea seed "
    "ship shoe snow soap song soup spoon star stone sugar sun table tail tent tie toy train tree truck uncle van "
    "vase voice wall watch water wave wheel wind window wine wolf wood yard zoo"
).split()
NUM_WORDS = 4


def load_environment(num_train_examples: int = 2000, num_eval_examples: int = 256, seed: int = 0) -> dict[str, Any]:
    """Lists of four different words; no held-out set of words is a training set in another order."""
    lists = draw_lists(num_train_examples + num_eval_examples, seed)
    return {
        "dataset": [build_row(words) for words in lists[num_eval_examples:]],
        "eval_dataset": [build_row(words) for words in lists[:num_eval_examples]],
        "rewards": [(reversed_exactly, 1.0)],
    }


def build_sft_examples(num_examples: int, seed: int = 0) -> list[dict[str, str]]:
    """Training lists with their right answers, as rows for supervised fine-tuning."""
    rows = load_environment(num_train_examples=num_examples, seed=seed)["dataset"]
    return [{"prompt": row["prompt"], "completion": row["answer"]} for row in rows]


def draw_lists(num_lists: int, seed: int) -> list[list[str]]:
    """Lists of words in random order, no two with the same words; the first ones do not depend on the number."""
    draw = random.Random(seed)
    found: dict[frozenset[str], list[str]] = {}
    while len(found) < num_lists:
        words = draw.sample(WORDS, NUM_WORDS)
        found.setdefault(frozenset(words), words)
    return list(found.values())


def build_row(words: list[str]) -> dict[str, str]:
    """A question with its answer."""
    return {"prompt": f"Reverse the order of these words: {', '.join(words)}", "answer": ", ".join(reversed(words))}


def reversed_exactly(completion: str, answer: str) -> float:
    """1 if the completion is the reversed list and nothing else."""
    return float(completion.strip() == answer)
