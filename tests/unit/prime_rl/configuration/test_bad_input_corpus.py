"""Size of the corpus of invalid input, and its data sets."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from rollouts.training.datasets.rows import load_rows

DATA_SETS: list[tuple[str, bytes, tuple[str, ...], str]] = [
    ("rows.jsonl", b"", (), "holds no rows"),
    ("rows.jsonl", b"{", (), r"rows\.jsonl"),
    ("rows.jsonl", b"[1]\n", (), r"rows\.jsonl"),
    ("rows.jsonl", b'{"a": 1}\n{"a"', (), r"rows\.jsonl"),
    ("rows.jsonl", b"\x80\xff\n", (), r"rows\.jsonl"),
    ("rows.parquet", b"PAR1 not really", (), r"rows\.parquet"),
    ("rows.pickle", b"x", (), "is no data set: use a file that ends in"),
    ("rows.jsonl", b'{"a": 1}\n', ("test",), "which has no split 'test'"),
    ("rows.jsonl", b'{"a": 1}\n', ("train", "math"), "which has no subset 'math'"),
]


@pytest.mark.parametrize(("name", "content", "part", "words"), DATA_SETS)
def test_a_data_set_that_cannot_be_read_is_named(
    name: str, content: bytes, part: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=words):
        load_rows(str(tmp_path / name), *part)


def load_tests(name: str) -> ModuleType:
    """The module of a test file, wherever it is."""
    [path] = Path(__file__).parents[2].rglob(f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_corpus_is_large_and_every_case_has_its_sentence() -> None:
    """At least 150 distinct wrong configs, data sets, checkpoints and requests, each with the words that answer it."""
    configs = [(argv, " ".join(words)) for argv, words in load_tests("test_bad_input").CASES]
    configs += [(" ".join(options), words) for options, words in load_tests("test_sft_data").WRONG_SETTINGS]
    data = [(repr(case[:3]), case[3]) for case in DATA_SETS] + [
        (repr(row), w) for row, w in load_tests("test_sft_data").WRONG_ROWS
    ]
    data += [(name, sentence) for name, (_, sentence) in load_tests("test_library_bad_input").CASES.items()]
    checkpoints = [(f"{file} {how}", file) for file, how in load_tests("test_ckpt").DAMAGES]
    requests = [(f"{path} {body!r}", words) for path, body, words in load_tests("test_hostile_input").CASES]
    requests += [(f"chat {change!r}", words) for change, _, words in load_tests("test_server").REFUSALS]
    for part, least in ((configs, 50), (data, 30), (checkpoints, 15), (requests, 90)):
        assert len({case for case, _ in part}) == len(part) >= least
        assert all(len(words) >= 5 for _, words in part)
    assert len([*configs, *data, *checkpoints, *requests]) >= 150
