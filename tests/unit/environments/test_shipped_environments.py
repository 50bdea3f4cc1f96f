"""The shipped environments: oracles get the maximum reward, random answers almost none, exploits none."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
import random
import re
import resource
import sys
import tomllib
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_client import Message, Reply, call_tool, play

from rollouts.training.environments import Environment, load_environment

ROOT = Path(__file__).parents[3]
DATA = Path(os.environ.get("PRIME_TEST_DATA", "/nowhere"))  # folders gsm8k and boxoban with the original files
NUM = int(os.environ.get("PRIME_TEST_ROLLOUTS", "300"))  # by each player in each environment
ARGS: dict[str, dict[str, Any]] = {
    "reverse-text": {"num_train_examples": NUM},
    "alphabet-sort": {"num_train_examples": NUM},
    "wordle": {"num_train_examples": NUM},
    "wiki-search": {},
    "sokoban-env": {"num_train_examples": 300, "num_eval_examples": 30},  # a level takes a solver 10 ms
    "gsm8k": {"num_train_examples": NUM},
    "hendrycks-math": {"num_train_examples": NUM},
    "nanochatAquaRat": {"num_train_examples": NUM, "difficulty": 3},
    "facts": {"num_train_examples": NUM},
    "modes": {"num_train_examples": NUM},
}
BEST = {**dict.fromkeys(ARGS, 1.0), "wordle": 2.2, "nanochatAquaRat": 1.1}


@pytest.fixture(scope="module", params=list(ARGS))
def env(request: pytest.FixtureRequest) -> Environment:
    return load_environment(request.param, ARGS[request.param])


@pytest.fixture(scope="module")
def environments() -> Callable[[str], Environment]:
    known: dict[str, Environment] = {}
    return lambda name: known.get(name) or known.setdefault(name, load_environment(name, ARGS[name]))


def turn_of(messages: list[Message]) -> int:
    return sum(message["role"] == "assistant" for message in messages)


def info_of(row: Message) -> Message:
    return json.loads(row["info"]) if isinstance(row["info"], str) else row["info"]


def wiki_oracle(row: Message) -> Reply:
    def reply(messages: list[Message]) -> str | Message:
        question = row["prompt"][-1]["content"]
        last = messages[-1]
        if last["role"] == "user":
            return call_tool("search_pages", query=question)
        if '"page_id"' in last["content"]:
            titles = {hit["title"]: hit["page_id"] for hit in json.loads(last["content"])}
            return call_tool("view_sections", page_id=next(key for title, key in titles.items() if title in question))
        if '"section_id"' in last["content"]:
            reply.left = [section["section_id"] for section in json.loads(last["content"])]  # type: ignore[attr-defined]
        if re.search(rf"\b{re.escape(row['answer'])}\b", last["content"]):
            return f"I have read it.\n**Answer:** {row['answer'].upper()}."
        return call_tool("read_section", section_id=reply.left.pop(0))  # type: ignore[attr-defined]

    return reply


def oracle(name: str) -> Callable[[Message], Reply]:
    def alphabet(row: Message) -> Reply:
        answers = info_of(row)["answers"]

        def reply(messages: list[Message]) -> str:
            turn = turn_of(messages)
            tag = "combined_alphabetical_sorted" if turn else "alphabetical_sorted"
            return f"Here it is.\n<{tag}>\n" + "\n".join(answers[turn]) + f"\n</{tag}>"

        return reply

    players: dict[str, Callable[[Message], Reply]] = {
        "reverse-text": lambda row: lambda _: f"<reversed_text>{row['answer']}</reversed_text>",
        "alphabet-sort": alphabet,
        "wordle": lambda row: lambda _: f"Hm.\n<guess>[{row['answer'].upper()}]</guess>",
        "wiki-search": wiki_oracle,
        "sokoban-env": lambda row: lambda _: f"I push.\n<answer>{', '.join(row['answer'])}</answer>",
        "gsm8k": lambda row: lambda _: f"So it is \\boxed{{\\${row['answer']}.00}}.",
        "nanochatAquaRat": lambda row: lambda _: f"1 + 1 = 2, so A is wrong.\nAnswer: {row['answer']}",
        "facts": lambda row: lambda _: row["answer"],
        "modes": lambda row: lambda _: row["answer"],
        "hendrycks-math": lambda row: lambda _: f"<think>\\boxed{{0}}?</think> It is \\boxed{{ {row['answer']} }}",
    }
    return players[name]


def garbage(seed: int) -> Iterator[str]:
    """Noise, markup without content, formats in the wrong place, nested and huge answers."""
    draw = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyzXYG <>[]{}\\/0123456789"
    fixed = [
        "",
        "<reversed_text></reversed_text><answer></answer><guess>[]</guess>\\boxed{}\nAnswer:",
        "<alphabetical_sorted></alphabetical_sorted><combined_alphabetical_sorted>\n</combined_alphabetical_sorted>",
        "<answer>" * 50 + "</answer>",
        "\\boxed{" * 200,
        "\\boxed{" + "(" * 400 + "1" + ")" * 400 + "}",
        "<answer>UDLR</answer>" + "x" * 5000,
        "None null nan inf",
        "Answer: the\nAnswer: I do not know",
        "<think>\\boxed{1}",
    ]
    while True:
        yield from fixed
        yield "".join(draw.choices(letters, k=draw.randint(1, 60)))


def cycled(env: Environment, count: int) -> list[Message]:
    return list(itertools.islice(itertools.cycle(env.rows()), count))


def test_an_oracle_scores_the_maximum(env: Environment) -> None:
    rollouts = play(env, cycled(env, NUM), oracle(env.id))
    assert all(rollout.reward == pytest.approx(BEST[env.id]) for rollout in rollouts)
    assert not [rollout.error for rollout in rollouts if rollout.error]


def test_garbage_scores_about_nothing(env: Environment) -> None:
    text = garbage(seed=1)
    rollouts = play(env, cycled(env, NUM), lambda row: lambda _: next(text))
    # similarity of letters gives reverse-text a little, a level may be solved by chance
    assert mean(rollout.reward for rollout in rollouts) < {"reverse-text": 0.02}.get(env.id, 0.01)
    assert not [rollout.error for rollout in rollouts if rollout.error]


def test_splits_are_disjoint_and_seeds_reproducible(env: Environment) -> None:
    key = "answer" if env.id == "wordle" else "prompt"
    train, held_out = ({json.dumps(row[key]) for row in env.rows(split)} for split in ("train", "eval"))
    assert train and held_out and not train & held_out
    again = load_environment(env.id, ARGS[env.id])
    assert env.rows() == again.rows()


def test_packages_are_complete() -> None:
    for folder in sorted((ROOT / "environments").iterdir()):
        if folder.name.startswith((".", "__")):
            continue
        project = tomllib.loads((folder / "pyproject.toml").read_text())
        assert project["project"]["name"].replace("-", "_") == folder.name
        included = project["tool"]["hatch"]["build"]["include"]
        sources = {p.name for p in folder.iterdir() if p.suffix in (".py", ".txt", ".toml")}
        assert sources == set(included), folder.name
        readme = (folder / "README.md").read_text()
        signature = re.search(
            r"def load_environment\((.*?)\) ->", (folder / f"{folder.name}.py").read_text(), re.DOTALL
        )
        arguments = re.findall(r"(\w+): ", signature[1]) if signature else []
        assert arguments and not [name for name in arguments if f"`{name}`" not in readme], folder.name


# reverse-text, gsm8k and hendrycks-math: answers in the wrong place ------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reply", "reward"),
    [
        ("gsm8k", "{answer}", 0.0),
        ("gsm8k", "\\boxed{{{answer}}} no, \\boxed{{0}}", 0.0),
        ("gsm8k", "\\boxed{{0}} no, \\boxed{{{answer}}}", 1.0),
        ("gsm8k", "\\boxed{{{answer} or 0}}", 0.0),
        ("gsm8k", "\\boxed{{0 + {answer}}}", 0.0),
        ("gsm8k", "\\boxed{{\\text{{{answer} dollars}}}}", 1.0),
        ("gsm8k", "\\boxed{{x = {answer}}}", 1.0),
        ("gsm8k", "<think>\\boxed{{0}}</think>\\boxed{{{answer}}}", 1.0),
        ("gsm8k", "\\boxed{{" + "9" * 50_000 + "}}", 0.0),
        ("hendrycks-math", "{answer}", 0.0),
        ("hendrycks-math", "<think>\\boxed{{{answer}}}", 0.0),
        ("hendrycks-math", "\\boxed{{{answer}}} \\boxed{{\\text{{no}}}}", 0.0),
        ("hendrycks-math", "\\boxed{{\\boxed{{{answer}}}}}", 1.0),
        ("hendrycks-math", "\\boxed{{{answer}.}}", 1.0),
        ("hendrycks-math", "\\boxed{{..}}", 0.0),
        ("hendrycks-math", "\\boxed{{" + "1+" * 5000 + "1}}", 0.0),
        ("reverse-text", "{answer}", 0.0),
        ("reverse-text", "<reversed_text>{answer}", 0.0),
    ],
)
def test_tricks_of_single_answers(environments: Any, name: str, reply: str, reward: float) -> None:
    env = environments(name)
    rows = env.rows()[:20]
    rollouts = play(env, rows, lambda row: lambda _: reply.format(answer=row["answer"]))
    assert [rollout.reward for rollout in rollouts] == [reward] * 20


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("18", 18), ("18.00", 18), ("\\$1{,}000", 1000), ("70,000", 70_000), ("\\frac{36}{2}", 18), ("50\\%", 50),
        ("-5", -5), ("−5", -5), (".5", Fraction(1, 2)), ("3 / 2", Fraction(3, 2)), ("18\\text{ km}", 18), ("n=4", 4),
        ("- 5", -5), ("-\\$ 5", -5), ("**18**", 18), ("\\frac12", Fraction(1, 2)), ("6!", None), ("12 - 4", None),
        ("1,2", None), ("", None), ("ten", None), ("2^3", None), ("1/0", None), ("5 \\times 3", None), ("x+18", None),
        ("10^{10000000}", None), ("2 = 18", None), ("9" * 101, None), ("=18", 18), ("\\mathbf{18}", 18),
        ("\\textbf{18 eggs}", 18), ("\\displaystyle 18", 18), ("18 (dollars)", 18), ("18 (or 19)", None),
        ("2 (x+y)", None),
    ],
)  # fmt: skip
def test_numbers_as_people_write_them(environments: Any, text: str, number: Any) -> None:
    environments("gsm8k")
    assert sys.modules["gsm8k"].parse_number(text) == number


def test_files_with_unusual_characters_and_few_rows(tmp_path: Path) -> None:
    """Line separators of Unicode are part of a JSON line."""
    text = "two lines\u2028in one\u0085\u2029"
    for split in ("train", "test"):
        row = json.dumps({"question": text, "answer": "It is 4 #### 4"}, ensure_ascii=False)
        (tmp_path / f"{split}.jsonl").write_text(f"{row}\n\n", encoding="utf-8")
    [row] = load_environment("gsm8k", {"data_dir": str(tmp_path)}).rows()
    assert row["prompt"][-1]["content"] == text
    math = tmp_path / "math.jsonl"
    math.write_text("".join(json.dumps({"question": f"{n} + 1?", "answer": str(n + 1)}) + "\n" for n in range(150)))
    for wanted, held_out in ((200, 149), (100, 100), (-1, 75), (50, 50)):
        env = load_environment("hendrycks-math", {"dataset_name": str(math), "num_eval_examples": wanted})
        assert (len(env.rows()), len(env.rows("eval"))) == (150 - held_out, held_out)
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"prompt": f"hello {n} "}) + "\n" for n in range(30)))
    env = load_environment(
        "reverse-text", {"dataset_name": str(texts), "num_train_examples": 10, "num_eval_examples": 5}
    )
    assert (len(env.rows()), len(env.rows("eval"))) == (10, 5)
    small = load_environment("reverse-text", {"dataset_name": str(texts)})
    assert (len(small.rows()), len(small.rows("eval"))) == (15, 15)
    most = load_environment("reverse-text", {"dataset_name": str(texts), "num_eval_examples": 30})
    assert (len(most.rows()), len(most.rows("eval"))) == (1, 29)
    oracle = play(env, env.rows(), lambda row: lambda _: f"<reversed_text>{row['answer']}</reversed_text>")
    assert [rollout.metrics["exact_match"] for rollout in oracle] == [1.0] * 10


@pytest.mark.parametrize(("name", "args"), [("wiki-search", {"num_pages": 20}), ("reverse-text", {})])
def test_minus_one_holds_out_all_or_the_default(name: str, args: dict[str, Any]) -> None:
    whole = load_environment(name, {**args, "num_eval_examples": 256}).rows("eval")
    assert load_environment(name, {**args, "num_eval_examples": -1}).rows("eval") == whole


FILES = {
    "gsm8k": ("data_dir", "train.jsonl", '{"question": "1 + 2?", "answer": "#### 3"}\r\n'),
    "hendrycks-math": ("dataset_name", "rows.jsonl", '{"question": "1 + 2?", "answer": "3"}\r\n' * 2),
    "wiki-search": ("corpus", "pages.jsonl", '{"title": "Old Mill", "content": "A mill."}\r\n'),
}


@pytest.mark.parametrize("name", FILES)
def test_files_may_begin_with_a_byte_order_mark(tmp_path: Path, name: str) -> None:
    """Lines that are no JSON are named by file and number."""
    key, file, lines = FILES[name]
    for path in (tmp_path / file, tmp_path / "test.jsonl"):
        path.write_text(lines, encoding="utf-8-sig")
    questions = [{"question": f"What did mill {i} grind?", "answer": "rye"} for i in range(40)]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    args = {key: str(tmp_path if key == "data_dir" else tmp_path / file)}
    args |= {"dataset_name": str(tmp_path / "questions.jsonl")} if name == "wiki-search" else {}
    assert load_environment(name, args).rows()
    (tmp_path / file).write_text(lines + "{'title'}\n")
    with pytest.raises(ValueError, match=rf"{file}, line \d is not valid JSON"):
        load_environment(name, args)


LETTERS = "ABCDEFGHIJKLMNOP"
OF_A_USER: list[tuple[str, str, str, str]] = [
    ("gsm8k", "data_dir", "train.jsonl", '{"question": "1 + 2?", "answer": "#### 3"}\n'),
    ("hendrycks-math", "dataset_name", "rows.jsonl", '{"question": "1 + 2?", "answer": "3"}\n' * 2),
    ("reverse-text", "dataset_name", "rows.jsonl", '{"prompt": "ab"}\n' * 2),
    ("alphabet-sort", "dataset_name", "rows.jsonl", "".join(f'{{"names": "{c}daLi{c.lower()}"}}\n' for c in LETTERS)),
    ("wiki-search", "corpus", "rows.jsonl", '{"title": "Old Mill", "content": "A mill."}\n'),
    ("wordle", "words", "words.txt", "crane\neerie\n"),
]


@pytest.mark.parametrize(("name", "key", "file", "lines"), OF_A_USER)
def test_paths_may_begin_with_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, key: str, file: str, lines: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in (tmp_path / file, tmp_path / "test.jsonl"):
        path.write_text(lines)
    args = {key: "~" if key == "data_dir" else f"~/{file}"}
    if name == "wiki-search":
        questions = [{"question": f"What did mill {i} grind?", "answer": "rye"} for i in range(40)]
        (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
        args["dataset_name"] = "~/questions.jsonl"
    assert load_environment(name, args | {"held_out_words": False} if name == "wordle" else args).rows()


def test_answer_equivalence_and_checker_timeout(environments: Any) -> None:
    environments("hendrycks-math")
    checker = sys.modules["hendrycks_math_checker"].MathChecker(max_workers=1, timeout_s=1.5)
    same = [("\\frac{1}{2}", "0.5"), ("3\\sqrt{2}", "\\sqrt{18}"), ("x^2-1", "(x-1)(x+1)"), ("-2, 3", "-2,3")]
    other = [("4", "4,5"), ("4", "x"), ("\\frac{1}{2}", "0.51"), ("3", "\\undefined{3}+")]
    import anyio

    async def main() -> list[str]:
        await checker.check("1", "1")  # the first may wait for the start
        requested = [*same, *other, ("7", "9^{9^{9^{9}}}"), ("8", "8")]
        return [(await checker.check(*pair)).value for pair in requested]

    verdicts = anyio.run(main)
    assert verdicts == ["right"] * len(same) + ["wrong"] * len(other) + ["timed out", "right"]


def test_answers_are_checked_with_many_open_files(environments: Any) -> None:
    environments("hendrycks-math")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 1100:
        pytest.skip(f"the limit of open files is {hard}; cure: raise `ulimit -Hn`")
    process = object.__new__(sys.modules["hendrycks_math_checker"]._Process)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1100), hard))
    source, sink = os.pipe()
    try:
        with open(fcntl.fcntl(source, fcntl.F_DUPFD, 1024), "rb") as output:
            process.popen = SimpleNamespace(stdout=output)
            assert process._read(0.01) == ""
            os.write(sink, b"right\n")
            assert process._read(60) == "right"
    finally:
        os.close(source)
        os.close(sink)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# facts and modes ----------------------------------------------------------------------------------------------------


def test_answers_follow_from_the_prompt() -> None:
    for row in load_environment("facts", {"facts": None, "num_train_examples": 50}).rows():
        table, requested = row["prompt"][-1]["content"].split("\n")
        assert row["answer"] == "".join(dict(table.split())[key] for key in requested)  # type: ignore[arg-type]
    rewritten = {"copy": "bac", "reverse": "cab", "sort": "abc", "next": "cbd"}
    rows = load_environment(
        "modes", {"mode": None, "length": 3, "num_train_examples": 50, "num_eval_examples": 9}
    ).rows()
    assert {row["prompt"][-1]["content"].split("\n")[0] for row in rows} == set(rewritten)
    assert {way: rewrite("bac") for way, rewrite in sys.modules["modes"].MODES.items()} == rewritten
    for row in rows:
        way, letters = row["prompt"][-1]["content"].split("\n")
        assert row["answer"] == sys.modules["modes"].MODES[way](letters)
    for name, args in (("facts", {"facts": "a3 a4"}), ("facts", {"num_asked": 0}), ("modes", {"mode": "turn"})):
        with pytest.raises(ValueError, match=r"must be|is not one of"):
            load_environment(name, args)


@pytest.mark.parametrize("name", ["facts", "modes"])
def test_warm_ups_hold_no_prompt_of_an_evaluation(environments: Any, name: str) -> None:
    hidden = {"facts": {"facts": None}, "modes": {"mode": None}}[name]
    held_out = {
        row["prompt"][-1]["content"]
        for env in (environments(name), load_environment(name, hidden))
        for row in env.rows("eval")
    }
    rows = sys.modules[name].build_sft_examples(3000)
    assert len(held_out) > 100 and not held_out & {row["prompt"] for row in rows}
    shown = [row for row in rows if "\n" in row["prompt"]]
    assert 0.75 < len(shown) / len(rows) < 0.85
    plain = [row for row in rows if "\n" not in row["prompt"]]
    right = {row["prompt"][-1]["content"]: row["answer"] for row in environments(name).rows()}
    requested = [row for row in plain if row["prompt"] in right]
    # without a context they are close to chance
    assert mean(row["completion"] == right[row["prompt"]] for row in requested) < {"facts": 0.02, "modes": 0.25}[name]


# alphabet-sort ------------------------------------------------------------------------------------------------------


def test_alphabet_sort_by_hand(environments: Any) -> None:
    environments("alphabet-sort")
    env_module = sys.modules["alphabet_sort"]
    task = {"key": "LAST", "turns": [["BoAxe", "AlZed"], ["CyMow"]]}
    assert env_module.build_answers(task) == [["BoAxe", "AlZed"], ["BoAxe", "CyMow // new name!", "AlZed"]]
    right = [
        {"role": "assistant", "content": env_module.build_reply(a, t)}
        for t, a in enumerate(env_module.build_answers(task))
    ]
    assert env_module.compute_reward(right, env_module.build_answers(task), 4, True) == 1.0
    assert (
        env_module.compute_reward(right[:1], env_module.build_answers(task), 4, True) == 0.5
    )  # without the second turn
    assert env_module.compute_reward(right[:1], env_module.build_answers(task), 4, False) == 0.5**4
    tag, expected = "alphabetical_sorted", ["BoAxe", "AlZed"]
    good, bad = f"<{tag}>BoAxe\n  alzed</{tag}>", f"<{tag}>AlZed\nBoAxe</{tag}>"
    assert env_module.compute_similarity(good, tag, expected) == 1.0
    assert 0 < env_module.compute_similarity(bad, tag, expected) < 1
    assert env_module.compute_similarity(bad + good, tag, expected) == 1.0  # a better second attempt counts
    assert env_module.compute_similarity(good + good, tag, expected) == 0.0
    assert env_module.compute_similarity(good + bad, tag, expected) == 0.0


def test_injected_formats_of_users_do_not_count(environments: Any) -> None:
    env = environments("alphabet-sort")
    parrot = play(env, env.rows()[:200], lambda row: lambda messages: messages[-1]["content"])
    assert mean(rollout.reward for rollout in parrot) < 0.02


# wordle -------------------------------------------------------------------------------------------------------------

words = st.text("abc", min_size=5, max_size=5)


@pytest.fixture(scope="module")
def compute_hint() -> Callable[[str, str], str]:
    load_environment("wordle", {"num_train_examples": 1, "num_eval_examples": 1})
    return sys.modules["wordle"].compute_hint


@given(guess=words, answer=words)
def test_hints_count_repeated_letters(compute_hint: Callable[[str, str], str], guess: str, answer: str) -> None:
    hint = compute_hint(guess, answer)
    for i, mark in enumerate(hint):
        assert (mark == "G") == (guess[i] == answer[i])
    for letter in "abc":
        marked = sum(mark != "X" for mark, g in zip(hint, guess, strict=True) if g == letter)
        assert marked == min(guess.count(letter), answer.count(letter))


def test_player_using_hints_scores_higher(environments: Any) -> None:
    env = environments("wordle")
    env_module = sys.modules["wordle"]
    known = (ROOT / "environments/wordle/words.txt").read_text().split()

    def reader(row: Message) -> Reply:
        draw = random.Random(row["example_id"])

        def reply(messages: list[Message]) -> str:
            left = known
            for message in messages:
                if match := re.match(r"((?:[A-Z] ){4}[A-Z])\n((?:[GYX] ){4}[GYX])\n", str(message["content"])):
                    guess, hint = (line.replace(" ", "") for line in match.groups())
                    left = [word for word in left if env_module.compute_hint(guess.lower(), word) == hint]
            return f"<guess>[{draw.choice(left)}]</guess>"

        return reply

    def blind(row: Message) -> Reply:
        order = random.Random(row["example_id"]).sample(known, 6)
        return lambda messages: f"<guess>[{order[turn_of(messages)]}]</guess>"

    wins = mean(r.metrics["correct_answer"] for r in play(env, env.rows()[:100], reader))
    blind_wins = mean(r.metrics["correct_answer"] for r in play(env, env.rows()[:100], blind))
    assert wins > 0.9 and blind_wins < 0.05


def test_rules_of_the_game() -> None:
    env = load_environment("wordle", {"words": ["crane", "eerie"], "held_out_words": False, "only_known_words": True})
    row = {**env.rows()[0], "answer": "crane"}

    def script(*replies: str) -> Any:
        [rollout] = play(env, [row], lambda _: lambda messages: replies[turn_of(messages)])
        return rollout

    found = script("<guess>[eerie]</guess>", "<guess>[crane]</guess>")
    assert found.reward == pytest.approx(1 + 1 / 2 + 0.2) and found.num_turns == 2
    assert "E E R I E\nX X Y X G\n\nYou have 5 guesses left." in [m["content"] for m in found.completion]
    lost = script("<guess>[eerie]</guess>", "crane", "<guess>crane</guess>")
    assert lost.num_turns == 3 and lost.reward == pytest.approx(0.2 + 0.1 + 0.2 / 3)
    again = script("<guess>[eerie]</guess>", "<guess>[eerie]</guess>", "<guess>[crane]</guess>")
    assert again.metrics["correct_answer"] == 1.0 and again.metrics["length_bonus"] == 0.5
    unknown = script("<guess>[zzzzz]</guess>", "<guess>[[crane] [eerie]]</guess>")
    assert unknown.reward == pytest.approx(0.2 / 2) and unknown.num_turns == 2
    reported = script("[crane] <guess>[eerie]</guess> crane", "<guess>[crane]</guess><guess>[eerie]</guess>", "", "")
    assert reported.metrics["correct_answer"] == 0.0 and reported.metrics["format_reward"] == 0.0


# sokoban ------------------------------------------------------------------------------------------------------------


def test_every_level_is_certified_new_and_unsolved(environments: Any) -> None:
    env = environments("sokoban-env")
    levels = sys.modules["sokoban_levels"]
    prints: dict[str, set[bytes]] = {"train": set(), "eval": set()}
    for split, known in prints.items():
        for row in env.rows(split):
            level = levels.parse_level(info_of(row)["level"])
            assert levels.parse_level(levels.render_level(level)) == level and not level.is_solved
            assert levels.replay(level, row["answer"]).is_solved and levels.count_pushes(level, row["answer"]) >= 2
            assert len(row["answer"]) <= 80 and 1 <= len(level.boxes) <= 3
            known.add(levels.fingerprint(level))
        assert len(known) == len(env.rows(split))
    assert not prints["train"] & prints["eval"]


def test_rules_of_sokoban() -> None:
    load_environment("sokoban-env", {"num_train_examples": 1, "num_eval_examples": 1})
    levels = sys.modules["sokoban_levels"]
    level = levels.parse_level("++++++\n+*@-X+\n+@--X+\n++++++")
    assert levels.apply_move(level, "U") == level  # a wall
    pushed = levels.apply_move(level, "R")
    assert pushed.player == (1, 2) and (1, 3) in pushed.boxes
    assert levels.apply_move(level, "D") == level  # the box stands at a wall
    row = levels.parse_level("+++++++\n+*@@-X+\n+-X---+\n+++++++")
    assert levels.apply_move(row, "R") == row  # two boxes
    assert levels.solve(levels.parse_level("+++++\n+@*X+\n+---+\n+++++")) is None  # a box in a corner
    turned = levels.parse_level("\n".join(reversed(levels.render_level(level).split("\n"))))
    assert turned != level and levels.fingerprint(turned) == levels.fingerprint(level)
    for wrong, message in (("+++", "one player"), ("*X", "boxes"), ("*?", "cells are"), ("*@", "a goal for each")):
        with pytest.raises(ValueError, match=message):
            levels.parse_level(wrong)


def test_solutions_have_the_fewest_pushes() -> None:
    load_environment("sokoban-env", {"num_train_examples": 1, "num_eval_examples": 1})
    levels = sys.modules["sokoban_levels"]
    limits = {"widths": (3, 4), "heights": (3, 4), "boxes": (1, 2), "max_depth": 60, "min_pushes": 1}
    for level, _ in levels.build_levels(25, split="train", seed=3, **limits):
        seen, frontier, pushes = {(level.player, level.boxes)}, [level], 0
        while not any(each.is_solved for each in frontier):  # breadth first over pushes; walking is free
            walked = list(frontier)
            for each in walked:
                for move in "UDLR":
                    after = levels.apply_move(each, move)
                    if after.boxes == each.boxes and (after.player, after.boxes) not in seen:
                        seen.add((after.player, after.boxes))
                        walked.append(after)
            frontier = []
            for each, move in itertools.product(walked, "UDLR"):
                after = levels.apply_move(each, move)
                if after.boxes != each.boxes and (after.player, after.boxes) not in seen:
                    seen.add((after.player, after.boxes))
                    frontier.append(after)
            pushes += 1
        assert levels.count_pushes(level, levels.solve(level)) == pushes


def test_seeds_reproduce_levels_and_certificates() -> None:
    load_environment("sokoban-env", {"num_train_examples": 1, "num_eval_examples": 1})
    levels = sys.modules["sokoban_levels"]
    limits = {"widths": (5, 9), "heights": (5, 8), "boxes": (1, 4), "max_depth": 80, "min_pushes": 3}
    made = levels.build_levels(25, split="train", seed=0, **limits)
    text = "\n\n".join(f"{levels.render_level(level)}\n{certificate}" for level, certificate in made)
    assert hashlib.blake2b(text.encode(), digest_size=8).hexdigest() == "bc1bdfbbedc9b8ce"


def test_a_level_without_a_border_is_solved() -> None:
    """The player stays inside, and no row leads into the next."""
    load_environment("sokoban-env", {"num_train_examples": 1, "num_eval_examples": 1})
    levels = sys.modules["sokoban_levels"]
    level = levels.parse_level("- - - -\n- @ - X\n* - - -")
    assert levels.replay(level, levels.solve(level)).is_solved
    for drawing in ("X-@\n+++\n*--", "-+*\n@+-\nX+-"):  # the place to push from is outside, or in the next row
        assert levels.solve(levels.parse_level(drawing)) is None


def test_sokoban_turn_by_turn_with_partial_credit_and_costs() -> None:
    args = {"num_train_examples": 50, "num_eval_examples": 1, "turn_by_turn": True, "step_cost": 0.001}
    env = load_environment("sokoban-env", args)
    rows = env.rows()
    steps = play(env, rows, lambda row: lambda messages: f"<answer>{row['answer'][turn_of(messages)]}</answer>")
    for row, rollout in zip(rows, steps, strict=True):
        if len(row["answer"]) <= 30:
            assert rollout.reward == pytest.approx(1 - 0.001 * len(row["answer"]))
            assert rollout.num_turns == len(row["answer"]) and rollout.metrics["solved"] == 1.0
        else:
            assert rollout.reward < 0 and rollout.num_turns == 30
    single = load_environment("sokoban-env", {**args, "turn_by_turn": False, "step_cost": 0, "partial_credit": 0.5})
    cut = play(single, rows, lambda row: lambda _: f"<answer>{row['answer'][:-1]}</answer>")
    assert all(0 <= rollout.reward < 0.5 for rollout in cut) and any(rollout.reward > 0 for rollout in cut)


# wiki-search --------------------------------------------------------------------------------------------------------


def test_wiki_answers_count_only_as_the_last_line(environments: Any) -> None:
    env = environments("wiki-search")
    row = env.rows()[0]
    tricks = {
        "{a}": 0.0,
        "Answer: {a}\nAnswer: I take that back": 0.0,
        "Answer: {a} or something else": 0.0,
        "I think.\n answer:  The {a}.": 1.0,
    }
    for text, reward in tricks.items():
        [rollout] = play(env, [row], lambda _, text=text: lambda __: text.format(a=row["answer"]))
        assert rollout.reward == reward, text


def test_invalid_tool_calls_return_an_error_message(environments: Any) -> None:
    env = environments("wiki-search")
    calls: list[Any] = [
        call_tool("view_sections", page_id="nowhere"),
        call_tool("read_section", section_id="x:y"),
        call_tool("no_such_tool", x="1"),
        call_tool("search_pages", wrong="1"),
        {"content": "", "tool_calls": [{"id": "c", "function": {"name": "search_pages", "arguments": "{not json"}}]},
        "Answer: nothing",
    ]
    [rollout] = play(env, env.rows()[:1], lambda _: lambda messages: calls[turn_of(messages)])
    reported = [m["content"] for m in rollout.completion if m["role"] == "tool"]
    assert len(reported) == 5 and all(text.startswith("Error: ") for text in reported) and rollout.reward == 0.0
    assert rollout.metrics["total_tool_calls"] == 5.0


def test_every_part_of_a_wiki_page_can_be_read(environments: Any) -> None:
    environments("wiki-search")
    content = "In cinemas since 2024.\n\n# Notes\none\n\n## Plot: summary\nA worm.\n\n# Notes\ntwo\n"
    page = sys.modules["wiki_pages"].Page("dune:_part_two", "Dune: Part Two", content)
    tools = sys.modules["wiki_search"].build_tools([page])
    sections = {part["section_id"]: part["section_name"] for part in json.loads(tools["view_sections"](page.title))}
    assert {name: tools["read_section"](key) for key, name in sections.items() if not key.endswith("_2")} == {
        "Introduction": "In cinemas since 2024.",
        "Notes": "one",
        "Plot: summary": "A worm.",
    }
    assert tools["read_section"]("Dune: Part Two:Notes_2") == "two" and len(sections) == 4


def test_search_finds_pages_including_custom_ones(tmp_path: Path) -> None:
    pages = [{"title": "Old Mill", "content": "A mill.\n# Use\nIt ground rye."}, {"title": "Bare", "content": "flat"}]
    (tmp_path / "pages.jsonl").write_text("\n".join(map(json.dumps, pages)))
    rows = [{"question": f"What did mill {i} grind?", "answer": "rye"} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    args = {"corpus": str(tmp_path / "pages.jsonl"), "dataset_name": str(tmp_path / "rows.jsonl")}
    env = load_environment("wiki-search", args)
    calls: list[Any] = [
        call_tool("search_pages", query="mill"),
        call_tool("view_sections", page_id="Old Mill"),
        call_tool("read_section", section_id="old_mill:use"),
        call_tool("view_sections", page_id="bare"),
        "Answer: Rye",
    ]
    [rollout] = play(env, env.rows()[:1], lambda _: lambda messages: calls[turn_of(messages)])
    reported = [m["content"] for m in rollout.completion if m["role"] == "tool"]
    assert reported[0] == '[{"page_id": "old_mill", "title": "Old Mill"}]' and reported[2] == "It ground rye."
    assert "bare:full" in reported[3] and rollout.reward == 1.0


def test_unreachable_judge_fails_the_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    from scripted_client import ScriptedClient

    with pytest.raises(ValueError, match="JUDGE_KEY"):
        load_environment("wiki-search", {"judge_model": "j", "judge_api_key_var": "JUDGE_KEY"})
    monkeypatch.setenv("JUDGE_KEY", "k")
    args = {"judge_model": "j", "judge_api_key_var": "JUDGE_KEY", "judge_base_url": "http://127.0.0.1:9/v1"}
    env = load_environment("wiki-search", args)
    [judge] = [rubric for rubric in env.env.rubric.rubrics if hasattr(rubric, "judge_client")]  # type: ignore[attr-defined]
    judge.judge_client.max_retries = 0
    import anyio

    [failed] = anyio.run(env.run_group, env.rows()[0], ScriptedClient(lambda _: "Answer: x"), "m", [{}])
    assert failed.failed and "judge j could not be asked" in str(failed.error)
    for verdict, reward in (("Yes.", 1.0), ("no", 0.0)):
        judge.class_objects["judge_client"] = judge.judge_client = ScriptedClient(lambda _, v=verdict: v)
        [rollout] = anyio.run(env.run_group, env.rows()[0], ScriptedClient(lambda _: "Answer: x"), "m", [{}])
        assert rollout.reward == reward and not rollout.failed


def test_files_with_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("crane\neerie\n", encoding="utf-8-sig")
    env = load_environment("wordle", {"words": str(path), "held_out_words": False})
    assert {row["answer"] for row in env.rows()} == {"crane", "eerie"}
    path.write_text("; 0\n#####\n#@$.#\n#####\n", encoding="utf-8-sig")
    load_environment("sokoban-env", {"num_train_examples": 1, "num_eval_examples": 1})
    assert len(sys.modules["sokoban_levels"].read_boxoban(path)) == 1


# real data, when it is there ----------------------------------------------------------------------------------------


@pytest.mark.skipif(not (DATA / "gsm8k").is_dir(), reason="no gsm8k data; cure: make test DATA=<its parent folder>")
def test_all_of_gsm8k() -> None:
    env = load_environment("gsm8k", {"data_dir": str(DATA / "gsm8k")})
    rows = [*env.rows(), *env.rows("eval")]
    assert (len(env.rows()), len(env.rows("eval"))) == (7473, 1319)
    rollouts = play(env, rows, lambda row: lambda _: f"\\boxed{{{row['answer']}}}")
    assert {rollout.reward for rollout in rollouts} == {1.0}


@pytest.mark.skipif(not (DATA / "boxoban").is_dir(), reason="no boxoban data; cure: make test DATA=<its parent folder>")
def test_boxoban_levels_are_read_and_solved() -> None:
    args = {"levels": str(DATA / "boxoban"), "num_train_examples": 2000, "num_eval_examples": 250}
    env = load_environment("sokoban-env", args)
    levels = sys.modules["sokoban_levels"]
    for path in sorted((DATA / "boxoban").glob("*.txt")):
        read = levels.read_boxoban(path)
        assert len(read) == 1000 and all(len(level.boxes) == len(level.goals) == 4 for level in read)
    solved = [(row, levels.solve(levels.parse_level(info_of(row)["level"]), 3000)) for row in env.rows()[:40]]
    solved = [(row, moves) for row, moves in solved if moves]
    assert len(solved) >= 20
    answers = {row["example_id"]: moves for row, moves in solved}
    rows = [row for row, _ in solved]
    rollouts = play(env, rows, lambda row: lambda _: f"<answer>{answers[row['example_id']]}</answer>")
    assert {rollout.reward for rollout in rollouts} == {1.0}


# wrong arguments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("alphabet-sort", {"min_turns": 4}, "min_turns 4 and max_turns 3"),
        ("alphabet-sort", {"names": ["ada park"]}, "write names like AdaPark"),
        ("alphabet-sort", {"names": ["AdaPark"]}, "the list has only 1"),
        ("wordle", {"words": "nowhere.txt"}, "no such file"),
        ("wordle", {"words": ["ab", "abc"]}, "same number of letters"),
        ("wordle", {"max_guesses": 0}, "max_guesses 0"),
        ("wiki-search", {"corpus": "x"}, "go together"),
        ("wiki-search", {"tools": ["google"]}, "tools google"),
        ("sokoban-env", {"min_w": 6}, "min_w 6 and max_w 5"),
        ("sokoban-env", {"levels": "nowhere"}, "no such file"),
        ("sokoban-env", {"min_w": 3, "max_w": 3, "min_h": 3, "max_h": 3, "num_train_examples": 5000}, "found only"),
        ("gsm8k", {"data_dir": "nowhere"}, "train.jsonl"),
        ("gsm8k", {"data_dir": "x", "dataset_name": "y"}, "give one of them"),
        ("hendrycks-math", {"no_such": 1}, "takes no argument 'no_such'"),
    ],
)
def test_invalid_arguments_raise_a_clear_error(name: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_environment(name, args)


@pytest.mark.parametrize("name", ["alphabet-sort", "wordle", "wiki-search", "gsm8k", "hendrycks-math"])
def test_rows_for_a_warm_up_are_right_answers(environments: Any, name: str) -> None:
    environments(name)
    rows = sys.modules[name.replace("-", "_")].build_sft_examples(20)
    assert len(rows) == 20
    for row in rows:
        messages = row.get("messages") or [*row["prompt"], *row["completion"]]
        assert messages[-1]["role"] == "assistant" and messages[-1]["content"]
        json.dumps(row)
