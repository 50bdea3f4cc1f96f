"""Synthetic problems in AQuA-RAT form: exact arithmetic, five distinct options, verifiable solutions."""

from __future__ import annotations

import ast
import hashlib
import itertools
import math
import operator
import random
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

LETTERS = "ABCDE"
SPLITS = ("train", "validation", "test")
HELD_OUT_SHARE = 8  # one problem in eight belongs to validation and one to test, whatever the seed
MAX_MISSES = 2000  # draws without a new problem after which a choice of families counts as used up
MAX_REDRAWS = 100  # draws until the conditions of a family hold
MAX_SLIP_LENGTH = 9  # characters; a longer number would give itself away as somebody's slip
NAMES = "Ada Bruno Chidi Dora Emil Fatima Goro Hilde Imani Jonas Keiko Lara Mateo Nina Oskar Priya".split()
THINGS = "apples marbles stickers pencils shells stamps buttons cards".split()

Numbers = dict[str, Fraction]
Formula = Callable[[Numbers], Any]


@dataclass(frozen=True)
class Family:
    """A kind of problem, as families.toml tells it."""

    name: str
    tier: int
    draw: Mapping[str, range | Formula]
    where: tuple[Formula, ...]
    ask: tuple[str, ...]
    steps: tuple[tuple[str, str, Formula], ...]
    """The solution: name of a number, how it is written, what it comes to."""
    answer: str
    slips: tuple[Formula, ...]
    unit: str


def build_problems(
    num_problems: int,
    *,
    split: str,
    seed: int,
    difficulty: int | None = None,
    templates: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Different made problems of one split, a pure function of the arguments: question, options, rationale, correct.

    They are of all families, of those up to a tier (`difficulty`), or of those named by `templates`. The numbers of a
    problem decide its split, so no two splits share one, in other words or not. Of every five in a row each letter is
    right once. Raises `ValueError` for an unknown family, and where there are fewer different problems than asked for.
    """
    if split not in SPLITS:
        raise ValueError(f"made problems have the splits {', '.join(SPLITS)}, not {split!r}")
    families = choose_families(difficulty, templates)
    draw = random.Random(f"{split}-{seed}")
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    letters: list[str] = []
    misses = 0
    while len(rows) < num_problems:
        family = draw.choice(families)
        numbers = _draw_numbers(family, draw)
        key = numbers and _key(family, numbers)
        if not key or key in seen or _split_of(key) != split:
            misses += 1
            if misses > MAX_MISSES:
                names = ", ".join(family.name for family in families)
                raise ValueError(f"{names}: found only {len(rows)} different problems for {split}, not {num_problems}")
            continue
        misses = 0
        seen.add(key)
        letters = letters or draw.sample(LETTERS, len(LETTERS))
        rows.append(_write_problem(family, numbers, letters.pop(), draw))
    return rows


def choose_families(difficulty: int | None = None, templates: Sequence[str] | None = None) -> list[Family]:
    """The families up to a tier, those that are named, or all; raises `ValueError` for what there is not."""
    known = read_families()
    unknown = sorted(set(templates or []) - set(known))
    if unknown:
        raise ValueError(f"templates has no {', '.join(unknown)}; there are {', '.join(known)}")
    top = max(family.tier for family in known.values())
    if difficulty is not None and not 0 <= difficulty <= top:
        raise ValueError(f"difficulty {difficulty}: need a tier from 0 (look it up) to {top} (everything)")
    named = [known[name] for name in templates] if templates else list(known.values())
    chosen = [family for family in named if difficulty is None or family.tier <= difficulty]
    if not chosen:
        raise ValueError(f"no family of {', '.join(templates or [])} is of tier {difficulty} or easier")
    return chosen


@cache
def read_families() -> dict[str, Family]:
    """All families by name."""
    table = tomllib.loads((Path(__file__).parent / "families.toml").read_text())
    return {name: _read_family(name, entry) for name, entry in table.items()}


def format_number(value: Fraction) -> str:
    """Exact text of a number: 12, 0.375, or 1/3 where no decimal says it."""
    if value.denominator == 1:
        return str(value.numerator)
    for digits in range(1, 7):
        if (value * 10**digits).denominator == 1:
            sign, scaled = "-" if value < 0 else "", f"{abs(int(value * 10**digits)):0{digits + 1}d}"
            return f"{sign}{scaled[:-digits]}.{scaled[-digits:]}"
    return f"{value.numerator}/{value.denominator}"


def compile_formula(text: str) -> Formula:
    """A formula of numbers, names, + - * / // % ** and a few functions as a function of the names' values."""
    return _compile(ast.parse(text, mode="eval").body)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "max": max,
    "min": min,
    "abs": abs,
    "gcd": lambda a, b: Fraction(math.gcd(int(a), int(b))),
    "lcm": lambda a, b: Fraction(math.lcm(int(a), int(b))),
    "comb": lambda n, k: Fraction(math.comb(int(n), int(k))),
    "perm": lambda n, k: Fraction(math.perm(int(n), int(k))),
}
OPERATIONS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def _compile(node: ast.AST) -> Formula:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        value = Fraction(str(node.value))
        return lambda numbers: value
    if isinstance(node, ast.Name):
        name = node.id
        return lambda numbers: numbers[name]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _compile(node.operand)
        return lambda numbers: -inner(numbers)
    if isinstance(node, ast.BoolOp):
        parts, join = [_compile(value) for value in node.values], all if isinstance(node.op, ast.And) else any
        return lambda numbers: join(part(numbers) for part in parts)
    if isinstance(node, ast.BinOp) or (isinstance(node, ast.Compare) and len(node.ops) == 1):
        binary = isinstance(node, ast.BinOp)
        operation = OPERATIONS[type(node.op if binary else node.ops[0])]
        left, right = _compile(node.left), _compile(node.right if binary else node.comparators[0])
        return lambda numbers: operation(left(numbers), right(numbers))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS:
        function, arguments = FUNCTIONS[node.func.id], [_compile(argument) for argument in node.args]
        return lambda numbers: function(*(argument(numbers) for argument in arguments))
    raise ValueError(f"a formula cannot contain {ast.unparse(node)!r}")


def _read_family(name: str, entry: Mapping[str, Any]) -> Family:
    def source(drawn: Any) -> range | Formula:
        if isinstance(drawn, str):
            return compile_formula(drawn)
        least, largest, step = (*drawn, 1)[:3]
        return range(least, largest + 1, step)

    steps = [step.split(" = ", 1) for step in entry.get("steps", [])]
    return Family(
        name=name,
        tier=entry["tier"],
        draw={key: source(drawn) for key, drawn in entry["draw"].items()},
        where=tuple(compile_formula(text) for text in entry.get("where", [])),
        ask=tuple(entry["ask"]),
        steps=tuple((key, text, compile_formula(text)) for key, text in steps),
        answer=entry.get("answer") or steps[-1][0],
        slips=tuple(compile_formula(text) for text in entry["slips"]),
        unit=entry.get("unit", "{}"),
    )


def _draw_numbers(family: Family, draw: random.Random) -> Numbers:
    """What a problem is about, or nothing where its conditions did not come to hold."""
    for _ in range(MAX_REDRAWS):
        numbers: Numbers = {}
        for name, source in family.draw.items():
            numbers[name] = Fraction(draw.choice(source)) if isinstance(source, range) else source(numbers)
        if all(holds(numbers) for holds in family.where):
            return numbers
    return {}


def _key(family: Family, numbers: Numbers) -> str:
    return f"{family.name} {' '.join(map(str, numbers.values()))}"


def _split_of(key: str) -> str:
    digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
    return {0: "validation", 1: "test"}.get(int.from_bytes(digest, "little") % HELD_OUT_SHARE, "train")


def _write_problem(family: Family, numbers: Numbers, correct: str, draw: random.Random) -> dict[str, Any]:
    texts = {name: format_number(value) for name, value in numbers.items()}
    who, other = draw.sample(NAMES, 2)
    question = draw.choice(family.ask).format(who=who, other=other, thing=draw.choice(THINGS), **texts)
    known, lines = dict(numbers), []
    for name, text, formula in family.steps:
        lines.append(f"{_insert(text, known)} = {format_number(formula(known))}")
        known[name] = formula(known)
    answer = known[family.answer]
    values = _draw_distractors(family, known, answer, draw)
    values.insert(LETTERS.index(correct), answer)
    options = [
        f"{letter})" + family.unit.format(format_number(value)) for letter, value in zip(LETTERS, values, strict=True)
    ]
    rationale = "\n".join([*lines, f"Answer: {correct}"])
    return {
        "question": question,
        "options": options,
        "rationale": rationale,
        "correct": correct,
        "template": family.name,
        "tier": family.tier,
    }


def _insert(text: str, numbers: Numbers) -> str:
    """A formula with numbers for its names, as people write it."""

    def number(match: re.Match[str]) -> str:
        value = format_number(numbers[match[0]])
        return f"({value})" if "/" in value or value.startswith("-") else value

    return re.sub(r"\b[a-z]\b(?!\()", number, text).replace("**", "^")


def _draw_distractors(family: Family, numbers: Numbers, answer: Fraction, draw: random.Random) -> list[Fraction]:
    """Four other values: what slips come to, then values near the answer."""
    slips = [slip(numbers) for slip in family.slips]
    draw.shuffle(slips)
    found: list[Fraction] = []
    broken = "/" in format_number(answer)
    for value in itertools.chain(slips, _values_near(answer, draw)):
        text = format_number(value)
        odd = len(text) > MAX_SLIP_LENGTH or ("/" in text and not broken) or (value < 0 <= answer)
        if not odd and value != answer and value not in found:
            found.append(value)
        if len(found) == len(LETTERS) - 1:
            return found
    raise AssertionError("values near a number do not end")


def _values_near(answer: Fraction, draw: random.Random) -> Iterator[Fraction]:
    """Ever farther values of the same kind; without an end."""
    unit = Fraction(1, answer.denominator) if answer.denominator > 1 else Fraction(max(1, 10 ** (len(str(answer)) - 2)))
    radius = 5
    while True:
        yield answer + unit * draw.choice((-1, 1)) * draw.randint(1, radius)
        radius += 1
