"""Instructions that a program can check (IFEval, 2311.07911): the public prompts, with the checkers of lm-eval."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any


def load_environment(path: str, num_examples: int = -1, seed: int = 0) -> dict[str, Any]:
    """One turn; reward: 1 if the answer follows every instruction (strict, by prompt).

    `path` is the file `input_data.jsonl` of IFEval; `num_examples` prompts are drawn with `seed`, -1 takes all in the
    file's order. The metrics are the share of instructions followed, and the reward with loose matching.
    """
    try:
        from lm_eval.tasks.ifeval import utils
    except ImportError as error:
        raise ValueError("environment ifeval needs the checkers of lm-eval: pip install 'lm-eval[ifeval]'") from error
    rows = _read_lines(Path(path).expanduser())
    if num_examples >= 0:
        rows = random.Random(seed).sample(rows, num_examples)

    def check(completion: str, info: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = utils.process_results(info, [completion])
        return found

    def follows_all(completion: str, info: dict[str, Any]) -> float:
        return float(check(completion, info)["prompt_level_strict_acc"])

    def follows_all_loosely(completion: str, info: dict[str, Any]) -> float:
        return float(check(completion, info)["prompt_level_loose_acc"])

    def share_followed(completion: str, info: dict[str, Any]) -> float:
        followed = check(completion, info)["inst_level_strict_acc"]
        return sum(followed) / len(followed)

    data = [{"prompt": row["prompt"], "info": row} for row in rows]
    rewards = [(follows_all, 1.0), (follows_all_loosely, 0.0), (share_followed, 0.0)]
    return {"dataset": data, "eval_dataset": data, "rewards": rewards}


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON lines file; `ValueError` names a line that is no JSON."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not valid JSON: {error}") from error
    return rows
