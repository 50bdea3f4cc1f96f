"""Rows of data sets: files, directories of them with subsets and splits, folders of `save_to_disk`, or a hub."""

from __future__ import annotations

import codecs
import csv
import json
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rollouts.training.shipped import find_file

Row = Mapping[str, Any]

SAVED_DATASET = "state.json"
"""Lists the files of one split in a folder of `save_to_disk`."""
METADATA = frozenset(["dataset_info.json", "dataset_infos.json", "dataset_dict.json", SAVED_DATASET])
OTHER_SPLITS = frozenset("test validation valid val dev eval".split())
"""Words in names of files that do not belong to the split "train"."""
ROLLOUTS = "rollouts"
"""Folder of all rollouts, kept or dropped, beside the files of `synthesize`."""
JSON_COLUMNS = frozenset(["messages", "conversations", "tools", "chat_template_kwargs", "info"])
"""CSV columns with JSON values; `info` may be text or a number as well, which is then text."""
MAX_CSV_CELL = 2**30

NO_SUCH_PART = re.compile("Config name is missing|BuilderConfig '.*' not found|Unknown split")
"""How errors of `datasets` begin whose cure is another subset or split, which they list in their first two lines."""
ROWS_PER_READ = 1024
"""Rows per read of a parquet file or a data set of the hub."""


def load_rows(name: str, split: str = "train", subset: str | None = None) -> list[Row]:
    """`iter_rows` as a list."""
    return list(iter_rows(name, split, subset))


def iter_rows(name: str, split: str = "train", subset: str | None = None) -> Iterator[Row]:
    """Stream the rows of a data file, of a directory of such files, or of a data set on the hub.

    Files are .jsonl, .json (a list of objects, or lines), .csv, .parquet, .txt (one `text` per line) and .arrow; a
    folder of `datasets`' `save_to_disk` is read by its own list of files. In other directories, subset S is the
    directory `S/` or the file `S.jsonl`, and split T the files `T.*` and `T-*` or the directory `T/`; if no file name
    contains a split, all files belong to `train`. So do all files of `synthesize`, which have names of environments.
    `ValueError` if the data set does not exist or is empty, or names the line that is invalid.
    """
    path = find_file(name)
    rows: Iterator[Row]
    if path.exists():
        rows = (row for file in find_files(name, split, subset) for row in _READERS[file.suffix](file))
    elif path.suffix in _READERS or name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise ValueError(f"data set {name!r} was not found: {SOURCES}")
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
            raise ValueError(f"{name} is no data set: use a file that ends in {ENDINGS}")
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
    if (path / SAVED_DATASET).is_file() and split != "train":
        raise ValueError(f"{path} is one saved data set, which has no split {split!r}: leave it out")
    files = _files_of_split(path, split)
    if not files:
        raise ValueError(f"{path} holds no split {split!r}: it needs {split}.jsonl, {split}-*.parquet or {split}/")
    return files


def _files_of_split(path: Path, split: str) -> list[Path]:
    if (path / split).is_dir():
        return _data_files(path / split)
    folders = _data_files(path), _data_files(path / "data")
    named = (files for files in folders if any(file.suffix != ".txt" or split in _words(file) for file in files))
    files = next(named, folders[0] or folders[1])  # a license is text, too
    chosen = [file for file in files if file.stem == split or file.stem.startswith(f"{split}-")]
    if split != "train":
        return chosen
    words = {file: _words(file) for file in files}
    others = [file for file in files if _is_synthesized(file) or not words[file] & OTHER_SPLITS]
    if any(map(_is_synthesized, files)):
        return others
    return chosen or [file for file in files if split in words[file]] or others


def _words(file: Path) -> set[str]:
    return set(re.split(r"[-_.]", file.stem.lower()))


def _is_synthesized(file: Path) -> bool:
    return (file.parent / ROLLOUTS / file.stem / "results.jsonl").is_file()


def _data_files(path: Path) -> list[Path]:
    """The data files of a directory; without .txt files (such as a license) if there are others."""
    if not path.is_dir():
        return []
    if (path / SAVED_DATASET).is_file():  # beside its files there may be caches of `map`
        return [path / entry["filename"] for entry in json.loads((path / SAVED_DATASET).read_bytes())["_data_files"]]
    files = sorted(file for file in path.iterdir() if file.suffix in _READERS and file.name not in METADATA)
    return [file for file in files if file.suffix != ".txt"] or files


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


def _iter_json(path: Path) -> Iterator[Row]:
    """A list of objects, or, as often under this name, one object per line."""
    data = path.read_bytes()
    try:
        rows = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        if data.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            raise ValueError(f"{path} is not valid JSON: {error}") from error
        yield from _iter_jsonl(path)
        return
    if isinstance(rows, dict):
        rows = rows.get("data", [rows])
    if not isinstance(rows, list):
        raise ValueError(f"{path} is no list of JSON objects")
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"{path}, row {number} is no JSON object")
        yield row


def _iter_csv(path: Path) -> Iterator[Row]:
    """Rows under a header line; cells of `JSON_COLUMNS` are JSON."""
    csv.field_size_limit(MAX_CSV_CELL)
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, strict=True)
        try:
            for row in reader:
                where = f"{path}, line {reader.line_num}"
                if None in row or None in row.values():
                    raise ValueError(f"{where} has not as many cells as the header, which has {len(row)}")
                yield {name: _parse_cell(cell, name, where) for name, cell in row.items()}
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path}, line {reader.line_num} is not valid CSV: {error}") from error


def _parse_cell(cell: str, name: str, where: str) -> Any:
    if name not in JSON_COLUMNS or not cell.strip():
        return cell if name not in JSON_COLUMNS else None
    is_text = name == "info" and not cell.lstrip().startswith(("{", "["))
    try:
        value = json.loads(cell)
        return cell if is_text and value is not None and not isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        if is_text:
            return cell
        raise ValueError(f"{where}: column {name!r} is not valid JSON: {error}") from error


def _iter_text(path: Path) -> Iterator[Row]:
    """One row `{"text"}` per line that is not empty."""
    with path.open(encoding="utf-8-sig") as lines:
        try:
            yield from ({"text": text} for line in lines if (text := line.rstrip("\r\n")).strip())
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is no UTF-8 text: {error}") from error


def _iter_arrow(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
    except ImportError as error:
        raise _missing_pyarrow(path) from error
    try:
        with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as batches:
            for batch in batches:
                yield from _iter_batch(batch)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no file of save_to_disk: {error}") from error


def _iter_batch(batch: Any) -> Iterator[Row]:
    """Rows of a record batch of pyarrow as they were before Arrow gave them one schema."""
    for row in batch.to_pylist():
        yield {field.name: _restore(row[field.name], field.type) for field in batch.schema}


def _restore(value: Any, kind: Any) -> Any:
    """A value of Arrow type `kind`: JSON text is parsed, and structs lose their nulls, which stand for missing keys."""
    if value is not None and getattr(kind, "extension_name", None) == "arrow.json":
        return json.loads(value)
    if isinstance(value, dict) and kind.num_fields:
        return {field.name: _restore(value[field.name], field.type) for field in kind if value[field.name] is not None}
    item: Any = getattr(kind, "value_type", None)
    if isinstance(value, list) and item is not None and (item.num_fields or hasattr(item, "extension_name")):
        return [_restore(part, item) for part in value]
    return value


def _missing_pyarrow(path: Path) -> ValueError:
    return ValueError(f"{path}: reading it needs pyarrow (pip install pyarrow), or convert it to JSONL")


def _iter_parquet(path: Path) -> Iterator[Row]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise _missing_pyarrow(path) from error
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=ROWS_PER_READ):
                yield from _iter_batch(batch)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no parquet file: {error}") from error


_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _iter_jsonl,
    ".json": _iter_json,
    ".csv": _iter_csv,
    ".parquet": _iter_parquet,
    ".arrow": _iter_arrow,
    ".txt": _iter_text,
}
ENDINGS = ", ".join(_READERS)
SOURCES = f"give a file ({ENDINGS}), a folder, or a hub id (owner/name, or name)"


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
        if NO_SUCH_PART.match(str(error)):
            raise ValueError(
                f"data set {name!r} has no such subset or split ({' '.join(str(error).splitlines()[:2])}): set subset "
                "and split, of `sft` data.subsets and data.split"
            ) from error
        hint = "" if "/" in name else f"; {SOURCES}"
        raise ValueError(f"data set {name!r} is no file and {describe_hub_error(error)}{hint}") from error
    for table in rows.with_format("arrow").iter(ROWS_PER_READ):
        for batch in table.to_batches():
            yield from _iter_batch(batch)


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


def parse_text(value: Any, column: str, what: str = "JSON") -> Any:
    """A value as it is, unless it is given as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"`{column}` is text, but not {what}: {error}") from error


def read_list(value: Any, column: str, items: str = "messages") -> list[Any]:
    """A list, or the list that is given as JSON text."""
    value = parse_text(value, column, f"the JSON of a list of {items}")
    if not isinstance(value, list):
        raise ValueError(f"`{column}` is a {type(value).__name__}: it must be a list of {items}")
    return value
