"""Proposer of the loop on a real model: it writes the feedback on failed answers, which are facts, into a handbook."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

TITLE = "Larkmoor town handbook:"
ENDING = "\n\nAnswer the question with the handbook.\nQuestion: "


def add_facts(context: str, examples: Sequence[Mapping[str, Any]], rng: random.Random) -> str:
    """The handbook with one line for each fact, those before first."""
    facts = [line for line in context.splitlines() if line.startswith("- ")]
    facts += [f"- {example['feedback']}" for example in examples if example.get("feedback")]
    return "\n".join([TITLE, *dict.fromkeys(facts)]) + ENDING
