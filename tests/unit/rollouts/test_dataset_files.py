"""Prompts of data sets, and samples in files."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.training.datasets import (
    export_samples_to_huggingface_format,
    export_samples_to_jsonl,
    load_dataset_with_answers,
    load_rl_prompts,
    load_samples_from_jsonl,
)
from rollouts.training.datasets.rows import load_rows
from rollouts.training.types import Sample, Status

USER, ANSWER = {"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_prompts_of_every_format(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a"},
        {"question": "b", "answer": "1"},
        {"problem": "c"},
        {"instruction": "d"},
        {"prompt": [USER]},
        {"messages": [USER, ANSWER, USER, ANSWER]},
        {"messages": [USER]},
        {"messages": [USER, ANSWER, USER]},
        {"messages": json.dumps([USER, ANSWER])},
    ]
    name = write(tmp_path / "rows.jsonl", rows)
    turns = [USER, ANSWER, USER]
    assert load_rl_prompts(name) == ["a", "b", "c", "d", [USER], turns, [USER], turns, [USER]]
    assert load_rl_prompts(name, max_prompts=2) == ["a", "b"]


def test_prompts_with_answers(tmp_path: Path) -> None:
    name = write(tmp_path / "rows.jsonl", [{"question": "b", "answer": "1"}, {"problem": "c", "solution": "2"}])
    assert load_dataset_with_answers(name) == [{"prompt": "b", "answer": "1"}, {"prompt": "c", "answer": "2"}]


def test_rows_that_ask_nothing_are_named(tmp_path: Path) -> None:
    for row, sentence in [
        ({"text": "x"}, "row 0 of the data set has the columns text: a prompt is one of prompt, question"),
        ({"messages": [ANSWER]}, "row 0 of the data set has no message before the assistant's"),
        ({"messages": "[{"}, "row 0 of the data set: `messages` is text, but not the JSON of a list of messages"),
        ({"messages": ["a"]}, "row 0 of the data set: `messages` has entries that are no messages"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            load_rl_prompts(write(tmp_path / "rows.jsonl", [row]))
    with pytest.raises(ValueError, match="an answer is one of"):
        load_dataset_with_answers(write(tmp_path / "rows.jsonl", [{"prompt": "x"}]))
    with pytest.raises(ValueError, match="max_prompts 0"):
        load_rl_prompts("x", max_prompts=0)


finite = st.floats(-1e6, 1e6)
texts = st.text(st.characters(exclude_categories=["Cs"]))


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    n = draw(st.integers(0, 5))

    def stream(values: st.SearchStrategy[float]) -> st.SearchStrategy[list[float] | None]:
        return st.none() | st.lists(values, min_size=n, max_size=n)

    return Sample(
        prompt=draw(texts | st.just([USER])),
        response=draw(texts),
        tokens=draw(st.lists(st.integers(0, 2**31), min_size=n, max_size=n)),
        loss_mask=draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=n, max_size=n)),
        reward=draw(finite),
        group_index=draw(st.none() | st.integers(0, 2**40)),
        index=draw(st.none() | st.integers(0, 100)),
        metadata=draw(st.dictionaries(texts, finite | texts | st.booleans() | st.none())),
        inference_logprobs=draw(stream(finite)),
        status=draw(st.sampled_from(Status)),
        error=draw(st.none() | texts),
        temperature=draw(st.floats(0, 2)),
        advantages=draw(stream(finite)),
        teacher_logprobs=draw(stream(finite)),
        versions=draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)))),
    )


@given(st.lists(samples(), max_size=3))
def test_samples_survive_dicts_and_files(tmp_path_factory: pytest.TempPathFactory, given_samples: list[Sample]) -> None:
    path = tmp_path_factory.mktemp("samples") / "samples.jsonl"
    assert export_samples_to_jsonl(given_samples, path, include_tokens=True) == len(given_samples)
    assert load_samples_from_jsonl(path) == given_samples
    for sample in given_samples:
        row = json.loads(json.dumps(sample.to_dict()))
        before = json.dumps(row)
        assert Sample.from_dict(row) == sample and json.dumps(row) == before


def test_samples_of_earlier_versions_are_read(tmp_path: Path) -> None:
    sample = Sample("p", reference_weight=0.5)
    row = sample.to_dict()
    row["anchor"] = row.pop("reference_weight")
    (tmp_path / "samples.jsonl").write_text(json.dumps(row))
    assert load_samples_from_jsonl(tmp_path / "samples.jsonl") == [sample] and "anchor" in row


def test_metadata_of_other_types_becomes_plain_data() -> None:
    metadata = {"score": np.float32(0.5), "ppl": math.inf, "parts": [float("nan"), np.arange(2)], "path": Path("/a")}
    data = json.loads(json.dumps(Sample("p", metadata=metadata).to_dict(), allow_nan=False))
    assert data["metadata"] == {"score": 0.5, "ppl": None, "parts": [None, [0, 1]], "path": "/a"}
    assert Sample.from_dict(data).metadata == data["metadata"]


def test_missing_numbers_of_a_prompt_row_become_none() -> None:
    row = {"prompt": "p", "year": float("nan"), "info": {"limits": [1.5, -math.inf]}}
    data = json.loads(json.dumps(Sample(row).to_dict(), allow_nan=False))
    assert data["prompt"] == {"prompt": "p", "year": None, "info": {"limits": [1.5, None]}}


def test_per_token_lists_are_written_on_request(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "samples.jsonl"
    export_samples_to_jsonl([Sample("p", "r", [1, 2], [0.0, 1.0], 0.5, inference_logprobs=[0.0, -1.0])], path)
    row = json.loads(path.read_text())
    assert not {"tokens", "loss_mask", "inference_logprobs"} & set(row) and row["reward"] == 0.5
    assert load_samples_from_jsonl(path) == [Sample("p", "r", reward=0.5)]


def test_conversations_are_exported_once(tmp_path: Path) -> None:
    path, metadata = tmp_path / "rows.jsonl", {"score": np.float32(0.5)}
    prompts: list[tuple[Any, str]] = [("ab", "ba"), ([USER], "ba"), ([USER, ANSWER], ""), ({"question": "ab"}, "ba")]
    export_samples_to_huggingface_format([Sample(*pair, metadata=metadata) for pair in prompts], path)
    assert load_rows(str(path)) == [{"messages": [USER, ANSWER], "metadata": {"score": 0.5}}] * 4


def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text('{"prompt": "ä"}\n', encoding="utf-8-sig")
    assert load_samples_from_jsonl(path) == [Sample("ä")]


@pytest.mark.parametrize(
    ("error", "names"),
    [
        (
            "Config name is missing.\nPlease pick one of: ['main', 'socratic']\nExample of usage:\n\tload()",
            "'socratic'",
        ),
        ("BuilderConfig 'mian' not found. Available: ['main', 'socratic']", "'socratic'"),
        ("Unknown split \"train\". Should be one of ['train_sft', 'test_sft'].", "'test_sft'"),
    ],
)
def test_a_hub_set_without_the_part_names_its_parts(error: str, names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: object, **options: object) -> None:
        raise ValueError(error)

    module = SimpleNamespace(load_dataset=load_dataset, config=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "datasets", module)
    sentence = (
        rf"'owner/math' has no such subset or split \(.*{names}.*\): set subset and split, of `sft` data\.subsets"
    )
    with pytest.raises(ValueError, match=sentence) as found:
        load_rows("owner/math")
    assert "Example" not in str(found.value)


def test_a_failed_export_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    export_samples_to_jsonl([Sample("p")], path)
    with pytest.raises(AttributeError):
        export_samples_to_jsonl([Sample("q"), None], path)  # type: ignore[list-item]
    assert load_samples_from_jsonl(path) == [Sample("p")] and [p.name for p in tmp_path.iterdir()] == ["samples.jsonl"]


def test_a_line_that_is_no_sample_is_named(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    for line, sentence in [
        ('{"prompt": "p", "colr": 1}', r"line 2: unknown field\(s\) of a sample: colr"),
        ('{"prompt": 3}', "line 2: not a sample"),
        ("[1]", "line 2: "),
        ("{", "line 2: "),
    ]:
        path.write_text('{"prompt": "p"}\n' + line + "\n")
        with pytest.raises(ValueError, match=sentence):
            load_samples_from_jsonl(path)
