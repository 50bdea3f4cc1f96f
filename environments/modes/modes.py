"""Rewrite a few letters by a rule that the prompt gives, or that has to be known; synthetic, no download."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any

import verifiers as vf
from datasets import Dataset

LETTERS = "abcdefgh"
MODES: dict[str, Callable[[str], str]] = {
    "copy": lambda text: text,
    "reverse": lambda text: text[::-1],
    "sort": lambda text: "".join(sorted(text)),
    "next": lambda text: "".join(LETTERS[(LETTERS.index(letter) + 1) % len(LETTERS)] for letter in text),
}
PLAIN_SHARES = {"copy": 0.55, "reverse": 0.15, "sort": 0.15, "next": 0.15}
EVAL_SHARE = 8  # one text in eight belongs to the eval split, whatever the seed and the mode


def load_environment(
    mode: str | None = "reverse",
    length: int = 4,
    num_train_examples: int = 1000,
    num_eval_examples: int = 128,
    seed: int = 0,
) -> vf.Environment:
    """One turn: the user gives letters, the model answers with them rewritten: copied, reversed, sorted or next ones.

    With `mode` the prompt is the letters alone, so the way has to be known. With None every prompt names a way, each
    way in turn. Reward: 1 for the right letters.
    """
    if mode is not None and mode not in MODES:
        raise ValueError(f"mode {mode!r} is not one of {', '.join(MODES)}")
    train, held_out = (
        build_rows(mode, count, split=split, length=length, seed=seed)
        for split, count in (("train", num_train_examples), ("eval", num_eval_examples))
    )
    rubric = vf.Rubric(funcs=[exact_match], weights=[1.0])
    return vf.SingleTurnEnv(dataset=_dataset(train), eval_dataset=_dataset(held_out), rubric=rubric, env_id="modes")


def exact_match(completion: list[dict[str, Any]], answer: str) -> float:
    """1 when the answer is the rewritten letters and nothing else."""
    return float(completion[-1]["content"] == answer)


def build_rows(mode: str | None, num_rows: int, *, split: str, length: int, seed: int) -> list[dict[str, str]]:
    """Texts of one split with their answers; `ValueError` where there are not so many."""
    texts = build_texts(num_rows, split=split, length=length, seed=seed)
    ways = [mode or list(MODES)[i % len(MODES)] for i in range(num_rows)]
    return [
        {"question": text if mode else f"{way}\n{text}", "answer": MODES[way](text)}
        for text, way in zip(texts, ways, strict=True)
    ]


def build_texts(num_texts: int, *, split: str, length: int, seed: int) -> list[str]:
    """Different random texts of one split; a hash of the text decides its split."""
    draw = random.Random(f"{split}-{seed}")
    texts: dict[str, None] = {}
    for _ in range(100 * num_texts + 1000):
        if len(texts) == num_texts:
            return list(texts)
        text = "".join(draw.choices(LETTERS, k=length))
        if _split_of(text) == split:
            texts[text] = None
    raise ValueError(f"length {length} has fewer than {num_texts} {split} texts: ask for fewer, or for longer ones")


def build_sft_examples(num_examples: int, length: int = 4, seed: int = 1, named: float = 0.8) -> list[dict[str, str]]:
    """Conversations that teach every way by its name, and mostly to copy without one: rows for supervised fine-tuning.

    A share `named` names a way and follows it; the others name none and follow one drawn by `PLAIN_SHARES`. All texts
    are of the train split.
    """
    draw = random.Random(f"sft-{seed}")
    rows: list[dict[str, str]] = []
    while len(rows) < num_examples:
        text = "".join(draw.choices(LETTERS, k=length))
        if _split_of(text) == "eval":
            continue
        if draw.random() < named:
            way = draw.choice(list(MODES))
            rows.append({"prompt": f"{way}\n{text}", "completion": MODES[way](text)})
        else:
            [way] = draw.choices(list(PLAIN_SHARES), list(PLAIN_SHARES.values()))
            rows.append({"prompt": text, "completion": MODES[way](text)})
    return rows


def _split_of(text: str) -> str:
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return "eval" if int.from_bytes(digest, "little") % EVAL_SHARE == 0 else "train"


def _dataset(rows: list[dict[str, str]]) -> Dataset:
    return Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": row["question"]}] for row in rows],
            "answer": [row["answer"] for row in rows],
            "example_id": list(range(len(rows))),
            "task": ["modes"] * len(rows),
        }
    )
