"""Prompts of a data set, with or without their answers, for reinforcement learning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollouts.training.datasets.rows import Row, load_rows, read_list

QUESTIONS = ("prompt", "question", "problem", "instruction")
ANSWERS = ("answer", "solution", "ground_truth", "output", "completion")


def load_rl_prompts(name: str, split: str = "train", max_prompts: int | None = None) -> list[Any]:
    """The prompts of a JSONL or parquet file, or of a data set on the hub: text, or messages up to the last question.

    The prompt is the first of `prompt question problem instruction` that a row has, or its `messages` without
    those of the assistant at their end. `ValueError` for a row with none of them.
    """
    if max_prompts is not None and max_prompts < 1:
        raise ValueError(f"max_prompts {max_prompts} must be at least 1, or None for all")
    return [read_prompt(row, _name(index)) for index, row in enumerate(load_rows(name, split)[:max_prompts])]


def load_dataset_with_answers(name: str, split: str = "train", max_samples: int | None = None) -> list[dict[str, Any]]:
    """Rows `{"prompt", "answer"}`, for reward functions with a reference answer."""
    if max_samples is not None and max_samples < 1:
        raise ValueError(f"max_samples {max_samples} must be at least 1, or None for all")
    rows = load_rows(name, split)[:max_samples]
    return [
        {"prompt": read_prompt(row, _name(index)), "answer": _first(row, ANSWERS, "an answer", _name(index))}
        for index, row in enumerate(rows)
    ]


def read_prompt(row: Row, where: str) -> Any:
    """The prompt of a row, as in `load_rl_prompts`; `ValueError` names `where` the row is."""
    messages = row.get("messages")
    if messages is None:
        return _first(row, QUESTIONS, "a prompt", where)
    try:
        messages = read_list(list(messages) if isinstance(messages, tuple) else messages, "messages")
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if not all(isinstance(message, Mapping) for message in messages):
        raise ValueError(f"{where}: `messages` has entries that are no messages with a role")
    prompt = [dict(message) for message in messages]
    while prompt and prompt[-1].get("role") == "assistant":
        prompt.pop()
    if not prompt:
        raise ValueError(f"{where} has no message before the assistant's: nothing to ask")
    return prompt


def _name(index: int) -> str:
    return f"row {index} of the data set"


def _first(row: Row, names: tuple[str, ...], what: str, where: str) -> Any:
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise ValueError(f"{where} has the columns {', '.join(sorted(row))}: {what} is one of {', '.join(names)}")
