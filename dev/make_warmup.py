"""Write warm-up conversations with the environment's own `build_sft_examples`.

    python dev/make_warmup.py wiki-search             # outputs/wiki_search/sft.jsonl: right answers
    python dev/make_warmup.py alphabet-sort --tiny    # outputs/alphabet_sort_tiny/sft.jsonl: with errors
    python dev/make_warmup.py facts                   # outputs/facts/sft.jsonl: following contexts, for distillation
    python dev/make_warmup.py nim                     # outputs/nim/sft.jsonl: random legal moves
    python dev/make_warmup.py facts --unsure          # outputs/facts/unsure.jsonl: contexts with errors

The tiny ones are for `examples/<name>/tiny/`, whose `rl.toml` has the environment's arguments. Their format is right
and their content has errors: a model trained on them knows the format and is sometimes right, the starting point for
RL.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
import tomllib
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("alphabet-sort", "wordle", "wiki-search", "facts", "modes", "nim")
NUM_EXAMPLES = {"facts": 12_000, "modes": 12_000, "nim": 4_000}
FEW_EXAMPLES = 1000  # of the others
NUM_TINY_EXAMPLES = 3000
NUM_TINY_PAGES = 500
CARELESSNESS = 0.6  # share of lists whose order is thrown away
MISREAD = 0.03  # share of values that unsure readers get wrong
SEED = 1000  # not the seed of the RL run

Conversation = dict[str, Any]


def build_alphabet_sort(env: Any, args: dict[str, Any], draw: random.Random) -> list[Conversation]:
    """Lists with the right names and marks, often in the wrong order."""
    limits = (args["min_turns"], args["max_turns"], args["min_names_per_turn"], args["max_names_per_turn"])
    rows = env.build_sft_examples(NUM_TINY_EXAMPLES, limits, args["names"], args["short"], SEED)
    for message in (message for row in rows for message in row["messages"] if message["role"] == "assistant"):
        first, *names, last = message["content"].split("\n")
        if draw.random() < CARELESSNESS:
            draw.shuffle(names)
        message["content"] = "\n".join([first, *names, last])
    return rows


def build_wordle(env: Any, args: dict[str, Any], draw: random.Random) -> list[Conversation]:
    """Games with any words over the letters; half of the guesses use the hints."""
    letters = [sorted(set(place)) for place in zip(*args["words"], strict=True)]
    words = ["".join(word) for word in product(*letters)]
    kept = {name: args[name] for name in ("system_prompt", "rules", "max_guesses", "held_out_words")}
    return env.build_sft_examples(NUM_TINY_EXAMPLES, words, **kept, attention=0.5, seed=SEED)


def build_wiki_search(env: Any, args: dict[str, Any], draw: random.Random) -> list[Conversation]:
    """Calls that often read another section of the right page, and answers from what was read.

    The pages differ from those of RL and are many, so that names cannot be memorized.
    """
    kept = {name: args[name] for name in ("tools", "system_prompt")}
    right = env.build_sft_examples(NUM_TINY_EXAMPLES, num_pages=NUM_TINY_PAGES, seed=SEED, **kept)
    by_page: dict[str, list[Conversation]] = {}
    for row in right:
        by_page.setdefault(_read_page(row), []).append(row)
    _, questions = env.build_pages(NUM_TINY_PAGES, SEED, args["topics"])
    tiny_questions = {question for question, _ in questions}
    candidates = [row for row in right if row["messages"][0]["content"] in tiny_questions]
    rows = []
    for right_row in (draw.choice(candidates) for _ in range(2 * NUM_TINY_EXAMPLES)):
        other_row = draw.choice(by_page[_read_page(right_row)]) if draw.random() < CARELESSNESS else right_row
        rows.append({**other_row, "messages": [*right_row["messages"][:1], *other_row["messages"][1:]]})
    return rows


def _read_page(row: Conversation) -> str:
    """The page of the section that a conversation reads last."""
    calls = [call for message in row["messages"] for call in message.get("tool_calls") or []]
    return str(json.loads(calls[-1]["function"]["arguments"])["section_id"].split(":")[0])


TINY: dict[str, Callable[[Any, dict[str, Any], random.Random], list[Conversation]]] = {
    "alphabet-sort": build_alphabet_sort,
    "wordle": build_wordle,
    "wiki-search": build_wiki_search,
}


def main() -> None:
    name, *flags = sys.argv[1:] or [""]
    if name not in NAMES or flags not in ([], ["--tiny"] if name in TINY else ["--unsure"] * (name == "facts")):
        extras = f"--tiny: {', '.join(TINY)}; --unsure: facts"
        raise SystemExit(f"usage: python dev/make_warmup.py {' | '.join(NAMES)} ({extras})")
    folder = name.replace("-", "_")
    sys.path.insert(0, str(ROOT / "environments" / folder))
    env = importlib.import_module(folder)
    file = "sft.jsonl"
    if flags == ["--unsure"]:
        rows, file = env.build_sft_examples(NUM_EXAMPLES[name], seed=SEED, misread=MISREAD), "unsure.jsonl"
    elif flags:
        config = tomllib.loads((ROOT / "examples" / folder / "tiny" / "rl.toml").read_text())
        rows = TINY[name](env, config["orchestrator"]["env"][0]["args"], random.Random(SEED))
    else:
        rows = env.build_sft_examples(NUM_EXAMPLES.get(name, FEW_EXAMPLES))
    path = Path("outputs") / (folder + "_tiny" * ("--tiny" in flags)) / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    sys.stdout.write(f"{len(rows)} conversations in {path}\n")


if __name__ == "__main__":
    main()
