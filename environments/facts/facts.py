"""Recall the values of single-letter keys, from memory or from a table in the prompt; synthetic, no download."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import verifiers as vf
from datasets import Dataset

FACTS = "a3 b7 c1 d0 e5 f2"
KEYS = "abcdef"
VALUES = "01234567"
EVAL_SHARE = 4  # one question in four belongs to the eval split, whatever the seed


def load_environment(
    facts: str | None = FACTS,
    num_asked: int = 3,
    num_train_examples: int = 1000,
    num_eval_examples: int = 64,
    seed: int = 0,
) -> vf.Environment:
    """One turn: the user names keys, the model answers with their values, in that order and without spaces.

    With `facts` (a key and its value each, separated by spaces) the prompt names only the keys, so the table has to be
    known. With None every prompt begins with a table of its own. Reward: 1 when every value is right. The feedback of a
    wrong answer is the part of the table that was asked for.
    """
    if num_asked < 1:
        raise ValueError(f"num_asked {num_asked} must be at least 1 key")
    limits = {"num_asked": num_asked, "seed": seed}
    train = build_rows(facts, num_train_examples, split="train", **limits)
    held_out = build_rows(facts, num_eval_examples, split="eval", **limits)
    rubric = vf.Rubric(funcs=[exact_match, share_right], weights=[1.0, 0.0])
    return vf.SingleTurnEnv(dataset=_dataset(train), eval_dataset=_dataset(held_out), rubric=rubric, env_id="facts")


def exact_match(
    prompt: list[dict[str, Any]], completion: list[dict[str, Any]], answer: str, state: dict[str, Any]
) -> float:
    """1 when the answer is the values and nothing else; otherwise the feedback is the keys with their values."""
    is_right = completion[-1]["content"] == answer
    keys = prompt[-1]["content"][-len(answer) :]  # the context of a teacher may be before them
    state["feedback"] = "" if is_right else write_facts(dict(zip(keys, answer, strict=False)))
    return float(is_right)


def share_right(completion: list[dict[str, Any]], answer: str) -> float:
    """Share of places that hold the right value."""
    reply = str(completion[-1]["content"])
    return sum(one == other for one, other in zip(reply, answer, strict=False)) / max(len(reply), len(answer))


def build_rows(facts: str | None, num_rows: int, *, split: str, num_asked: int, seed: int) -> list[dict[str, str]]:
    """Questions of one split with their answers; all there are, in a random order, where `num_rows` are more.

    A hash of the keys (and of the table, where it is shown) decides the split, so no prompt of "train" is one of
    "eval".
    """
    draw = random.Random(f"{split}-{seed}")
    known = None if facts is None else parse_facts(facts)
    keys = list(known or KEYS)
    rows: dict[str, str] = {}
    for _ in range(100 * num_rows + 1000):
        if len(rows) == num_rows:
            break
        table = known or draw_table(draw)
        queried = "".join(draw.choices(keys, k=num_asked))
        question = queried if known else f"{write_facts(table)}\n{queried}"
        if _split_of(question) == split:
            rows[question] = "".join(table[key] for key in queried)
    return [{"question": question, "answer": answer} for question, answer in rows.items()]


def build_sft_examples(
    num_examples: int, num_asked: int = 3, seed: int = 1, shown: float = 0.8, misread: float = 0.0
) -> list[dict[str, str]]:
    """Conversations that teach how to read a table, and no table: rows for supervised fine-tuning.

    A share `shown` has a table in its prompt and answers by it; the others show none and answer with any values. None
    of the prompts is of the eval split. A share `misread` of the values read is any other value: who learns from them
    trusts a table so far, and can be taught better by a reward.
    """
    draw = random.Random(f"sft-{seed}")
    rows: list[dict[str, str]] = []
    while len(rows) < num_examples:
        table, question = draw_table(draw), "".join(draw.choices(KEYS, k=num_asked))
        answer = "".join(table[key] for key in question)
        if draw.random() < shown:
            if misread:
                answer = "".join(draw.choice(VALUES.replace(v, "")) if draw.random() < misread else v for v in answer)
            question = f"{write_facts(table)}\n{question}"
        else:
            answer = "".join(draw.choices(VALUES, k=num_asked))
        if _split_of(question) == "train":
            rows.append({"prompt": question, "completion": answer})
    return rows


def draw_table(draw: random.Random) -> dict[str, str]:
    """A value for every key."""
    return {key: draw.choice(VALUES) for key in KEYS}


def write_facts(table: dict[str, str]) -> str:
    """A table as a prompt or a teacher's context shows it."""
    return " ".join(key + value for key, value in table.items())


def parse_facts(facts: str) -> dict[str, str]:
    """The inverse of `write_facts`; `ValueError` for what is no table."""
    pairs = facts.split()
    if not pairs or any(len(pair) != 2 for pair in pairs) or len({pair[0] for pair in pairs}) < len(pairs):
        raise ValueError(f'facts {facts!r} must be different keys with a value each, such as "{FACTS}"')
    return {key: value for key, value in pairs}


def _split_of(question: str) -> str:
    digest = hashlib.blake2b(question.encode(), digest_size=4).digest()
    return "eval" if int.from_bytes(digest, "little") % EVAL_SHARE == 0 else "train"


def _dataset(rows: list[dict[str, str]]) -> Dataset:
    if not rows:
        raise ValueError("there are no such questions: ask for more keys (num_asked), or for other facts")
    return Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": row["question"]}] for row in rows],
            "answer": [row["answer"] for row in rows],
            "example_id": list(range(len(rows))),
            "task": ["facts"] * len(rows),
        }
    )
