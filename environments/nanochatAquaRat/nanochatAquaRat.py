"""Multiple-choice algebra with five options: the AQuA-RAT files, or synthetic problems."""

from __future__ import annotations

import json
import logging
import random
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import verifiers as vf
from datasets import Dataset

sys.path.insert(0, str(Path(__file__).parent))  # the sibling modules, also where this file is loaded by its path
from aqua_files import find_data_dir, find_file, find_published, read_file, read_hub, read_row
from aqua_problems import build_problems

SYSTEM_PROMPT = "You are a patient algebra tutor: you work out every problem step by step before you choose."
NUM_MADE = {"train": 2000, "validation": 254}  # made problems when -1 asks for all of them
# "Answer: C", "the answer is **(C)**", "ANSWER = \\boxed{C}": a letter behind the word, and nothing but marks after it
# Every run of marks is bounded: a long run must not cost more than its length.
EXPLICIT = re.compile(
    r"(?i:\banswer)\*{0,3}\s{0,3}(?:(?i:is)\b\s{0,3}[:=\-]?|[:=\-])\s{0,3}(?i:option\s+)?[\s*_$(\[{\\]{0,6}"
    r"(?:\\?(?:boxed|text|mathrm|textbf|mathbf)\{){0,3}[\s*(\[]{0,6}"
    r"(?P<letter>[A-E])(?P<rest>(?![\w'])(?![ \t]+[a-z])[^\n]*)"
)
ONLY_LETTER = re.compile(r"[\s*_$(\[{]*(?:\\?boxed\{)?([A-E])[\s*_$)\]}.:]*")
Read = Callable[[str, int], list[dict[str, Any]]]
log = logging.getLogger("nanochatAquaRat")


def load_environment(
    system_prompt: str | None = SYSTEM_PROMPT,
    train_split: str = "train",
    eval_split: str | None = "validation",
    num_train_examples: int | None = -1,
    num_eval_examples: int | None = -1,
    seed: int | None = 42,
    include_rationale_metadata: bool = True,
    data_dir: str | None = None,
    cache_dir: str | None = None,
    difficulty: int | None = None,
    templates: Sequence[str] | None = None,
    short: bool = False,
) -> vf.Environment:
    """One turn: a problem with options A to E. `exact_match_reward` (weight 1) and `format_reward` (weight 0.1).

    Problems are those of the folder `data_dir`, of the hub (kept in `cache_dir`) when that is given, of what
    `prepare_aqua` wrote, or made on the spot. `difficulty` (a tier from 0 to 3) or `templates` ask for made ones.
    Training problems are shuffled by `seed` (None keeps their order), then cut to their number. `short` leaves out
    everything but the problem, for models that learn on a CPU. Raises `ValueError` in one sentence.
    """
    wanted = {"train": (train_split, num_train_examples), "eval": (eval_split, num_eval_examples)}
    wanted = {name: (split, -1 if count is None else count) for name, (split, count) in wanted.items()}
    wanted = {name: (split, count) for name, (split, count) in wanted.items() if split and count}
    make = partial(_make, seed=seed or 0, difficulty=difficulty, templates=templates)
    asked = difficulty is not None or templates is not None
    source, read = _choose_source(data_dir, cache_dir, make, asked, [split for split, _ in wanted.values()])
    parts = {name: read(split, count) for name, (split, count) in wanted.items()}
    if seed is not None:
        random.Random(seed).shuffle(parts.get("train", []))
    parts = {name: rows if wanted[name][1] < 0 else rows[: wanted[name][1]] for name, rows in parts.items()}
    prompt = "" if short and system_prompt == SYSTEM_PROMPT else system_prompt
    datasets = {name: _to_dataset(rows, prompt, short, include_rationale_metadata) for name, rows in parts.items()}
    parser = vf.MaybeThinkParser(extract_fn=extract_letter)
    return AquaEnvironment(
        source,
        dataset=datasets.get("train"),
        eval_dataset=datasets.get("eval"),
        parser=parser,
        rubric=vf.Rubric(funcs=[exact_match_reward, format_reward], weights=[1.0, 0.1], parser=parser),
        env_id="nanochatAquaRat",
    )


class AquaEnvironment(vf.SingleTurnEnv):
    """A single turn that can tell what it holds."""

    def __init__(self, source: str, **arguments: Any) -> None:
        super().__init__(message_type="chat", **arguments)
        self.source = source

    def __repr__(self) -> str:
        train, held_out = (0 if data is None else len(data) for data in (self.dataset, self.eval_dataset))
        return f"nanochatAquaRat({train} problems to train, {held_out} to evaluate, source: {self.source})"


def exact_match_reward(parser: vf.Parser, completion: list[dict[str, Any]], answer: str) -> float:
    """1 when the last answer is the right letter."""
    return float(parser.parse_answer(completion) == answer)


def format_reward(parser: vf.Parser, completion: list[dict[str, Any]], info: dict[str, Any]) -> float:
    """1 when there is an answer line, with the letter of an option."""
    found = _find_explicit(_text_of(parser, completion))
    return float(found is not None and found in info["letters"])


def extract_letter(text: str) -> str | None:
    """The letter of the last answer line, or of a text that is only a letter; None when there is neither.

    An answer line has the word "answer", "is" or a sign, and one capital letter, which may stand in brackets, stars
    or a box. A line that names several letters is no answer.
    """
    found = _find_explicit(text)
    only = ONLY_LETTER.fullmatch(text)
    return found or (only[1] if only else None)


def build_completion(rationale: str, correct: str) -> str:
    """What a good answer to a problem looks like: its rationale, and an answer line where that has none."""
    rationale = rationale.strip()
    return rationale if _find_explicit(rationale) == correct else f"{rationale}\nAnswer: {correct}".lstrip()


def build_sft_examples(
    num_examples: int,
    system_prompt: str | None = SYSTEM_PROMPT,
    seed: int = 42,
    difficulty: int | None = None,
    templates: Sequence[str] | None = None,
    short: bool = False,
) -> list[dict[str, Any]]:
    """Made problems of the train split with worked answers, as rows for supervised fine-tuning."""
    prompt = "" if short and system_prompt == SYSTEM_PROMPT else system_prompt
    problems = build_problems(num_examples, split="train", seed=seed, difficulty=difficulty, templates=templates)
    return [
        {
            "prompt": _write_prompt(row, prompt, short),
            "completion": [{"role": "assistant", "content": build_completion(row["rationale"], row["correct"])}],
        }
        for entry in problems
        if (row := read_row(entry))
    ]


def _choose_source(
    data_dir: str | None, cache_dir: str | None, make: Read, asked_for_made: bool, splits: list[str]
) -> tuple[str, Read]:
    """Where rows come from, and what reads the rows of a split; -1: all of them."""
    if asked_for_made and (data_dir or cache_dir):
        raise ValueError("data_dir and cache_dir read AQuA-RAT, difficulty and templates make problems: choose one")
    if asked_for_made:
        return "made", make
    if cache_dir and not data_dir:
        return "hub", lambda split, count: _without_broken(split, *read_hub(split, cache_dir))
    folder = find_data_dir(data_dir, splits)
    if folder is not None:
        return str(folder), lambda split, count: _without_broken(split, *read_file(find_file(folder, split)))
    log.warning(
        "no AQuA-RAT files found of %s, so problems are made on the spot: data_dir= names a folder with the files, "
        "cache_dir= fetches them from the hub",
        " and ".join(dict.fromkeys(splits)),
    )
    return "made", make


def _make(split: str, count: int, **choice: Any) -> list[dict[str, Any]]:
    split = find_published(split)
    number = count if count >= 0 else NUM_MADE.get(split, NUM_MADE["validation"])
    return [row for entry in build_problems(number, split=split, **choice) if (row := read_row(entry))]


def _without_broken(split: str, rows: list[dict[str, Any]], num_broken: int) -> list[dict[str, Any]]:
    if num_broken:
        log.warning("%s: left out %d rows without a question, options A to E or a right letter", split, num_broken)
    return rows


def _find_explicit(text: str) -> str | None:
    """The letter of the last answer line; None without one, and when that line names a second letter."""
    lines = list(EXPLICIT.finditer(text))
    return lines[-1]["letter"] if lines and not re.search(r"\b[A-E]\b", lines[-1]["rest"]) else None


def _text_of(parser: vf.Parser, completion: list[dict[str, Any]]) -> str:
    """The model's last message without its thoughts."""
    said = [message["content"] or "" for message in completion if message["role"] == "assistant"]
    return str(said[-1]).rpartition("</think>")[2] if said else ""


def _write_prompt(row: dict[str, Any], system_prompt: str | None, short: bool) -> list[dict[str, str]]:
    """The messages of a problem. A letter follows its text without a space: small models bind it better so."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    if "messages" in row:
        return [*(system if row["messages"][0]["role"] != "system" else []), *row["messages"]]
    options = "\n".join(f"{text}={letter}" for letter, text in row["options"].items())
    ending = "" if short else "\n\nEnd with the line 'Answer: X', where X is the letter of your option."
    return [*system, {"role": "user", "content": f"{row['question']}\n{options}{ending}"}]


def _to_dataset(rows: list[dict[str, Any]], system_prompt: str | None, short: bool, with_rationale: bool) -> Dataset:
    metadata = [
        {
            "question": row["question"],
            "options": [f"{letter}){text}" for letter, text in row["options"].items()],
            "source": row["source"],
            **({"rationale": row["rationale"]} if with_rationale else {}),
        }
        for row in rows
    ]
    return Dataset.from_dict(
        {
            "prompt": [_write_prompt(row, system_prompt, short) for row in rows],
            "answer": [row["correct"] for row in rows],
            "metadata": metadata,
            # What reward functions are given; text, since the keys of an object would be mixed between rows.
            "info": [
                json.dumps({**known, "letters": list(row["options"])})
                for known, row in zip(metadata, rows, strict=True)
            ],
            "example_id": list(range(len(rows))),
            "task": ["nanochatAquaRat"] * len(rows),
        }
    )
