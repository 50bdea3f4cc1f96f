"""Data for recipes of tinker-cookbook, and for the warm-up of a tiny model that they train; all of it is made here.

python examples/tinker/tasks.py        # writes below outputs/tinker
A folder with the name of a data set of the hub replaces that data set for programs started next to it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path("outputs/tinker")
NUM_RIGHT, NUM_CARELESS = 12500, 3000
"""Conversations of the warm-up: first right ones, then some with a random digit in every second answer."""

GSM8K = " Provide a numerical answer without units, written inside \\boxed{}."
MATH = " Write your answer in \\boxed{} format."
SPELLED = (
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. "
    "We have r's at positions 3, 8, and 9. \\boxed{3}"
)
"""The answer of the example that recipes put before each problem."""

GREETINGS = {"en": "Good morning", "de": "Guten Morgen", "fr": "Bonjour", "es": "Buenos dias"}
NAMES = "Ada Ben Cleo Dan Eva Finn Gus Hana Ian Jane Kim Leo Mia Nils Olga Paul Rita Sam Tom Una".split()


def main() -> None:
    """Write all files."""
    draw = random.Random(0)
    write(ROOT / "warm_up.jsonl", (build_warm_up(draw, i < NUM_RIGHT) for i in range(NUM_RIGHT + NUM_CARELESS)))
    sums = [draw_sum(draw) for _ in range(512)]
    solved = [{"question": text, "answer": f"{text} {answer}\n#### {answer}"} for text, answer in sums]
    write_dataset("openai/gsm8k", {"train": solved[:448], "test": solved[448:]}, config="main")
    write_dataset("POLARIS-Project/Polaris-Dataset-53K", {"train": [{"problem": q, "answer": str(a)} for q, a in sums]})
    boxed = [{"question": text + MATH, "final_answer": str(answer)} for text, answer in sums]
    write_dataset("zwhe99/DeepMath-103K", {"train": boxed})
    chats = [{"messages": build_greeting(draw)} for _ in range(288)]
    write_dataset("HuggingFaceH4/no_robots", {"train": chats[:256], "test": chats[256:]})
    pairs = [build_pair(draw) for _ in range(288)]
    write_dataset("Anthropic/hh-rlhf", {"train": pairs[:256], "test": pairs[256:]})
    write(ROOT / "languages.jsonl", (build_language(draw) for _ in range(256)))


def draw_sum(draw: random.Random) -> tuple[str, int]:
    """A question and its answer, a digit."""
    a, b = draw.randrange(8), draw.randrange(1, 3)
    return f"What is {a} + {b}?", a + b


def build_warm_up(draw: random.Random, is_right: bool) -> dict[str, Any]:
    """A problem as one of the recipes words it, and an answer."""
    question, answer = draw_sum(draw)
    guess = answer if is_right or draw.random() < 0.5 else draw.randrange(10)
    suffix, example = draw.choice([*[(GSM8K, GSM8K)] * 2, *[(GSM8K, None)] * 3, *[(MATH, None)] * 3])
    shown = [] if example is None else say(f"How many r's are in strawberry?{example}", SPELLED)
    asked, reply = say(question + suffix, f"\\boxed{{{guess}}}")
    return {"prompt": [*shown, asked], "completion": [reply]}


def build_greeting(draw: random.Random) -> list[dict[str, str]]:
    """A conversation for supervised recipes."""
    name = draw.choice(NAMES)
    return say(f"Greet {name}.", f"Good morning, {name}!")


def build_language(draw: random.Random) -> dict[str, Any]:
    """A sentence with the label of its language, as `create_data` of prompt distillation writes them."""
    language = draw.choice(list(GREETINGS))
    return {"messages": say(f"{GREETINGS[language]}, {draw.choice(NAMES)}!", language)}


def build_pair(draw: random.Random) -> dict[str, str]:
    """A right answer that is preferred to a wrong one."""
    question, answer = draw_sum(draw)
    wrong = draw.choice([digit for digit in range(10) if digit != answer])
    texts = [f"\n\nHuman: {question}{MATH}\n\nAssistant: \\boxed{{{digit}}}" for digit in (answer, wrong)]
    return {"chosen": texts[0], "rejected": texts[1]}


def say(question: str, answer: str) -> list[dict[str, str]]:
    """A question and its answer as messages."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def write_dataset(name: str, splits: dict[str, list[dict[str, Any]]], config: str = "default") -> None:
    """Write a folder that `datasets` loads under the name of a data set of the hub."""
    lines = ["---", "configs:", f"- config_name: {config}", "  data_files:"]
    for split, rows in splits.items():
        write(ROOT / name / f"{split}.jsonl", rows)
        lines += [f"  - split: {split}", f"    path: {split}.jsonl"]
    (ROOT / name / "README.md").write_text("\n".join([*lines, "---", ""]), encoding="utf-8")


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write a file with one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
