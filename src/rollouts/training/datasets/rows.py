"""Rows of data sets: JSONL and parquet files, directories of them with subsets and splits, or a hub."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rollouts.training.shipped import find_file

Row = Mapping[str, Any]

ROWS_PER_READ = 1024
"""Rows per read while streaming a parquet file."""


def load_rows(name: str, split: str = "train", subset: str | None = None) -> list[Row]:
    """`iter_rows` as a list."""
    return list(iter_rows(name, split, subset))


def iter_rows(name: str, split: str = "train", subset: str | None = None) -> Iterator[Row]:
    """Stream the rows of a JSONL or parquet file, of a directory of such files, or of a data set on the hub.

    In a directory, subset S is the directory `S/` or the file `S.jsonl`, and split T the files `T.*` and `T-*` or the
    directory `T/`; if no file name contains a split, all files belong to `train`. `ValueError` if the data set does not
    exist or is empty, or a line is not a JSON object.
    """
    path = find_file(name)
    rows: Iterator[Row]
    if path.exists():
        rows = (row for file in find_files(name, split, subset) for row in _READERS[file.suffix](file))
    elif path.suffix in _READERS or name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ValueError(f"data set {name!r} was not found: give a .jsonl or .parquet file, or a hub id (owner/name)")
    else:
        rows = _iter_hub(name, split, subset)
    is_empty = True
    for row in rows:
        is_empty = False
        yield row
    if is_empty:
        raise ValueError(f"data set {name!r} holds no rows")


def find_files(name: str, split: str = "train", subset: str | None = None) -> list[Path]:
    """The files of a split (and subset) of a local data set, in order of their names."""
    path = find_file(name)
    if path.is_file():
        if path.suffix not in _READERS:
            raise ValueError(f"{name} is no data set: use a file that ends in {', '.join(_READERS)}")
        if subset is not None:
            raise ValueError(f"data set {name!r} is a file here, which has no subset {subset!r}: leave it out")
        if split != "train":
            raise ValueError(f"data set {name!r} is a file here, which has no split {split!r}: name the file of it")
        return [path]
    if subset is not None:
        single = [path / f"{subset}{suffix}" for suffix in _READERS if (path / f"{subset}{suffix}").is_file()]
        if single and split == "train":
            return single[:1]
        if not (path / subset).is_dir():
            raise ValueError(f"{path} has no subset {subset!r}: it is neither {subset}/ nor {subset}.jsonl there")
        path = path / subset
    files = _files_of_split(path, split)
    if not files:
        raise ValueError(f"{path} holds no split {split!r}: it needs {split}.jsonl, {split}-*.parquet or {split}/")
    return files


def _files_of_split(path: Path, split: str) -> list[Path]:
    if (path / split).is_dir():
        return _data_files(path / split)
    files = _data_files(path) or _data_files(path / "data")
    chosen = [file for file in files if file.stem == split or file.stem.startswith(f"{split}-")]
    return chosen if chosen or split != "train" else files


def _data_files(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if file.suffix in _READERS) if path.is_dir() else []


def _iter_jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number} is not valid JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number} is no JSON object")
            yield row


def _iter_parquet(path: Path) -> Iterator[Row]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(
            f"{path}: reading parquet needs pyarrow (pip install pyarrow), or convert it to JSONL"
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=ROWS_PER_READ):
                yield from batch.to_pylist()
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no parquet file: {error}") from error


_READERS = {".jsonl": _iter_jsonl, ".parquet": _iter_parquet}


def _iter_hub(name: str, split: str, subset: str | None) -> Iterator[Row]:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"data set {name!r} is no file here, and reading it from the hub needs `datasets` (pip install datasets)"
        ) from error
    try:
        if not is_hub_resolvable():
            datasets.config.HF_HUB_OFFLINE = True  # skip half a minute of connection attempts
        rows = datasets.load_dataset(name, subset, split=split)
    except Exception as error:
        raise ValueError(f"data set {name!r} is no file and {describe_hub_error(error)}") from error
    yield from rows


def describe_hub_error(error: Exception) -> str:
    """Why a download from the hub failed: the name is unknown, access is refused, or the hub cannot be reached."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        problem = "needs access on the hub: request it there and set HF_TOKEN"
    elif isinstance(error, (ConnectionError, TimeoutError, errors.LocalEntryNotFoundError)):
        problem = "the hub could not be reached: check the network connection, or give a local path"
    elif isinstance(error, (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, FileNotFoundError)):
        problem = "was not found on the hub: check the name"
    else:
        problem = "could not be downloaded from the hub"
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return f"{problem} ({reason})"


def is_hub_resolvable() -> bool:
    """Whether the hub's host name can be resolved, or a proxy is configured."""
    if any(os.environ.get(key) for key in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    try:
        socket.getaddrinfo(urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname, 443)
    except OSError:
        return False
    return True
