"""The prompt buffer."""

from __future__ import annotations

import codecs
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.training.datasets import DataBuffer, create_buffer_from_jsonl, load_prompts_from_jsonl

sizes = st.integers(1, 7)
takes = st.lists(st.integers(1, 20), min_size=1, max_size=6)


@given(sizes, takes, st.integers(0, 5))
def test_stream_is_independent_of_call_sizes(size: int, cuts: list[int], seed: int) -> None:
    whole, parts = DataBuffer(list(range(size)), seed=seed), DataBuffer(list(range(size)), seed=seed)
    assert whole.get_prompts(sum(cuts)) == [p for n in cuts for p in parts.get_prompts(n)]
    assert whole.save_state() == parts.save_state()
    assert 0 <= whole.sample_offset < size


@given(sizes, st.integers(1, 4))
def test_epochs_are_permutations_and_first_is_source_order(size: int, epochs: int) -> None:
    source = [f"p{i % 3}" for i in range(size)]  # equal prompts at different places are different prompts
    buffer = DataBuffer(source)
    assert buffer.get_prompts(size) == source
    for _ in range(epochs):
        assert Counter(buffer.get_prompts(size)) == Counter(source)
    assert (buffer.epoch_id, buffer.sample_offset) == (epochs + 1, 0)


@given(sizes, st.integers(0, 30), st.integers(1, 30), st.integers(1, 30))
def test_resumed_equals_uninterrupted(size: int, used: int, before: int, after: int) -> None:
    live, other = DataBuffer(list(range(size)), seed=3), DataBuffer(list(range(size)), seed=99)
    if used:
        other.get_prompts(used)  # loading into a used buffer is as good as into a new one
    live.get_prompts(before)
    other.load_state(json.loads(json.dumps(live.save_state())))
    assert live.get_prompts(after) == other.get_prompts(after)


def test_seeds_differ_from_the_second_epoch_on() -> None:
    def second_epoch(seed: int) -> list[int]:
        buffer = DataBuffer(list(range(20)), seed=seed)
        buffer.get_prompts(20)
        return buffer.get_prompts(20)

    assert second_epoch(1) != second_epoch(2)


def test_prompts_are_copies_and_the_source_stays() -> None:
    source = [{"messages": [{"content": "a"}]}, {"messages": [{"content": "b"}]}]
    buffer = DataBuffer(source)
    for prompt in buffer.get_prompts(7):
        prompt["messages"][0]["content"] = "spoilt"
    assert source == [{"messages": [{"content": "a"}]}, {"messages": [{"content": "b"}]}]


def test_the_state_of_another_dataset_is_refused() -> None:
    state = DataBuffer(["a", "b"]).save_state()
    with pytest.raises(ValueError, match="2 other prompts"):
        DataBuffer(["a", "c"]).load_state(state)
    with pytest.raises(ValueError, match="2 other prompts, this one has 3"):
        DataBuffer(["a", "b", "c"]).load_state(state)


@pytest.mark.parametrize("key", ["size", 1])
def test_the_fingerprint_is_that_of_other_processes(key: Any) -> None:
    def build(accepted: set[int], size: int = 2) -> DataBuffer:
        return DataBuffer([{"prompt": "a", "answer": accepted, "check": lambda x: x, "judge": object(), key: size}])

    assert list({0, 8}) != list({8, 0}), "two orders of one set, as those of text in two processes"
    build({0, 8}).load_state(build({8, 0}).save_state())
    for other in (build({0, 16}), build({0, 8}, size=3)):
        with pytest.raises(ValueError, match="other prompts"):
            other.load_state(build({0, 8}).save_state())


def test_the_fingerprint_is_that_of_earlier_versions() -> None:
    rows = ["é", {"prompt": "a", "info": {"b": [1, None], "a": float("nan")}, "file": Path("x"), "answer": {"pear"}}]
    assert DataBuffer(rows).fingerprint == "c26ca9549f5ebdb27f55b6a6ac0984ac"
    rows = [{"prompt": "a", "answer": {9, 10}, "levels": frozenset({3, 1}), "seen": set()}]
    assert DataBuffer(rows).fingerprint == "915c2d39fe990b784b18247f82aaba54"


@pytest.mark.parametrize("n", [0, -1])
def test_asking_for_nothing(n: int) -> None:
    with pytest.raises(ValueError, match="at least 1 prompt"):
        DataBuffer(["a"]).get_prompts(n)


def test_an_empty_dataset() -> None:
    with pytest.raises(ValueError, match="empty"):
        DataBuffer([]).get_prompts(1)


def test_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"question": "b"}\n"c"\n')
    assert load_prompts_from_jsonl(path) == ["a", {"question": "b"}, "c"]
    assert load_prompts_from_jsonl(path, limit=2) == ["a", {"question": "b"}]
    assert load_prompts_from_jsonl(path, limit=0) == []
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    assert load_prompts_from_jsonl(path, limit=1) == ["a"]
    assert create_buffer_from_jsonl(path, prompt_key="question", seed=1).get_prompts(2)[1] == "b"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n')
    assert load_prompts_from_jsonl(path) == ["a"], "a byte order mark is no text"
    path.write_text("{broken\n")
    with pytest.raises(ValueError, match=r"prompts\.jsonl:1 is not JSON"):
        load_prompts_from_jsonl(path)
