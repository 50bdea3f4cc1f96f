"""Look up two invented prices with a tool, then add them: one call of the tool, one answer."""

from __future__ import annotations

import json
import random
import re
from typing import Any

ITEMS = (
    "apple bag ball bell belt bike boat book boot bowl box brush cake camera candle cap chair clock coat comb cup "
    "desk doll door drum fan flag fork glass glove guitar hammer hat jar kettle key kite knife lamp lock map mirror "
    "mug needle oven pan pen phone piano pillow plate pot radio ring rope rug scarf shirt shoe soap sock sofa spoon "
    "table tent tie towel toy vase watch wheel whistle"
).split()
SYSTEM_PROMPT = """You can call this tool:
<tools>[{"name": "prices", "parameters": {"items": "list of names"}}]</tools>
Call it with <tool_call>[{"name": "prices", "arguments": {"items": [...]}}]</tool_call> and answer with its results."""


def load_environment(num_train_examples: int = 2000, num_eval_examples: int = 256, seed: int = 0) -> dict[str, Any]:
    """Questions on pairs of items; no held-out pair is a training pair in either order.

    The prices belong to the question and are drawn at random, so that only a call can reveal them.
    """
    rows = draw_rows(num_train_examples + num_eval_examples, seed)
    return {
        "dataset": rows[num_eval_examples:],
        "eval_dataset": rows[:num_eval_examples],
        "system_prompt": SYSTEM_PROMPT,
        "rewards": [(correct_total, 1.0), (called_right, 0.0)],
        "respond": respond,
        "max_turns": 2,
    }


def build_sft_examples(num_examples: int, seed: int = 0) -> list[dict[str, Any]]:
    """Training questions with the right call, the result and the right answer, for supervised fine-tuning."""
    rows = []
    for row in load_environment(num_train_examples=num_examples, seed=seed)["dataset"]:
        items = list(row["info"])
        call = json.dumps([{"name": "prices", "arguments": {"items": items}}])
        messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": row["prompt"]}]
        messages.append({"role": "assistant", "content": f"<tool_call>{call}</tool_call>"})
        messages.append(build_result(items, row["info"]))
        messages.append({"role": "assistant", "content": f"Together they cost {row['answer']}."})
        rows.append({"messages": messages})
    return rows


def draw_rows(num_rows: int, seed: int) -> list[dict[str, Any]]:
    """Questions with their prices (`info`); the first ones do not depend on the number."""
    draw = random.Random(seed)
    rows: dict[frozenset[str], dict[str, Any]] = {}
    while len(rows) < num_rows:
        first, second = draw.sample(ITEMS, 2)
        prices = {first: draw.randint(1, 9), second: draw.randint(1, 9)}
        question = f"How much do a {first} and a {second} cost together?"
        rows.setdefault(frozenset(prices), {"prompt": question, "answer": str(sum(prices.values())), "info": prices})
    return list(rows.values())


def respond(messages: list[dict[str, Any]], row: dict[str, Any], state: dict[str, Any]) -> list[dict[str, str]]:
    """The result of the tool, after a valid call in the first turn; nothing otherwise, which ends the rollout."""
    items = read_call(messages[-1]["content"])
    return [] if items is None else [build_result(items, row["info"])]


def build_result(items: list[str], prices: dict[str, int]) -> dict[str, str]:
    """The message with the results; as the user, because many chat templates know no role for tools."""
    results = {item: prices.get(item, "unknown") for item in items}
    return {"role": "user", "content": f"<tool_response>{json.dumps(results)}</tool_response>"}


def read_call(text: str) -> list[str] | None:
    """The items of a valid call of `prices`, and nothing else in the text; None for anything else."""
    match = re.fullmatch(r"\s*<tool_call>(.*)</tool_call>\s*", text, re.DOTALL)
    try:
        [call] = json.loads(match[1] if match else "")
        items = call["arguments"]["items"]
        valid = call["name"] == "prices" and isinstance(items, list) and all(isinstance(item, str) for item in items)
    except (ValueError, TypeError, KeyError):
        return None
    return items if valid else None


def correct_total(messages: list[dict[str, Any]], answer: str) -> float:
    """1 if the last number of the answer after the tool's result is the sum of the prices."""
    return float(len(messages) == 3 and re.findall(r"\d+", messages[-1]["content"])[-1:] == [answer])


def called_right(messages: list[dict[str, Any]], row: dict[str, Any]) -> float:
    """1 if the first message calls the tool with the two items of the question."""
    items = read_call(messages[0]["content"]) if messages else None
    return float(items is not None and sorted(items) == sorted(row["info"]))
