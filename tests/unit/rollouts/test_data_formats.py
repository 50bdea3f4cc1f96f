"""Rows from every kind of file: one data set, written in each format, reads the same; broken files name the line."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from rollouts.training.datasets.rows import load_rows

ROWS: list[dict[str, Any]] = [
    {"prompt": "abc", "completion": 'c, "b"\na'},
    {"prompt": "ä", "completion": "=1"},
    {"prompt": "", "completion": "x" * 200_000},
]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_json(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps(rows, indent=2, ensure_ascii=False), encoding="utf-8")


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


WRITERS = {"jsonl": write_jsonl, "json": write_json, "csv": write_csv, "parquet": write_parquet}


@pytest.mark.parametrize("kind", sorted(WRITERS))
def test_formats_read_alike(tmp_path: Path, kind: str) -> None:
    WRITERS[kind](tmp_path / f"rows.{kind}", ROWS)
    assert load_rows(str(tmp_path / f"rows.{kind}")) == ROWS
    WRITERS[kind](tmp_path / f"test.{kind}", ROWS[:1])
    assert load_rows(str(tmp_path), "test") == ROWS[:1]


def test_names_without_an_owner_are_on_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rollouts.training.datasets.rows._iter_hub", lambda *asked: iter([{"asked": asked}]))
    assert load_rows("gsm8k", "test", "main") == [{"asked": ("gsm8k", "test", "main")}]
    for name in ("gsm8k.jsonl", "a/b/c", "./gsm8k"):
        with pytest.raises(ValueError, match="was not found: give a file"):
            load_rows(name)


def test_names_that_the_hub_lacks_may_be_mistyped_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def load_dataset(*_: Any, **__: Any) -> Any:
        raise ConnectionError("offline")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pytest.importorskip("datasets"), "load_dataset", load_dataset)
    monkeypatch.setattr("rollouts.training.datasets.rows.is_hub_resolvable", lambda: True)
    with pytest.raises(ValueError, match=r"'my_data' is no file and .*\(offline\); give a file \(\.jsonl, .*a folder"):
        load_rows("my_data")
    with pytest.raises(ValueError, match=r"\(offline\)$"):
        load_rows("owner/name")


def test_json_may_hold_lines_or_data(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "lines.json", ROWS)
    assert load_rows(str(tmp_path / "lines.json")) == ROWS
    (tmp_path / "data.json").write_text(json.dumps({"data": ROWS}))
    assert load_rows(str(tmp_path / "data.json")) == ROWS


def test_json_columns_of_csv(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    write_csv(tmp_path / "rows.csv", [{"messages": json.dumps(messages), "tools": ""}])
    assert load_rows(str(tmp_path / "rows.csv")) == [{"messages": messages, "tools": None}]
    infos = ["a remark", "007", "NaN", '"Ox" is a word', {"level": 2}, [1], None, "text in JSON"]
    written = [{"info": json.dumps(info) if i > 3 else info} for i, info in enumerate(infos)]
    write_csv(tmp_path / "infos.csv", written)
    assert [row["info"] for row in load_rows(str(tmp_path / "infos.csv"))] == infos


def test_text_has_a_row_per_line(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_bytes("\ufeffone\r\n\n two\u2028three".encode())
    assert load_rows(str(tmp_path / "rows.txt")) == [{"text": "one"}, {"text": " two\u2028three"}]


def test_a_license_is_no_data(tmp_path: Path) -> None:
    write_csv(tmp_path / "train.csv", ROWS)
    (tmp_path / "LICENSE.txt").write_text("text")
    (tmp_path / "dataset_infos.json").write_text("{}")
    assert load_rows(str(tmp_path)) == ROWS
    (tmp_path / "data").mkdir()
    (tmp_path / "train.csv").rename(tmp_path / "data/train-0.csv")
    assert load_rows(str(tmp_path)) == ROWS
    (tmp_path / "train.txt").write_text("text")
    assert load_rows(str(tmp_path)) == [{"text": "text"}], "named as the split"


def test_folders_of_save_to_disk(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": str(i), "completion": str(i)} for i in range(25)]
    data = datasets.Dataset.from_list(rows)
    data.save_to_disk(str(tmp_path / "one"), num_shards=3)
    (tmp_path / "one" / "cache-1.arrow").write_bytes(b"a cache of map")
    assert load_rows(str(tmp_path / "one")) == rows
    datasets.DatasetDict(train=data, test=data.select([3, 1])).save_to_disk(str(tmp_path / "two"))
    assert load_rows(str(tmp_path / "two")) == rows
    assert load_rows(str(tmp_path / "two"), "test") == [rows[3], rows[1]]
    with pytest.raises(ValueError, match="one saved data set, which has no split 'test'"):
        load_rows(str(tmp_path / "one"), "test")


def write_calls(path: Path) -> list[dict[str, Any]]:
    """Rows whose tool calls and tools have different keys, as a JSONL file."""
    rows = []
    for name, arguments in (("add", {"a": 1, "b": 2}), ("weather", {"city": "Paris", "days": {"first": 1}})):
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        properties = {key: {"type": "string"} for key in arguments}
        tool = {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}
        rows.append({"messages": messages, "tools": [tool]})
    write_jsonl(path, rows)
    return rows


@pytest.mark.parametrize("kind", ["struct", "json"])
def test_arrow_rows_have_the_keys_of_json_rows(tmp_path: Path, kind: str) -> None:
    datasets = pytest.importorskip("datasets")
    rows = write_calls(tmp_path / "rows.jsonl")
    if kind == "json":
        file, cache = str(tmp_path / "rows.jsonl"), str(tmp_path / "cache")
        data = datasets.load_dataset("json", data_files=file, split="train", cache_dir=cache)
    else:
        data = datasets.Dataset.from_list(rows)
    data.save_to_disk(str(tmp_path / "saved"))
    data.to_parquet(str(tmp_path / "rows.parquet"))
    assert load_rows(str(tmp_path / "saved")) == rows
    assert load_rows(str(tmp_path / "rows.parquet")) == rows


def test_hub_rows_have_the_keys_of_json_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    rows = write_calls(tmp_path / "rows.jsonl")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list(rows))
    assert load_rows("owner/name") == rows


def test_null_columns_stay(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "tools": None}, {"prompt": "b", "tools": [[1, None]]}]
    write_parquet(tmp_path / "rows.parquet", rows)
    assert load_rows(str(tmp_path / "rows.parquet")) == rows


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "prompt,completion\na,b\nc\n", "line 3 has not as many cells as the header"),
        ("b.csv", "prompt,completion\na,b,c\n", "line 2 has not as many cells as the header"),
        ("c.csv", 'messages\n"[{"\n', "line 2: column 'messages' is not valid JSON"),
        ("d.csv", 'prompt\n"open\n', "is not valid CSV"),
        ("e.csv", "prompt,completion\n", "holds no rows"),
        ("f.json", "[1]", "row 0 is no JSON object"),
        ("g.json", '{"a": 1}\n{"a"\n', "line 2 is not valid JSON"),
        ("l.json", '[{"a": 1},\n {"a": 2},\n {"a" 3}]', r"l\.json is not valid JSON: .* line 3 column 7"),
        ("h.txt", "\n\n", "holds no rows"),
        ("i.arrow", "text", "is no file of save_to_disk"),
        ("j.yaml", "a: 1", "use a file that ends in .jsonl, .json, .csv"),
    ],
)
def test_broken_files_name_the_line(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_rows(str(tmp_path / name))
    assert "\n" not in str(caught.value)
