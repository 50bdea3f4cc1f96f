"""Write examples/reverse_text/tiny/sft.jsonl: imperfect demonstrations of reversing a text.

Each letter of an answer is replaced by a random one with probability `NOISE`. A model trained on them knows
the task and the format but makes about as many errors, which RL then reduces.

    python dev/make_reverse_text_sft.py
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NUM_EXAMPLES = 6144
NOISE = 0.4
ALPHABET = "abcdefghijklmnop"
LENGTH = 5
SEED = 1000  # not the seed of the RL run; texts of the eval split are left out whatever the seed


def main() -> None:
    sys.path.insert(0, str(ROOT / "environments" / "reverse_text"))
    from reverse_text import build_texts

    draw = random.Random(SEED)
    texts = build_texts(NUM_EXAMPLES, split="train", min_length=LENGTH, max_length=LENGTH, alphabet=ALPHABET, seed=SEED)
    lines = []
    for text in texts:
        answer = "".join(draw.choice(ALPHABET) if draw.random() < NOISE else letter for letter in reversed(text))
        lines.append(json.dumps({"prompt": text, "completion": f"<reversed_text>{answer}</reversed_text>"}))
    path = ROOT / "examples" / "reverse_text" / "tiny" / "sft.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
