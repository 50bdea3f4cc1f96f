"""Grade-school word problems with numeric answers: synthetic, or the GSM8K files."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import verifiers as vf
from datasets import Dataset, load_dataset

SYSTEM_PROMPT = "Solve the problem step by step, then write the final answer as a number inside \\boxed{}."
EVAL_SHARE = 8  # one made problem in eight belongs to the eval split, whatever the seed
MAX_ANSWER_LENGTH = 100  # characters; a number is shorter
NAMES = "Ada Bruno Chidi Dora Emil Fatima Goro Hilde Imani Jonas Keiko Lara Mateo Nina Oskar Priya".split()
THINGS = "apples marbles stickers pencils shells stamps buttons cards".split()


def load_environment(
    system_prompt: str | None = SYSTEM_PROMPT,
    num_train_examples: int = -1,
    num_eval_examples: int = -1,
    dataset_name: str | None = None,
    data_dir: str | None = None,
    seed: int = 0,
) -> vf.Environment:
    """One turn: a word problem; reward 1 when the number in the last \\boxed{} is right.

    Problems are made on the spot (2000 to train, 200 to evaluate unless numbers are given); `data_dir` names a folder
    with the files train.jsonl and test.jsonl, `dataset_name` a hub dataset such as openai/gsm8k, of which -1 takes all.
    """
    if dataset_name is not None and data_dir is not None:
        raise ValueError("dataset_name and data_dir both say where problems come from: give one of them")
    if dataset_name is None and data_dir is None:
        train = build_problems(2000 if num_train_examples < 0 else num_train_examples, split="train", seed=seed)
        held_out = build_problems(200 if num_eval_examples < 0 else num_eval_examples, split="eval", seed=seed)
    else:
        train = _read_problems(dataset_name, data_dir, "train", num_train_examples)
        held_out = _read_problems(dataset_name, data_dir, "test", num_eval_examples)
    parser = vf.MaybeThinkParser(extract_fn=extract_boxed)
    return vf.SingleTurnEnv(
        dataset=_to_dataset(train, system_prompt),
        eval_dataset=_to_dataset(held_out, system_prompt),
        parser=parser,
        rubric=vf.Rubric(funcs=[correct_answer], parser=parser),
        env_id="gsm8k",
    )


def correct_answer(parser: vf.Parser, completion: list[dict[str, Any]], answer: str) -> float:
    """1 when the number in the box is the right one, however it is written."""
    found = parse_number(parser.parse_answer(completion) or "")
    return float(found is not None and found == parse_number(answer))


def extract_boxed(text: str) -> str:
    """Content of the last \\boxed{...} whose braces close, or ""."""
    opened: list[int] = []
    last = (-1, "")
    for brace in re.finditer(r"[{}]", text):
        i = brace.start()
        if text[i] == "{":
            opened.append(i)
        elif opened and text.endswith("\\boxed", 0, start := opened.pop()):
            last = max(last, (start, text[start + 1 : i].strip()))
    return last[1]


def parse_number(text: str) -> Fraction | None:
    """The one number a text consists of, exactly, or None.

    Around it may stand a currency sign, a percent sign, an equals sign before it, stars, styles of LaTeX, or words,
    also in parentheses; thousands may be separated by commas; \\frac{a}{b} and a/b are fractions. Two numbers are none.
    """
    if len(text) > MAX_ANSWER_LENGTH:
        return None
    text = re.sub(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/\2", text.replace("−", "-"))
    text = re.sub(r"\\[dt]?frac\s*(\d)\s*(\d)", r"\1/\2", re.sub(r"^\s*(\*{1,3})(.*?)\1\s*$", r"\2", text))
    text = re.sub(r"\\[$%!,;: ]|\\(?:text|textbf|mathrm|mathbf|mbox|displaystyle)\b|[{}$~]", "", text)
    text = re.sub(r"^\s*(?:[A-Za-z]\s*)?=|\s\([A-Za-z ]+\)\s*$", "", re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text))
    text = re.sub(r"^\s*-\s+(?=[\d.])", "-", text)
    numbers = re.findall(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:\s*/\s*\d+)?", text)
    if len(numbers) != 1 or re.search(r"[=^*_<>()\\]|\d\s*!|[A-Za-z]\s*\+|\b[A-Za-z]\s*-", text):
        return None  # several numbers, or something to be worked out
    over, _, under = numbers[0].replace(" ", "").partition("/")
    return None if under and int(under) == 0 else Fraction(over) / int(under or 1)


def build_problems(num_problems: int, *, split: str, seed: int) -> list[tuple[str, str]]:
    """Different made problems of one split with their answers, a pure function of the arguments.

    A hash of the text decides the split, so none of "train" is ever one of "eval".
    """
    draw = random.Random(f"{split}-{seed}")
    problems: dict[str, str] = {}
    while len(problems) < num_problems:
        question, answer = draw.choice(KINDS)(draw)
        if answer > 0 and _split_of(question) == split:
            problems[question] = str(answer)
    return list(problems.items())


def build_sft_examples(num_examples: int, system_prompt: str | None = SYSTEM_PROMPT, seed: int = 0) -> list[dict]:
    """Made problems of the train split with a boxed answer, as rows for supervised fine-tuning."""
    return [
        {
            "prompt": _prompt(question, system_prompt),
            "completion": [{"role": "assistant", "content": f"\\boxed{{{answer}}}"}],
        }
        for question, answer in build_problems(num_examples, split="train", seed=seed)
    ]


def _shopping(draw: random.Random) -> tuple[str, int]:
    name, thing = draw.choice(NAMES), draw.choice(THINGS)
    packs, price, each = draw.randint(2, 9), draw.randint(2, 12), draw.randint(3, 12)
    kept = draw.randint(1, packs * each - 1)
    return (
        f"{name} buys {packs} packs of {thing} for ${price} each. A pack holds {each} {thing}. {name} keeps {kept} of "
        f"them and sells the others for $2 apiece. How many dollars does {name} earn beyond what the packs cost?",
        2 * (packs * each - kept) - packs * price,
    )


def _sharing(draw: random.Random) -> tuple[str, int]:
    first, second, thing = *draw.sample(NAMES, 2), draw.choice(THINGS)
    share, friends, rest = draw.randint(2, 15), draw.randint(2, 8), draw.randint(0, 9)
    return (
        f"{first} has {share * friends + rest} {thing} and gives {friends} friends {share} each. {second} then brings "
        f"twice as many {thing} as {first} has left, and both put theirs together. How many {thing} are there now?",
        3 * rest,
    )


def _travelling(draw: random.Random) -> tuple[str, int]:
    name, hours, speed = draw.choice(NAMES), draw.randint(2, 6), draw.randint(3, 20) * 2
    slower, more = draw.randint(1, speed - 1), draw.randint(1, 5)
    return (
        f"{name} cycles {hours} hours at {speed} km an hour. After a break the speed drops by {slower} km an hour, "
        f"and {name} goes on for {more} more hours. How many kilometres does {name} cycle in all?",
        hours * speed + more * (speed - slower),
    )


def _growing(draw: random.Random) -> tuple[str, int]:
    name, trees, years, percent = draw.choice(NAMES), draw.randint(2, 20), draw.randint(2, 9), draw.choice((10, 20, 50))
    first = draw.randint(1, 9) * 10
    return (
        f"{name} has {trees} pear trees. Each bears {first} pears in its first year, and every year after that "
        f"{percent}% of this number more than in the year before. How many pears do all trees bear in year {years}?",
        trees * (first + (years - 1) * first * percent // 100),
    )


KINDS: tuple[Callable[[random.Random], tuple[str, int]], ...] = (_shopping, _sharing, _travelling, _growing)


def _split_of(text: str) -> str:
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return "eval" if int.from_bytes(digest, "little") % EVAL_SHARE == 0 else "train"


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON lines file; `ValueError` names a line that is no JSON."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not valid JSON: {error}") from error
    return rows


def _read_problems(name: str | None, folder: str | None, split: str, count: int) -> list[tuple[str, str]]:
    """Questions with the text behind #### in their answers."""
    if folder is not None:
        path = Path(folder).expanduser() / f"{split}.jsonl"
        if not path.is_file():
            raise ValueError(
                f"data_dir {folder}: it has no file {path.name}; it should hold train.jsonl and test.jsonl"
            )
        rows = _read_lines(path)
    else:
        rows = list(load_dataset(name, "main", split=split))
    problems = []
    for number, row in enumerate(itertools.islice(rows, None if count < 0 else count), 1):
        _, mark, answer = str(row.get("answer", "")).rpartition("####")
        if not mark or not row.get("question") or parse_number(answer.strip()) is None:
            raise ValueError(
                f"{folder or name}, {split} row {number}: need a question, and an answer with '#### number'"
            )
        problems.append((str(row["question"]), answer.strip()))
    return problems


def _prompt(question: str, system_prompt: str | None) -> list[dict[str, str]]:
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": question}]


def _to_dataset(problems: list[tuple[str, str]], system_prompt: str | None) -> Dataset:
    return Dataset.from_dict(
        {
            "prompt": [_prompt(question, system_prompt) for question, _ in problems],
            "answer": [answer for _, answer in problems],
            "example_id": list(range(len(problems))),
            "task": ["gsm8k"] * len(problems),
        }
    )
