"""Math problems with boxed answers, checked for mathematical equivalence: synthetic, or from a dataset."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import verifiers as vf
from datasets import Dataset, load_dataset

sys.path.insert(0, str(Path(__file__).parent))  # the sibling module, also where this file is loaded by its path
from hendrycks_math_checker import MathChecker, Verdict

INSTRUCTION = "Solve this mathematics problem. Explain each step, and put the final answer inside \\boxed{}.\n\n"
EVAL_SHARE = 8  # one made problem in eight belongs to the eval split, whatever the seed
MAX_ANSWER_LENGTH = 500  # characters; longer ones are wrong unread
MAX_NESTING = 20  # brackets inside brackets; deeper ones are too


def load_environment(
    dataset_name: str | None = None,
    dataset_subset: str = "default",
    dataset_split: str = "train",
    dataset_shuffle: bool = False,
    question_key: str = "question",
    answer_key: str = "answer",
    info_key: str = "info",
    difficulty_key: str | None = None,
    min_avg_reward: float = 0.0,
    max_avg_reward: float = 1.0,
    instruction_prompt: str = INSTRUCTION,
    system_prompt: str | None = None,
    math_verify_max_workers: int = 4,
    math_verify_timeout: float = 5.0,
    num_train_examples: int = -1,
    num_eval_examples: int = -1,
    seed: int = 0,
) -> vf.Environment:
    """One turn: a problem; reward 1 when the last \\boxed{} of the reply means the same as the answer.

    Problems are made on the spot (2000 unless a number is given), or read from `dataset_name`: a hub dataset such as
    PrimeIntellect/Hendrycks-Math, or a JSON lines file, with the columns `question_key` and `answer_key`. The last
    `num_eval_examples` rows are held out, but never all; by default 200, at most half. With `difficulty_key`, a column
    with the average reward of some model, rows outside `min_avg_reward` to `max_avg_reward` are left out.
    `math_verify_timeout` is in seconds.
    """
    if dataset_name is None:
        train = build_problems(2000 if num_train_examples < 0 else num_train_examples, split="train", seed=seed)
        held_out = build_problems(200 if num_eval_examples < 0 else num_eval_examples, split="eval", seed=seed)
    else:
        rows = _read_rows(dataset_name, dataset_subset, dataset_split)
        if difficulty_key is not None:
            rows = [row for row in rows if min_avg_reward <= _column(row, difficulty_key) <= max_avg_reward]
        problems = [(str(_column(row, question_key)), str(_column(row, answer_key)), row.get(info_key)) for row in rows]
        if dataset_shuffle:
            random.Random(seed).shuffle(problems)
        if not problems:
            raise ValueError(f"dataset_name {dataset_name}: it has no rows to train on")
        is_default, count = num_eval_examples < 0, len(problems)
        cut = count - (min(200, count // 2) if is_default else min(num_eval_examples, count - 1))
        train, held_out = problems[:cut], problems[cut:]
        train = train if num_train_examples < 0 else train[:num_train_examples]
    parser = vf.Parser(extract_fn=extract_answer)
    rubric = vf.Rubric(funcs=[correct_answer, timed_out], weights=[1.0, 0.0], parser=parser)
    rubric.class_objects["checker"] = MathChecker(math_verify_max_workers, math_verify_timeout)
    return vf.SingleTurnEnv(
        dataset=_to_dataset(train, instruction_prompt, system_prompt),
        eval_dataset=_to_dataset(held_out, instruction_prompt, system_prompt),
        parser=parser,
        rubric=rubric,
        env_id="hendrycks-math",
    )


async def correct_answer(
    parser: vf.Parser, completion: list[dict[str, Any]], answer: str, state: vf.State, checker: MathChecker
) -> float:
    """1 when the boxed answer means the same as the right one."""
    given = parser.parse_answer(completion) or ""
    state["check_timed_out"] = False
    if not given or len(given) > MAX_ANSWER_LENGTH or compute_nesting(given) > MAX_NESTING:
        return 0.0
    if "".join(given.split()) == "".join(answer.split()):
        return 1.0
    verdict = await checker.check(answer, given.rstrip("."))
    state["check_timed_out"] = verdict is Verdict.TIMED_OUT
    return float(verdict is Verdict.RIGHT)


def timed_out(state: vf.State) -> float:
    """1 when the answer could not be checked in time; it then counts as wrong."""
    return float(state.get("check_timed_out", False))


def extract_answer(text: str) -> str:
    """The last box behind a finished <think> section; "" while the section is open."""
    before, closed, after = text.rpartition("</think>")
    return "" if "<think>" in (after if closed else text) else extract_boxed(after if closed else before + after)


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


def compute_nesting(text: str) -> int:
    """How many brackets are open at once at most."""
    steps = ((c in "([{") - (c in ")]}") for c in text)
    return max(itertools.accumulate(steps, initial=0))


def build_problems(num_problems: int, *, split: str, seed: int) -> list[tuple[str, str, None]]:
    """Different made problems of one split, (question, LaTeX answer, no info), a pure function of the arguments.

    A hash of the text decides the split, so none of "train" is ever one of "eval".
    """
    draw = random.Random(f"{split}-{seed}")
    problems: dict[str, str] = {}
    while len(problems) < num_problems:
        question, answer = draw.choice(KINDS)(draw)
        if _split_of(question) == split:
            problems[question] = answer
    return [(question, answer, None) for question, answer in problems.items()]


def build_sft_examples(num_examples: int, instruction_prompt: str = INSTRUCTION, seed: int = 0) -> list[dict]:
    """Made problems of the train split with a boxed answer, as rows for supervised fine-tuning."""
    return [
        {
            "prompt": [{"role": "user", "content": instruction_prompt + question}],
            "completion": [{"role": "assistant", "content": f"\\boxed{{{answer}}}"}],
        }
        for question, answer, _ in build_problems(num_examples, split="train", seed=seed)
    ]


def _add_fractions(draw: random.Random) -> tuple[str, str]:
    first, second = (Fraction(draw.randint(1, 30), draw.randint(2, 15)) for _ in range(2))
    total = first + second
    return (
        f"Written in lowest terms, ${_latex(first)} + {_latex(second)} = \\frac{{a}}{{b}}$. What is $a + b$?",
        str(total.numerator + total.denominator),
    )


def _solve_linear(draw: random.Random) -> tuple[str, str]:
    factor, shift, right = draw.randint(2, 15), draw.randint(1, 40), draw.randint(-60, 60)
    return f"Solve ${factor}x + {shift} = {right}$ for $x$.", _latex(Fraction(right - shift, factor))


def _solve_quadratic(draw: random.Random) -> tuple[str, str]:
    low, high = sorted(draw.sample(range(-12, 13), 2))
    return (
        f"Find all roots of $x^2 {_signed(-low - high)}x {_signed(low * high)}$, from the smallest to the largest, "
        "separated by a comma.",
        f"{low}, {high}",
    )


def _simplify_root(draw: random.Random) -> tuple[str, str]:
    outside, inside = draw.randint(2, 15), draw.choice((2, 3, 5, 6, 7, 10, 11, 13))
    return f"For which $k$ is $k\\sqrt{{{inside}}} = \\sqrt{{{outside**2 * inside}}}$?", str(outside)


def _expand(draw: random.Random) -> tuple[str, str]:
    a, b, c = draw.randint(2, 9), draw.randint(1, 12), draw.randint(1, 12)
    return f"Which factor stands before $x$ when $({a}x + {b})(x - {c})$ is multiplied out?", str(b - a * c)


KINDS: tuple[Callable[[random.Random], tuple[str, str]], ...] = (
    _add_fractions,
    _solve_linear,
    _solve_quadratic,
    _simplify_root,
    _expand,
)


def _signed(value: int) -> str:
    return f"{'-' if value < 0 else '+'} {abs(value)}"


def _latex(value: Fraction) -> str:
    sign = "-" if value < 0 else ""
    if value.denominator == 1:
        return str(value.numerator)
    return f"{sign}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


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


def _read_rows(name: str, subset: str, split: str) -> list[dict[str, Any]]:
    if (path := Path(name).expanduser()).is_file():
        return _read_lines(path)
    return list(load_dataset(name, subset, split=split))


def _column(row: dict[str, Any], key: str) -> Any:
    if row.get(key) is None:
        raise ValueError(f"a row has no column {key!r}, only {', '.join(row)}: set question_key, answer_key or so")
    return row[key]


def _to_dataset(problems: list[tuple[str, str, Any]], instruction: str, system_prompt: str | None) -> Dataset:
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    infos = [info if isinstance(info, str) else json.dumps(info or {}) for _, _, info in problems]
    return Dataset.from_dict(
        {
            "prompt": [[*system, {"role": "user", "content": instruction + question}] for question, _, _ in problems],
            "answer": [answer for _, answer, _ in problems],
            "info": infos,
            "example_id": list(range(len(problems))),
            "task": ["hendrycks-math"] * len(problems),
        }
    )
