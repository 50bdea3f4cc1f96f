"""`load_sft_dataset`: row formats, loss masks and errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from prime_rl.runtime.tokenizer import load_tokenizer
from prime_rl.trainer.sft.samples import read_row
from rollouts.training.datasets import load_sft_dataset, prepare_sft_sample

USER, ASSISTANT = {"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}
FORMATS: list[dict[str, Any]] = [
    {"messages": [USER, ASSISTANT]},
    {"prompt": "ab", "completion": "cd"},
    {"prompt": [USER], "completion": [ASSISTANT]},
    {"instruction": "ab", "output": "cd"},
    {"instruction": "ab", "input": "", "output": "cd"},
    {"question": "ab", "answer": "cd"},
    {"conversations": [{"from": "human", "value": "ab"}, {"from": "gpt", "value": "cd"}]},
    {"conversations": [USER, ASSISTANT]},
    {"messages": json.dumps([USER, ASSISTANT])},
    {"conversations": json.dumps([{"from": "human", "value": "ab"}, {"from": "gpt", "value": "cd"}])},
]


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_all_formats_give_the_same_samples(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("tiny-qwen3")
    name = write(tmp_path / "rows.jsonl", FORMATS)
    samples = load_sft_dataset(name, tokenizer=tokenizer)
    assert len(samples) == len(FORMATS) and all(s.tokens == samples[0].tokens for s in samples)
    learned = [t for t, m in zip(samples[0].tokens, samples[0].loss_mask, strict=True) if m]
    assert tokenizer.decode(learned) == "cd<|im_end|>"
    assert [s.metadata for s in samples] == [{"dataset": name, "index": i} for i in range(len(FORMATS))]
    joined = write(tmp_path / "input.jsonl", [{"instruction": "ab", "input": "x", "output": "cd"}])
    [sample] = load_sft_dataset(joined, tokenizer=tokenizer)
    assert "ab\n\nx" in tokenizer.decode(sample.tokens)


def test_system_and_history_columns_come_before_the_prompt(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("tiny-qwen3")
    turns = [{"from": "human", "value": "ab"}, {"from": "gpt", "value": "cd"}]
    rows: list[Any] = [
        {"prompt": [{"role": "system", "content": "be"}, USER], "completion": "cd"},
        {"system": "be", "conversations": turns},
        {"system": "no", "conversations": [{"from": "system", "value": "be"}, *turns]},
        {"system": "be", "instruction": "ab", "output": "cd", "history": []},
        {"system": "be", "messages": [USER, {"role": "assistant", "content": "cd"}]},
        {"system": "be", "prompt": "ab", "completion": "cd"},
        {"system": "no", "prompt": [{"role": "developer", "content": "be"}, USER], "completion": "cd"},
        {"system": "be", "question": "ab", "answer": "cd"},
        {"prompt": [USER, {"role": "assistant", "content": "x"}, USER], "completion": "cd"},
        {"system": "", "instruction": "ab", "output": "cd", "history": [["ab", "x"]]},
        {"instruction": "ab", "output": "cd", "history": '[["ab", "x"]]'},
    ]
    samples = load_sft_dataset(write(tmp_path / "rows.jsonl", rows), tokenizer=tokenizer)
    assert all(s.tokens == samples[0].tokens and s.loss_mask == samples[0].loss_mask for s in samples[:8])
    assert all(s.tokens == samples[8].tokens and s.loss_mask == samples[8].loss_mask for s in samples[9:])
    assert samples[0].tokens != samples[8].tokens


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"question": "q", "answer": 42}, "`answer` is neither text nor a list"),
        ({"instruction": "q", "output": 42}, "`output` is neither text nor a list"),
        ({"instruction": "q", "output": "a", "system": 1}, "`system` is no text"),
        ({"instruction": "q", "output": "a", "history": ["qa", "x"]}, "`history` is no list of pairs"),
        ({"instruction": "q", "output": "a", "history": [["q", None]]}, "`history` is no list of pairs"),
        (
            {"instruction": "q", "output": "a", "history": "ab"},
            "`history` is text, but not the JSON of a list of pairs",
        ),
        ({"instruction": "q", "output": "a", "history": 5}, "`history` is no list of pairs"),
        ({"conversations": ["x"]}, "`conversations` is no list of turns"),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "tool", "value": "b"}, {"from": ["x"]}]},
            r"`conversations` has turns from 'tool', \['x'\]: `from` may be human, user, gpt, assistant, system; use",
        ),
    ],
)
def test_errors_name_the_column_of_the_row(row: dict[str, Any], words: str, tmp_path: Path) -> None:
    name = write(tmp_path / "rows.jsonl", [FORMATS[0], row])
    with pytest.raises(ValueError, match=f"row 1 of the data set: {words}"):
        load_sft_dataset(name, tokenizer=load_tokenizer("tiny-qwen3"))


def test_bounds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = load_tokenizer("tiny-qwen3")
    rows = [{"question": "a" * n, "answer": "b"} for n in (1, 60, 2)]
    name = write(tmp_path / "rows.jsonl", rows)
    kept = load_sft_dataset(name, tokenizer=tokenizer, max_length=60)
    assert [s.index for s in kept] == [0, 2]
    assert "1 rows" in caplog.text and "max_length = 60 tokens, the first is row 1: they are skipped" in caplog.text
    with pytest.raises(ValueError, match=r"3 rows .* more than max_length = 5 tokens, the first is row 0: raise it"):
        load_sft_dataset(name, tokenizer=tokenizer, max_length=5)
    assert [s.index for s in load_sft_dataset(name, tokenizer=tokenizer, max_samples=2)] == [0, 1]


def test_rows_without_a_turn_to_learn_are_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = load_tokenizer("tiny-qwen3")
    rows = [{"question": "a", "answer": ""}, {"messages": [USER]}]
    name = write(tmp_path / "rows.jsonl", [{"question": "a", "answer": "b"}, *rows])
    assert [s.index for s in load_sft_dataset(name, tokenizer=tokenizer)] == [0]
    assert "2 rows" in caplog.text and "the first is row 1: they are skipped" in caplog.text
    empty = write(tmp_path / "empty.jsonl", rows)
    with pytest.raises(ValueError, match=r"2 rows .* have no assistant message to learn, the first is row 0"):
        load_sft_dataset(empty, tokenizer=tokenizer)
    with pytest.raises(
        ValueError, match=r"1 rows .* max_length = 2 tokens, .*: raise it; 2 rows .* no assistant message"
    ):
        load_sft_dataset(name, tokenizer=tokenizer, max_length=2)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"conversations": 5}, "row 1 of the data set: `conversations` is a int: it must be a list of messages"),
        ({"messages": "ab"}, "row 1 of the data set: `messages` is text, but not the JSON of a list of messages"),
        ({"conversations": '"ab"'}, "row 1 of the data set: `conversations` is a str: it must be a list of messages"),
    ],
)
def test_wrong_columns_name_row_and_column(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    tokenizer = load_tokenizer("tiny-qwen3")
    name = write(tmp_path / "rows.jsonl", [FORMATS[0], row])
    with pytest.raises(ValueError, match=re.escape(words)):
        load_sft_dataset(name, tokenizer=tokenizer)
    with pytest.raises(ValueError, match=re.escape(words)):
        read_row(row, 1, tokenizer)


def test_the_history_of_a_response_may_be_rewritten() -> None:
    """A template with an empty reasoning block in answers after the last question only, as Qwen3's."""
    template = (
        "{% set ns = namespace(last=0) %}"
        "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think></think>{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = load_tokenizer("tiny-qwen3", template)
    history = [USER, {"role": "assistant", "content": "b"}, USER]
    sample = prepare_sft_sample(history, "d", tokenizer)
    learned = [t for t, m in zip(sample.tokens, sample.loss_mask, strict=True) if m]
    assert tokenizer.decode(learned) == "<think></think>d<|im_end|>"
    with pytest.raises(ValueError, match="max_length is 4: raise it"):
        prepare_sft_sample(history, "d", tokenizer, max_length=4)


def test_bad_input(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("tiny-qwen3")
    name = write(tmp_path / "rows.jsonl", [{"text": "plain"}])
    for call, sentence in [
        (lambda: load_sft_dataset(name), "needs a tokenizer"),
        (
            lambda: load_sft_dataset(name, tokenizer=tokenizer),
            "row 0 of the data set has the columns text.*`question` and `answer`",
        ),
        (lambda: load_sft_dataset(name, tokenizer=tokenizer, subset="main"), "no subset 'main'"),
        (lambda: load_sft_dataset(name, tokenizer=tokenizer, max_samples=0), "max_samples 0"),
        (lambda: load_sft_dataset(str(tmp_path / "no.jsonl"), tokenizer=tokenizer), "was not found"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            call()
