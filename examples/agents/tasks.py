"""Look up the worth or the mass of a name: the right one of two tools must be called with the right name.

python examples/agents/tasks.py        # outputs/agents/sft.jsonl: warm-up that often calls the wrong tool
"""

from __future__ import annotations

import json
import random
from itertools import product
from pathlib import Path
from typing import Any

QUANTITIES = ("worth", "mass")
NAMES = ["".join(pair) for pair in product("abcdefgh", repeat=2)]
NUM_EVAL_NAMES = 16
CARELESSNESS = 0.7  # share of the warm-up's calls with either tool
PATH = Path("outputs/agents/sft.jsonl")
PARAMETERS = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
TOOLS = [
    {"type": "function", "function": {"name": quantity, "description": "", "parameters": PARAMETERS}}
    for quantity in QUANTITIES
]


def load_environment(num_examples: int = 320, seed: int = 0) -> dict[str, Any]:
    """Questions; names of the evaluation are not in training. Each question draws its own numbers."""
    draw = random.Random(seed)
    names = random.Random(0).sample(NAMES, len(NAMES))
    rows = [_build_row(draw.choice(names[NUM_EVAL_NAMES:]), draw) for _ in range(num_examples)]
    held_out = [_build_row(name, draw) for name in names[:NUM_EVAL_NAMES] for _ in range(8)]
    return {"dataset": rows, "eval_dataset": held_out, "rewards": is_right}


def is_right(state: dict[str, Any], row: dict[str, Any]) -> float:
    """1 if the first answer calls the right tool with the right name."""
    quantity, _, name = row["question"]
    for call in state["conversations"][0][-1].get("tool_calls", [])[:1]:
        return float(call["function"] == {"name": quantity, "arguments": json.dumps({"name": name})})
    return 0.0


def build_sft_examples(num_examples: int = 4000, seed: int = 1000) -> list[dict[str, Any]]:
    """Conversations in the right format, whose tool is often the wrong one."""
    draw, rows = random.Random(seed), []
    for row in load_environment(num_examples, seed)["dataset"]:
        quantity, _, name = row["question"]
        if draw.random() < CARELESSNESS:
            quantity = draw.choice(QUANTITIES)
        function = {"name": quantity, "arguments": json.dumps({"name": name})}
        call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        number = row["info"][quantity][name]
        messages = [{"role": "user", "content": row["prompt"]}, call, {"role": "tool", "content": number}]
        rows.append({"messages": [*messages, {"role": "assistant", "content": number}], "tools": TOOLS})
    return rows


def _build_row(name: str, draw: random.Random) -> dict[str, Any]:
    table = {quantity: {other: str(draw.randint(1, 9)) for other in NAMES} for quantity in QUANTITIES}
    quantity = draw.choice(QUANTITIES)
    question = [quantity, "of", name]
    return {"prompt": " ".join(question) + "?", "question": question, "answer": table[quantity][name], "info": table}


if __name__ == "__main__":
    PATH.parent.mkdir(parents=True, exist_ok=True)
    PATH.write_text("".join(json.dumps(row) + "\n" for row in build_sft_examples()))
