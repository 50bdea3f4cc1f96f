"""The nanochatAquaRat environment: problem families against independent solvers, answer parsing, and data files."""

from __future__ import annotations

import inspect
import itertools
import json
import math
import os
import random
import re
import sys
import time
from collections import Counter
from fractions import Fraction as F
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_client import play
from scripts.prepare_aqua import PrepareAquaConfig, prepare
from scripts.tiny_bootstrap import TinyBootstrapConfig, build_conversations

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "environments" / "nanochatAquaRat"))

import aqua_problems  # noqa: E402
import nanochatAquaRat  # noqa: E402

from prime_rl.utils.pydantic_config import parse_argv  # noqa: E402
from rollouts.training.environments import load_environment  # noqa: E402

DATA = Path(os.environ.get("PRIME_TEST_DATA", "/nowhere")) / "aqua"  # the original files
FAMILIES = aqua_problems.read_families()


@pytest.fixture(autouse=True)
def no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    for name in ("NANOCHAT_AQUA_DIR", "AQUA_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)


# families -----------------------------------------------------------------------------------------------------------


def search(condition: Any, upper: int = 20_000) -> int:
    return next(x for x in range(upper) if condition(x))


# Every family once more, solved in another way: by search, by counting, by simulation, or from the hidden number.
ORACLES: dict[str, Any] = {
    "find": lambda n, **_: n,
    "largest": lambda a, b, c, d, e, **_: sorted((a, b, c, d, e))[-1],
    "smallest": lambda a, b, c, d, e, **_: sorted((a, b, c, d, e))[0],
    "last": lambda e, **_: e,
    "sum": lambda a, b: len([*range(int(a)), *range(int(b))]),
    "difference": lambda s, **_: s,
    "product": lambda a, b: sum(b for _ in range(int(a))),
    "quotient": lambda q, **_: q,
    "next_number": lambda a, d, **_: a + 3 * d,
    "half": lambda h, **_: h,
    "linear": lambda a, b, c, **_: search(lambda x: a * x + b == c),
    "change": lambda k, **_: k,
    "percent_of": lambda r, n: F(r, 100) * n,
    "discount": lambda p, r: p * F(100 - r, 100),
    "average": lambda a, b, c: search(lambda m: (a - m) + (b - m) + (c - m) == 0),
    "perimeter": lambda a, b: a + b + a + b,
    "triangle": lambda b, h: F(b, 2) * h,
    "distance": lambda v, h, m: F(v, 60) * (60 * h + m),
    "proportion": lambda u, k, **_: u * k,
    "speed_units": lambda v, s: F(v * 1000 * s, 3600),
    "remainder": lambda r, **_: r,
    "consecutive": lambda s, **_: search(lambda x: x + x + 1 + x + 2 == s),
    "sum_and_difference": lambda x, **_: x,
    "ratio_split": lambda a, b, n, **_: search(lambda x: x * b == (n - x) * a),
    "partnership": lambda a, b, m, p, **_: F(p * a * 12, a * 12 + b * m),
    "percent_change": lambda r, **_: r,
    "successive_percent": lambda p, q, n: n * F(100 + p, 100) * F(100 - q, 100),
    "markup": lambda c, **_: c,
    "simple_interest": lambda p, r, t: sum(F(p * r, 100) for _ in range(int(t))),
    "compound_interest": lambda p, r: p + F(p * r, 100) + F((p + F(p * r, 100)) * r, 100),
    "round_trip": lambda a, b: 2 / (1 / F(a) + 1 / F(b)),
    "train_passes_pole": lambda v, t: F(v * 1000, 3600) * t,
    "train_passes_platform": lambda p, **_: p,
    "boat": lambda t, **_: t,
    "work_together": lambda a, b: 1 / (F(1, int(a)) + F(1, int(b))),
    "two_pipes": lambda a, b: 1 / (F(1, int(a)) - F(1, int(b))),
    "mixture": lambda p, q, a, b: F(a, a + b) * p + F(b, a + b) * q,
    "average_missing": lambda x, **_: x,
    "average_replaced": lambda n, g, w, **_: search(lambda y: n * g == y - w),
    "ages": lambda f, **_: f,
    "arithmetic_sum": lambda a, d, n, **_: sum(a + i * d for i in range(int(n))),
    "geometric_term": lambda a, r, n, **_: list(itertools.accumulate([a] + [r] * int(n - 1), lambda x, y: x * y))[-1],
    "bells": lambda a, b, **_: search(lambda x: x > 0 and x % a == 0 and x % b == 0),
    "ropes": lambda a, b, **_: max(x for x in range(1, int(a) + 1) if a % x == 0 and b % x == 0),
    "box": lambda a, b, c: sum(a * b for _ in range(int(c))),
    "committee": lambda n, k, m: len(list(itertools.combinations(range(int(n)), int(k)))) * m,
    "arrangements": lambda n, k, m: len(list(itertools.permutations(range(int(n)), int(k)))) * m,
    "urn": lambda r, b, g: F(r, r + b + g),
    "at_least": lambda a, b, c: search(lambda x: a * x + b > c),
}


def number_in(text: str) -> F:
    return F(re.search(r"-?\d+(?:\.\d+)?(?:/\d+)?", text)[0])  # type: ignore[index]


def check_rationale(row: dict[str, Any]) -> None:
    """Every line but the last is an equation that holds; the last one names the letter."""
    *lines, last = row["rationale"].split("\n")
    assert last == f"Answer: {row['correct']}"
    for line in lines:
        left, right = line.split(" = ")
        formula = left.replace("^", "**")
        assert aqua_problems.compile_formula(formula)({}) == F(right), line
    if lines:
        assert F(lines[-1].split(" = ")[1]) == right_number(row)


def right_number(row: dict[str, Any]) -> F:
    return number_in(row["options"]["ABCDE".index(row["correct"])].partition(")")[2])


def test_there_are_enough_families_and_each_has_an_oracle() -> None:
    assert set(ORACLES) == set(FAMILIES) and sum(family.tier >= 2 for family in FAMILIES.values()) >= 24
    assert {family.tier for family in FAMILIES.values()} == {0, 1, 2, 3}
    assert all(len(set(family.ask)) >= 3 for family in FAMILIES.values())


@pytest.mark.parametrize("name", list(FAMILIES))
def test_every_family_is_exact(name: str) -> None:
    """Its steps use only numbers of its question, and agree with an independent solution."""
    family = FAMILIES[name]
    reported = [set(re.findall(r"\{(\w+)\}", wording)) for wording in family.ask]
    known: set[str] = set.intersection(*reported)
    for step, text, _ in family.steps:
        assert set(re.findall(r"\b[a-z]\b(?!\()", text)) <= known, text
        known.add(step)
    draw = random.Random(name)
    for _ in range(40):
        numbers = aqua_problems._draw_numbers(family, draw)
        if not numbers:
            continue
        row = aqua_problems._write_problem(family, numbers, draw.choice("ABCDE"), draw)
        check_rationale(row)
        whole = {key: int(value) if value.denominator == 1 else value for key, value in numbers.items()}
        assert right_number(row) == ORACLES[name](**whole), (row, numbers)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**9), difficulty=st.integers(0, 3), split=st.sampled_from(aqua_problems.SPLITS))
def test_options_differ_and_letters_are_balanced(seed: int, difficulty: int, split: str) -> None:
    rows = aqua_problems.build_problems(50, split=split, seed=seed, difficulty=difficulty)
    assert set(Counter(row["correct"] for row in rows).values()) == {10}
    assert max(row["tier"] for row in rows) <= difficulty
    for row in rows:
        texts = [option[2:] for option in row["options"]]
        assert [option[:2] for option in row["options"]] == ["A)", "B)", "C)", "D)", "E)"]
        assert len(set(texts)) == 5 and len({number_in(text) for text in texts}) == 5
        check_rationale(row)
    assert rows == aqua_problems.build_problems(50, split=split, seed=seed, difficulty=difficulty)


def test_splits_share_no_numbers_whatever_the_seed() -> None:
    def numbers(split: str, seed: int) -> set[tuple[str, ...]]:
        rows = aqua_problems.build_problems(400, split=split, seed=seed, templates=["sum", "product", "linear"])
        keys = [(row["template"], *re.findall(r"\d+", row["rationale"])) for row in rows]
        assert len(set(keys)) == len(keys)
        return set(keys)

    train, validation, test = numbers("train", 1), numbers("validation", 2), numbers("test", 3)
    assert not train & validation and not train & test and not validation & test


def test_a_choice_that_is_used_up_or_wrong_is_named() -> None:
    with pytest.raises(ValueError, match=r"half: found only \d+ different problems for test, not 5000"):
        aqua_problems.build_problems(5000, split="test", seed=0, templates=["half"])
    with pytest.raises(ValueError, match="templates has no halve; there are find, largest"):
        aqua_problems.choose_families(templates=["halve"])
    with pytest.raises(ValueError, match="difficulty 4"):
        aqua_problems.choose_families(4)
    with pytest.raises(ValueError, match="no family of linear is of tier 1"):
        aqua_problems.choose_families(1, ["linear"])
    with pytest.raises(ValueError, match="choose one"):
        nanochatAquaRat.load_environment(difficulty=1, data_dir="x")


@given(st.fractions(max_denominator=5000))
def test_numbers_are_written_exactly(value: F) -> None:
    assert F(aqua_problems.format_number(value)) == value


def test_formulas_are_arithmetic_and_nothing_else() -> None:
    assert aqua_problems.compile_formula("comb(a, 2) - -b // 3")({"a": F(5), "b": F(7)}) == 10 - math.floor(-7 / 3)
    for text in ("__import__('os')", "a.b", "[a]", "'x'", "a if a else b", "open('x')"):
        with pytest.raises(ValueError, match="a formula cannot contain"):
            aqua_problems.compile_formula(text)


# answers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("Answer: C", "C"), ("answer is C.", "C"), ("The answer is: **(C)**", "C"), ("**Answer:** C", "C"),
        ("**Answer: C**", "C"), ("Answer: \\boxed{C}", "C"), ("answer: $\\boxed{\\text{C}}$", "C"),
        ("ANSWER = [D]", "D"), ("Answer: C\nbecause 3 + 4 = 7", "C"), ("Answer: C\n\nso it is done", "C"),
        ("Answer: \\(C\\)", "C"), ("The answer is \\(\\boxed{C}\\)", "C"), ("answer: $\\boxed{\\textbf{C}}$", "C"),
        ("Answer: C) 42", "C"), ("Answer: C (42 km)", "C"), ("Answer: option D", "D"), ("Final answer - C", "C"),
        ("Answer:\nC", "C"), ("A", "A"), (" **E**. ", "E"), ("Answer: A\nno, Answer: B", "B"),
        ("A train travels for a day. Answer: D", "D"), ("Let x be a number\nAnswer: C", "C"),
        ("e = mc^2 Answer: B", "B"),
        ("a", None), ("(b)", None), ("answer: a", None), ("Answer: the", None), ("Answer: A train left", None),
        ("Answer: A, B, C", None), ("Answer: A or B", None), ("Answer: B\nAnswer: A, B", None), ("Answer C", None),
        ("Answer: AB", None), ("answers: C", None), ("The answer is not B", None), ("The answer is A's", None),
        ("", None), ("It is C", None), ("C because", None), ("Answer: X", None), ("Answer: F", None),
    ],
)  # fmt: skip
def test_answers_as_models_write_them(text: str, letter: str | None) -> None:
    assert nanochatAquaRat.extract_letter(text) == letter


def test_answer_parsing_time_is_linear() -> None:
    started = time.process_time()
    for text in ("answer:" + " " * 100_000, "answer: " + "(" * 100_000, "answer is " * 20_000, "Answer: A" * 20_000):
        nanochatAquaRat.extract_letter(text)
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("Answer: {right}", 1.1), ("{right}", 1.0), ("Answer: {wrong}", 0.1), ("{wrong}", 0.0), ("It is {right}", 0.0),
        ("Answer: {wrong}\nAnswer: {right}", 1.1), ("Answer: {right}\nAnswer: {wrong}", 0.1),
        ("Answer: A, B, C, D, E", 0.0), ("Answer: F", 0.0), ("<think>Answer: {wrong}</think>Answer: {right}", 1.1),
        ("<think>Answer: {right}</think>", 0.0), ("Answer: a", 0.0), ("a", 0.0),
    ],
)  # fmt: skip
def test_what_tricks_earn(reply: str, reward: float) -> None:
    env = load_environment("nanochatAquaRat", {"difficulty": 3, "num_train_examples": 10, "num_eval_examples": 0})
    other = dict(zip("ABCDE", "BCDEA", strict=True))
    rollouts = play(
        env, env.rows(), lambda row: lambda _: reply.format(right=row["answer"], wrong=other[row["answer"]])
    )
    assert {rollout.reward for rollout in rollouts} == {reward}


# rows ---------------------------------------------------------------------------------------------------------------


def test_arguments_are_those_of_the_document() -> None:
    documented = {
        "train_split": "train", "eval_split": "validation", "num_train_examples": -1, "num_eval_examples": -1,
        "seed": 42, "include_rationale_metadata": True, "data_dir": None, "cache_dir": None,
    }  # fmt: skip
    parameters = inspect.signature(nanochatAquaRat.load_environment).parameters
    assert isinstance(parameters["system_prompt"].default, str) and "tutor" in parameters["system_prompt"].default
    assert {name: parameters[name].default for name in documented} == documented
    assert list(parameters)[:9] == ["system_prompt", *documented]


def test_a_problem_as_the_model_sees_it() -> None:
    [row] = load_environment("nanochatAquaRat", {"templates": ["sum"], "num_train_examples": 1}).rows()
    system, user = row["prompt"]
    assert system["role"] == "system" and user["content"].count("Answer: X") == 1
    letters = re.findall(r"(?m)^(\d+)=([A-E])$", user["content"])
    assert [letter for _, letter in letters] == list("ABCDE")
    info = json.loads(row["info"])
    assert info["source"] == "synthetic" and info["rationale"].endswith(f"Answer: {row['answer']}")
    args = {"templates": ["sum"], "num_train_examples": 1, "short": True, "include_rationale_metadata": False}
    [short] = load_environment("nanochatAquaRat", args).rows()
    assert [m["role"] for m in short["prompt"]] == ["user"] and "Answer" not in short["prompt"][0]["content"]
    assert "rationale" not in json.loads(short["info"]) and "rationale" not in short["metadata"]


def test_sft_examples_earn_the_maximum() -> None:
    rows = nanochatAquaRat.build_sft_examples(20, difficulty=1, short=True)
    for row in rows:
        text = row["completion"][0]["content"]
        assert nanochatAquaRat.extract_letter(text) and len(row["prompt"]) == 1
    assert nanochatAquaRat.build_completion("So it is C", "C") == "So it is C\nAnswer: C"
    assert nanochatAquaRat.build_completion("x = 2\nANSWER : B", "B") == "x = 2\nANSWER : B"
    assert nanochatAquaRat.build_completion("Answer: A", "B") == "Answer: A\nAnswer: B"


def test_caps_seeds_and_splits(tmp_path: Path) -> None:
    rows = aqua_problems.build_problems(30, split="train", seed=0)
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "dev.json").write_text(json.dumps(rows[:7]))
    args = {"data_dir": str(tmp_path)}
    env = load_environment("nanochatAquaRat", args)
    assert (len(env.rows()), len(env.rows("eval"))) == (30, 7)
    assert repr(env.env) == f"nanochatAquaRat(30 problems to train, 7 to evaluate, source: {tmp_path})"
    questions = [json.loads(row["info"])["question"] for row in env.rows()]
    assert sorted(questions) == sorted(row["question"] for row in rows) != questions
    unshuffled = load_environment("nanochatAquaRat", {**args, "seed": None, "num_train_examples": 3})
    assert [json.loads(row["info"])["question"] for row in unshuffled.rows()] == [row["question"] for row in rows[:3]]
    no_eval = load_environment("nanochatAquaRat", {**args, "eval_split": None, "num_train_examples": None})
    assert len(no_eval.rows("eval")) == 30  # the training rows, as verifiers does
    with pytest.raises(ValueError, match=r"it has no test\.jsonl or test\.json"):
        load_environment("nanochatAquaRat", {**args, "eval_split": "test"})


def test_dev_is_the_validation_split_of_made_problems() -> None:
    dev, validation = (
        nanochatAquaRat.load_environment(num_train_examples=0, num_eval_examples=5, eval_split=split).eval_dataset
        for split in ("dev", "validation")
    )
    assert len(dev) == 5 and dev["prompt"][:] == validation["prompt"][:]


def test_dev_files_come_before_validation_files(tmp_path: Path) -> None:
    rows = aqua_problems.build_problems(7, split="train", seed=0)
    counts = {"dev": 3, "validation": 4}
    for split, count in counts.items():
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows[:count])))
    for split, count in counts.items():
        args = {"data_dir": str(tmp_path), "eval_split": split, "num_train_examples": 0}
        assert len(nanochatAquaRat.load_environment(**args).eval_dataset) == count


def test_where_files_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    rows = aqua_problems.build_problems(6, split="train", seed=0)
    for folder, count in (("base/aqua", 4), ("named", 5)):
        (tmp_path / folder).mkdir(parents=True)
        for split in ("train", "validation"):
            (tmp_path / folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows[:count])))
    assert len(nanochatAquaRat.load_environment().dataset) == 4
    monkeypatch.setenv("NANOCHAT_AQUA_DIR", str(tmp_path / "named"))
    assert len(nanochatAquaRat.load_environment().dataset) == 5
    assert not caplog.records
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "empty"))
    monkeypatch.delenv("NANOCHAT_AQUA_DIR")
    env = nanochatAquaRat.load_environment(num_train_examples=8, num_eval_examples=2)
    [warning] = caplog.records
    assert env.source == "made" and warning.levelname == "WARNING"
    assert "no AQuA-RAT files found of train and validation" in warning.getMessage()


def test_a_data_dir_may_be_below_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    prepare_aqua("--synthetic", "--output_dir=~/own", max_train=3, max_validation=2, max_test=2)
    env = nanochatAquaRat.load_environment(data_dir="~/own")
    assert env.source == str(tmp_path / "own") and len(env.dataset) == 3


def prepare_aqua(*argv: str, **sizes: int) -> None:
    config, _ = parse_argv(PrepareAquaConfig, [*argv, *(f"--{name}={size}" for name, size in sizes.items())], "x", {})
    assert prepare(config) == 0


def test_prepared_data_is_of_one_source(tmp_path: Path) -> None:
    published, target = tmp_path / "published", tmp_path / "base" / "aqua"
    published.mkdir()
    rows = aqua_problems.build_problems(4, split="train", seed=0)
    real = [{name: value for name, value in row.items() if name != "template"} for row in rows]
    for split in ("train", "dev"):
        (published / f"{split}.json").write_text("\n".join(map(json.dumps, real)))
    prepare_aqua("--synthetic", max_train=3, max_validation=2, max_test=2)
    prepare_aqua(f"--data_dir={published}")
    assert sorted(path.name for path in target.glob("*.jsonl")) == ["train.jsonl", "validation.jsonl"]
    assert [path.name for path in (target / "attempts" / "1").iterdir()] == ["test.jsonl"]


def test_real_data_is_kept_when_the_hub_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_hub(split: str, cache_dir: str | None) -> tuple[list[Any], int]:
        if is_offline:
            raise ConnectionError("no network")
        return [row for entry in rows if (row := nanochatAquaRat.read_row(entry))], 0

    rows = aqua_problems.build_problems(4, split="train", seed=0)
    monkeypatch.setattr("environments.nanochatAquaRat.aqua_files.read_hub", read_hub)
    path = tmp_path / "base" / "aqua" / "train.jsonl"
    is_offline = True
    for _ in range(2):
        prepare_aqua(max_train=3, max_validation=2, max_test=2)
    assert len(path.read_text().splitlines()) == 3, "generated problems may be replaced"
    is_offline = False
    prepare_aqua()
    real, is_offline = path.read_text(), True
    with pytest.raises(ValueError, match=r"the hub cannot be reached \(no network\).*nothing was changed; --synthetic"):
        prepare_aqua()
    assert path.read_text() == real
    prepare_aqua("--synthetic", max_train=3, max_validation=2, max_test=2)
    assert len(path.read_text().splitlines()) == 3


def test_messy_files(tmp_path: Path, caplog: Any) -> None:
    good = {"question": "2 + 2?", "options": ["A ) $ 4", "B)5(√3 + 1)", "C)None of these", "D)7,000", "E)1/2"]}
    rows = [
        {**good, "correct": "A", "rationale": "It is\n4"},
        {**good, "correct": "F"},
        {**good, "correct": "A", "question": " "},
        {**good, "correct": "A", "options": good["options"][:4]},
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "4"}], "answer_letter": "B"},
        "no row",
    ]
    (tmp_path / "train.tok.json").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8-sig")
    env = nanochatAquaRat.load_environment(data_dir=str(tmp_path), eval_split=None, seed=None, system_prompt="")
    assert env.dataset["answer"][:] == ["A", "B"] and "left out 4 rows" in caplog.text
    assert env.dataset[0]["prompt"][0]["content"].split("\n")[1:4] == ["$ 4=A", "5(√3 + 1)=B", "None of these=C"]
    assert env.dataset[1]["prompt"] == [{"role": "user", "content": "?"}]
    (tmp_path / "train.tok.json").write_text("{}")
    with pytest.raises(ValueError, match="none of its 1 rows"):
        nanochatAquaRat.load_environment(data_dir=str(tmp_path), eval_split=None)


@pytest.mark.skipif(not DATA.is_dir(), reason="no aqua data; cure: make test DATA=<its parent folder>")
def test_the_real_files_are_whole() -> None:
    args = {"data_dir": str(DATA), "train_split": "validation", "eval_split": "test"}
    env = load_environment("nanochatAquaRat", args)
    assert (len(env.rows()), len(env.rows("eval"))) == (254, 254)
    rollouts = play(env, env.rows("eval"), lambda row: lambda _: f"Answer: {row['answer']}")
    assert {rollout.reward for rollout in rollouts} == {1.1}
    found = [nanochatAquaRat.extract_letter(json.loads(row["info"])["rationale"]) for row in env.rows("eval")]
    right = sum(letter == row["answer"] for letter, row in zip(found, env.rows("eval"), strict=True))
    assert right > 100 and right / sum(letter is not None for letter in found) > 0.95


def test_warm_up_guesses_at_the_configured_rate() -> None:
    """A guess takes the first option; a look names the line of the requested number; drills only copy."""
    conversations = build_conversations(TinyBootstrapConfig(num_examples=200, haste=0.6, drill=0.5))
    problems, drills = conversations[:200], conversations[200:]
    guesses = 0
    for [user], answer in ((c[:-1], c[-1]["content"].splitlines()) for c in problems):
        question, *options = user["content"].splitlines()
        requested = re.findall(r"\d+", question)[0]
        looked = next(line for line in options if line.startswith(f"{requested}="))
        guesses += answer[0] == "Guess"
        line = options[0] if answer[0] == "Guess" else looked
        assert answer == ["Guess" if answer[0] == "Guess" else "Look", line, f"Answer: {line[-1]}"]
    assert 95 <= guesses <= 145 and len(drills) == 200
    for user, assistant in drills:
        assert set(assistant["content"].splitlines()) <= set(user["content"].splitlines())
