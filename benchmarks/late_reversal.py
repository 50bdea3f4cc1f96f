"""The demo's task with answers that take time, a few of them very long: the environment of bench_long_tail.py."""

from __future__ import annotations

import asyncio
import random
import re
from difflib import SequenceMatcher
from typing import Any

ANSWER = re.compile(r"<reversed_text>(.*?)</reversed_text>", re.DOTALL)


def load_environment(texts: int = 2048, usual_s: float = 0.2, late_s: float = 6.0, one_in: int = 32) -> dict[str, Any]:
    """Five letters to reverse; a rollout is scored after `usual_s`, and one in `one_in` after `late_s`.

    Which one is left to chance, so it has nothing to do with the reward.
    """
    draw = random.Random("late reversal")
    words = ["".join(draw.choice("abcdefghijklmnop") for _ in range(5)) for _ in range(texts)]

    async def similarity(completion: str, answer: str) -> float:
        await asyncio.sleep(late_s if draw.randrange(one_in) == 0 else usual_s)
        found = ANSWER.search(completion)
        return SequenceMatcher(None, found.group(1).strip() if found else "", answer, autojunk=False).ratio()

    return {"dataset": [{"prompt": word, "answer": word[::-1]} for word in words], "rewards": similarity}
