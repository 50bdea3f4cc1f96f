"""Writes AQuA-RAT as JSON lines to the base directory: from published files, from the hub, or generated.

python -m scripts.prepare_aqua                          # the hub's dataset, or generated problems without a network
python -m scripts.prepare_aqua --data_dir=AQuA          # {train,dev,test}.json of a checkout
python -m scripts.prepare_aqua --synthetic --max-train 5000 --difficulty 1
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from prime_rl.configuration.command import run_command
from prime_rl.utils.pydantic_config import BaseConfig

SPLITS = ("train", "validation", "test")
MANIFEST = "manifest.json"


class PrepareAquaConfig(BaseConfig):
    """Source, size and destination of the data."""

    spellings: ClassVar[dict[str, str]] = {"output": "output_dir"}

    output_dir: str | None = None
    """Folder to write to; unset: `aqua` in the base directory, where the environment looks."""
    data_dir: str | None = None
    """Folder with published files; splits that it lacks are left out."""
    synthetic: bool = False
    """Make problems instead of reading them."""
    difficulty: int | None = None
    """Tier that made problems go up to, 0 to 3; unset: all."""
    templates: list[str] | None = None
    """Make problems of these families only."""
    seed: int = 42
    """Of made problems."""
    max_train: int = -1
    """Most rows of the train split; -1: all there are, or 2000 made ones."""
    max_validation: int = 254
    """Most rows of the validation split."""
    max_test: int = 254
    """Most rows of the test split."""
    cache_dir: str | None = None
    """Where the hub's files are kept."""


def prepare(config: PrepareAquaConfig) -> int:
    """Write `<split>.jsonl` and a manifest; the exit code. Earlier files of other splits are moved to `attempts/N`."""
    from nanochat.common import get_base_dir
    from prime_rl.runtime.run_dir import RunDir

    folder = Path(config.output_dir or get_base_dir() / "aqua").expanduser()
    source, read = choose_source(config, folder)
    found = {split: rows for split in SPLITS if (rows := read(split, getattr(config, f"max_{split}"))) is not None}
    if not found:
        raise ValueError(
            f"{source} has none of {', '.join(SPLITS)}: give a folder with train.json, dev.json or test.json"
        )
    missing = [split for split in SPLITS if split not in found]
    if archived := RunDir(folder).archive(folder / f"{split}.jsonl" for split in missing):
        print(f"note: files of other data moved to {archived}")
    for split in SPLITS:
        if split in missing:
            print(f"{split}: not in {source}")
            continue
        write_rows(folder / f"{split}.jsonl", found[split])
        print(f"{split}: {len(found[split])} rows -> {folder / f'{split}.jsonl'}")
    manifest = {"source": source, "rows": {k: len(v) for k, v in found.items()}, "config": config.model_dump()}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return 0


Read = Callable[[str, int], list[dict[str, Any]] | None]


def choose_source(config: PrepareAquaConfig, target: Path) -> tuple[str, Read]:
    """Name of the source, and a function to its first raw rows of a split (None for a missing split).

    `ValueError` if the hub cannot be reached and `target` has data that generated problems would replace.
    """
    from environments.nanochatAquaRat import aqua_files

    if config.data_dir is not None and config.synthetic:
        raise ValueError("data_dir and synthetic exclude each other: leave one out")
    if config.data_dir is not None:
        folder = Path(config.data_dir).expanduser()
        return str(folder), lambda split, most: read_published(folder, split, most)
    if config.synthetic:
        return "made", lambda split, most: make_rows(config, split, most)
    try:
        raw = {split: aqua_files.read_hub(split, config.cache_dir)[0] for split in SPLITS}
    except Exception as error:  # the hub raises a dozen kinds: offline, blocked, moved, full disk
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if has_real_data(target):
            raise ValueError(
                f"the hub cannot be reached ({reason}) and {target} has AQuA-RAT already: nothing was changed; "
                "--synthetic replaces it by generated problems"
            ) from error
        print(f"the hub cannot be reached ({reason}): making problems instead; --data_dir reads published files")
        return "made", lambda split, most: make_rows(config, split, most)
    return "hub", lambda split, most: [to_raw(row) for row in raw[split][: most if most >= 0 else None]]


def has_real_data(folder: Path) -> bool:
    """Whether a folder has splits that are not known to be generated."""
    if not any((folder / f"{split}.jsonl").is_file() for split in SPLITS):
        return False
    manifest = folder / MANIFEST
    return not manifest.is_file() or json.loads(manifest.read_text(encoding="utf-8")).get("source") != "made"


def read_published(folder: Path, split: str, most: int) -> list[dict[str, Any]] | None:
    """Valid rows of a published file, in the published form."""
    from environments.nanochatAquaRat.aqua_files import find_file, read_file

    path = find_file(folder, split)
    if path is None:
        return None
    rows, num_broken = read_file(path)
    if num_broken:
        print(f"{path}: left out {num_broken} rows without a question, options A to E or a right letter")
    return [to_raw(row) for row in rows[: most if most >= 0 else None]]


def make_rows(config: PrepareAquaConfig, split: str, most: int) -> list[dict[str, Any]]:
    """Generated problems of a split; splits are disjoint."""
    from environments.nanochatAquaRat.aqua_problems import build_problems

    number = most if most >= 0 else {"train": 2000}.get(split, 254)
    return build_problems(
        number, split=split, seed=config.seed, difficulty=config.difficulty, templates=config.templates
    )


def to_raw(row: dict[str, Any]) -> dict[str, Any]:
    """A row in the published form; conversations are unchanged."""
    if "messages" in row:
        said = [{"role": "assistant", "content": row["rationale"]}] if row["rationale"] else []
        return {"messages": [*row["messages"], *said], "answer_letter": row["correct"], "letters": list(row["options"])}
    options = [f"{letter}){text}" for letter, text in row["options"].items()]
    kept = {"question": row["question"], "options": options, "rationale": row["rationale"], "correct": row["correct"]}
    return kept if row["source"] == "aqua_rat" else {**kept, "template": row["source"]}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write JSON lines atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".tmp-{path.name}")
    aside.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    aside.replace(path)


if __name__ == "__main__":
    run_command("prepare_aqua", PrepareAquaConfig, prepare, summary=str(__doc__).splitlines()[0])
