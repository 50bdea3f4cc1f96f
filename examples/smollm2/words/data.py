"""Writes the rows of the supervised warm-up: python examples/smollm2/words/data.py."""

from __future__ import annotations

import json
from pathlib import Path

from words import build_sft_examples

NUM_ROWS = 48
PATH = Path("outputs/smollm2_words/sft.jsonl")


def main() -> None:
    """Write `PATH` below the working directory."""
    PATH.parent.mkdir(parents=True, exist_ok=True)
    PATH.write_text("".join(json.dumps(row) + "\n" for row in build_sft_examples(NUM_ROWS)))


if __name__ == "__main__":
    main()
