"""Finds and reads AQuA-RAT files, in their published or preprocessed form."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

HUB_NAME = "deepmind/aqua_rat"
LETTERS = "ABCDE"
ALIASES = {"validation": ("validation", "dev"), "dev": ("dev", "validation")}
ENDINGS = (".jsonl", ".json", ".tok.json")
OPTION = re.compile(r"\s*([A-E])\s*\)\s*(.*)", re.DOTALL)


def find_data_dir(data_dir: str | None, splits: Iterable[str]) -> Path | None:
    """The folder to read: what is given or an environment variable names, else what `prepare_aqua` wrote, or None.

    Raises `ValueError` when a folder that somebody named lacks the file of a split.
    """
    splits = list(splits)
    named = {"data_dir": data_dir} | {name: os.environ.get(name) for name in ("NANOCHAT_AQUA_DIR", "AQUA_DATA_DIR")}
    for name, given in named.items():
        if not given:
            continue
        folder = Path(given).expanduser()
        for split in splits:
            if find_file(folder, split) is None:
                raise ValueError(
                    f"{name} {folder}: it has no {split}.jsonl or {split}.json; name a split that is there, or write "
                    "all of them with prepare_aqua"
                )
        return folder
    base = os.environ.get("NANOCHAT_BASE_DIR") or "~/.cache/nanochat"
    folder = Path(base).expanduser() / "aqua"
    return folder if all(find_file(folder, split) for split in splits) else None


def find_file(folder: Path, split: str) -> Path | None:
    """The file of a split; "validation" and "dev" are the same, but a file of the given name comes first."""
    names = (f"{name}{ending}" for ending in ENDINGS for name in ALIASES.get(split, (split,)))
    return next((folder / name for name in names if (folder / name).is_file()), None)


def find_published(split: str) -> str:
    """The name of a split where "dev" is no name: on the hub, and of made problems."""
    return "validation" if split == "dev" else split


def read_file(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Rows of a JSON lines file or a JSON list, and how many were left out because no question can be made of them."""
    text = path.read_text(encoding="utf-8-sig")
    try:
        is_list = text.lstrip().startswith("[")
        raw = json.loads(text) if is_list else [json.loads(line) for line in text.split("\n") if line.strip()]
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON lines, and no JSON list: {error}") from error
    rows = [row for entry in raw if (row := read_row(entry)) is not None]
    if not rows:
        raise ValueError(f"{path}: none of its {len(raw)} rows has a question, options A to E and a correct letter")
    return rows, len(raw) - len(rows)


def read_hub(split: str, cache_dir: str | None) -> tuple[list[dict[str, Any]], int]:
    """Rows of the published dataset, from the hub or its cache, and how many were left out."""
    from datasets import load_dataset

    raw = list(load_dataset(HUB_NAME, "raw", split=find_published(split), cache_dir=cache_dir))
    rows = [row for entry in raw if (row := read_row(entry)) is not None]
    return rows, len(raw) - len(rows)


def read_row(entry: Any) -> dict[str, Any] | None:
    """question, options (letter -> text), correct, rationale, source of a published or prepared row; None if broken.

    A prepared row holds a conversation (`messages`) with its `answer_letter` and `letters`; its question is the
    conversation up to the assistant's answer, which is its rationale.
    """
    if not isinstance(entry, Mapping):
        return None
    if "messages" in entry:
        return _read_conversation(entry)
    options = dict(found for text in entry.get("options") or [] if (found := split_option(str(text))))
    question, correct = str(entry.get("question") or "").strip(), str(entry.get("correct") or "").strip()
    if not question or "".join(options) != LETTERS or correct not in options or not all(options.values()):
        return None
    source = "synthetic" if "template" in entry else "aqua_rat"
    rationale = str(entry.get("rationale") or "").strip()
    return {"question": question, "options": options, "correct": correct, "rationale": rationale, "source": source}


def split_option(text: str) -> tuple[str, str] | None:
    """("A", "125") of "A)125", also of "A ) 125"; the text may have parentheses of its own."""
    match = OPTION.fullmatch(text)
    return (match[1], match[2].strip()) if match else None


def _read_conversation(entry: Mapping[str, Any]) -> dict[str, Any] | None:
    messages, letters = list(entry["messages"] or []), list(entry.get("letters") or LETTERS)
    solution = messages.pop()["content"] if messages and messages[-1].get("role") == "assistant" else ""
    correct = entry.get("answer_letter")
    if not messages or correct not in letters:
        return None
    return {
        "messages": messages,
        "question": str(messages[-1].get("content") or ""),
        "options": dict.fromkeys(letters, ""),
        "correct": correct,
        "rationale": str(solution),
        "source": "prepared",
    }
