"""Sokoban, in one answer or turn by turn, on levels that are proved to be solvable."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import verifiers as vf
from datasets import Dataset

sys.path.insert(0, str(Path(__file__).parent))  # the sibling module, also where this file is loaded by its path
from sokoban_levels import (
    MOVES,
    Level,
    build_levels,
    fingerprint,
    iterate_files,
    parse_level,
    read_boxoban,
    render_level,
    replay,
    split_of,
)

SYSTEM_PROMPT = (
    "You solve puzzles. Think step by step, then give your final answer, and nothing but the answer, between <answer> "
    "and </answer>."
)
LEGEND = """* player    % player on a goal
@ box       $ box on a goal
X goal      + wall      - floor"""
SINGLE = (
    "This is a Sokoban puzzle: push every box onto a goal. Its cells are\n{legend}\n\nThe player moves left, right, up "
    "or down (L, R, U, D) and pushes a box by walking into it; boxes cannot be pulled. Answer with all moves as one "
    "string, for example LDURRUDL.\n\nThe puzzle:\n{level}"
)
TURNS = (
    "This is a Sokoban puzzle: push every box onto a goal. Its cells are\n{legend}\n\nThe player moves left, right, up "
    "or down (L, R, U, D) and pushes a box by walking into it; boxes cannot be pulled. In each turn answer with one or "
    "more moves, for example LDU, and you will see where they lead.\n\nThe puzzle:\n{level}"
)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def load_environment(
    num_train_examples: int = 1000,
    num_eval_examples: int = 100,
    seed: int = 42,
    min_w: int = 4,
    max_w: int = 5,
    min_h: int = 4,
    max_h: int = 5,
    min_boxes: int = 1,
    max_boxes: int = 3,
    max_depth: int = 80,
    min_pushes: int = 2,
    levels: Sequence[str] | str | None = None,
    turn_by_turn: bool = False,
    max_turns: int = 30,
    partial_credit: float = 0.0,
    step_cost: float = 0.0,
    system_prompt: str | None = SYSTEM_PROMPT,
) -> vf.Environment:
    """Levels of `min_w`-`max_w` x `min_h`-`max_h` cells inside their walls, with `min_boxes`-`max_boxes` boxes.

    Every level takes at least `min_pushes` pushes and at most `max_depth` moves; none comes twice, mirrored or turned
    ones included, and none of training is in evaluation. `levels` reads files or folders of the Boxoban collection
    instead. `turn_by_turn` shows the level after every answer, up to `max_turns` of them. Reward: 1 when all boxes are
    on goals, else `partial_credit` times the share of the boxes that were brought there; `step_cost` is taken off per
    move.
    """
    for name, least, most in (("w", min_w, max_w), ("h", min_h, max_h), ("boxes", min_boxes, max_boxes)):
        if not 1 <= least <= most:
            raise ValueError(f"min_{name} {least} and max_{name} {most}: need 1 <= min_{name} <= max_{name}")
    if levels is None:
        limits: dict[str, Any] = {
            "seed": seed,
            "widths": (min_w, max_w),
            "heights": (min_h, max_h),
            "boxes": (min_boxes, max_boxes),
            "max_depth": max_depth,
            "min_pushes": min_pushes,
        }
        train = build_levels(num_train_examples, split="train", **limits)
        held_out = build_levels(num_eval_examples, split="eval", **limits)
    else:
        train, held_out = _read_levels(levels, num_train_examples, num_eval_examples)

    def check_answer_reward_func(completion: list[dict[str, Any]], info: dict[str, Any]) -> float:
        """What the moves of all answers together have achieved."""
        start = parse_level(info["level"])
        end = replay(start, moves := read_moves(completion, turn_by_turn))
        if not moves:
            return 0.0
        return compute_reward(start, end, partial_credit) - step_cost * len(moves)

    rubric = vf.Rubric(funcs=[check_answer_reward_func, format_reward_func, solved], weights=[1.0, 0.0, 0.0])
    question = TURNS if turn_by_turn else SINGLE
    parts = {
        "dataset": _to_dataset(train, question, system_prompt),
        "eval_dataset": _to_dataset(held_out, question, system_prompt),
        "rubric": rubric,
        "env_id": "sokoban-env",
    }
    return SokobanEnv(max_turns=max_turns, **parts) if turn_by_turn else vf.SingleTurnEnv(**parts)


class SokobanEnv(vf.MultiTurnEnv):
    """Shows where the moves of each answer lead, until the level is solved."""

    @vf.stop
    async def level_is_solved(self, state: vf.State) -> bool:
        """All boxes are on goals."""
        return bool(state["trajectory"]) and self._current_level(state).is_solved

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        """The level as it is now."""
        moves = read_moves(state["trajectory"][-1]["completion"], turn_by_turn=True)
        notice = "" if moves else "I found no moves between <answer> and </answer>. "
        return [{"role": "user", "content": f"{notice}The puzzle is now:\n{render_level(self._current_level(state))}"}]

    def _current_level(self, state: vf.State) -> Level:
        replies = [message for step in state["trajectory"] for message in step["completion"]]
        return replay(parse_level(state["info"]["level"]), read_moves(replies, turn_by_turn=True))


def read_moves(completion: list[dict[str, Any]], turn_by_turn: bool = False) -> str:
    """The moves in the last tagged answer of the last reply, or of each reply; other characters are left out."""
    replies = [str(message["content"] or "") for message in completion if message["role"] == "assistant"]
    answers = [found[-1] for found in map(ANSWER.findall, replies if turn_by_turn else replies[-1:]) if found]
    return "".join(move for answer in answers for move in answer if move in MOVES)


def compute_reward(start: Level, end: Level, partial_credit: float) -> float:
    """1 when solved, else `partial_credit` times the share of boxes off their goals that were brought onto one."""
    if end.is_solved:
        return 1.0
    before, after = len(start.boxes - start.goals), len(end.boxes - end.goals)
    return partial_credit * max(before - after, 0) / before


def solved(completion: list[dict[str, Any]], info: dict[str, Any]) -> float:
    """1 when all boxes are on goals."""
    moves = "".join(read_moves([message]) for message in completion)
    return float(replay(parse_level(info["level"]), moves).is_solved)


def format_reward_func(completion: list[dict[str, Any]]) -> float:
    """Share of the replies that hold exactly one tagged answer with moves, and nothing behind it."""
    replies = [str(message["content"] or "") for message in completion if message["role"] == "assistant"]
    good = [
        len(found) == 1 and bool(set(found[0]) & set(MOVES)) and reply.rstrip().endswith("</answer>")
        for reply in replies
        for found in [ANSWER.findall(reply)]
    ]
    return sum(good) / len(good) if good else 0.0


def build_sft_examples(num_examples: int, system_prompt: str | None = SYSTEM_PROMPT, **limits: Any) -> list[dict]:
    """Puzzles of the train split with their solutions, as rows for supervised fine-tuning."""
    return [
        {
            "prompt": _prompt(level, SINGLE, system_prompt),
            "completion": [{"role": "assistant", "content": f"<answer>{certificate}</answer>"}],
        }
        for level, certificate in build_levels(num_examples, split="train", **limits)
    ]


def _read_levels(files: Sequence[str] | str, num_train: int, num_eval: int) -> tuple[list, list]:
    """Levels of Boxoban files without doubles, divided by their fingerprint; their solutions are not told."""
    known: dict[bytes, Level] = {}
    for path in iterate_files(files):
        for level in read_boxoban(path):
            if not level.is_solved:
                known.setdefault(fingerprint(level), level)
    parts: dict[str, list[tuple[Level, str]]] = {"train": [], "eval": []}
    wanted = {"train": num_train, "eval": num_eval}
    for name, level in known.items():
        split = split_of(name)
        if len(parts[split]) < wanted[split]:
            parts[split].append((level, ""))
    for split, part in parts.items():
        if len(part) < wanted[split]:
            raise ValueError(
                f"levels {files!r} have {len(part)} {split} levels, {wanted[split]} are asked for: lower "
                f"num_{split}_examples or give more files"
            )
    return parts["train"], parts["eval"]


def _prompt(level: Level, question: str, system_prompt: str | None) -> list[dict[str, str]]:
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    content = question.format(legend=LEGEND, level=render_level(level))
    return [*system, {"role": "user", "content": content}]


def _to_dataset(levels: list[tuple[Level, str]], question: str, system_prompt: str | None) -> Dataset:
    return Dataset.from_dict(
        {
            "prompt": [_prompt(level, question, system_prompt) for level, _ in levels],
            "answer": [certificate for _, certificate in levels],
            "info": [json.dumps({"level": render_level(level)}) for level, _ in levels],
            "example_id": list(range(len(levels))),
            "task": ["sokoban-env"] * len(levels),
        }
    )
