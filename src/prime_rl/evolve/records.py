"""Files of a search: recorded proposals, candidates with scores and diffs, and the best context."""

from __future__ import annotations

import difflib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollouts.training.files import replace_file
from rollouts.training.json_files import read_json_file
from rollouts.training.metrics import append_jsonl, load_jsonl, replace_jsonl

if TYPE_CHECKING:
    from prime_rl.evolve.search import Candidate, Search
    from prime_rl.runtime.run_dir import RunDir

FILES = ("candidates.jsonl", "best.md", "summary.json")
"""Result of a search, in the order in which they are written."""


class ProposalLog:
    """Proposals of earlier attempts by candidate number; `search_id` is a digest of everything that they depend on."""

    def __init__(self, path: Path, search_id: str, *, resume: bool) -> None:
        self._path, self._search_id = path, search_id
        rows = list(load_jsonl(path))
        self._texts = {row["number"]: row["text"] for row in rows if resume and row.get("search") == search_id}
        if not resume and path.exists():
            others = [row for row in rows if row.get("search") != search_id]
            replace_jsonl(path, others)

    def find(self, number: int) -> str | None:
        """The recorded proposal."""
        return self._texts.get(number)

    def add(self, number: int, text: str) -> None:
        """Append a proposal; it is on disk when this returns."""
        append_jsonl(self._path, [{"search": self._search_id, "number": number, "text": text}])
        self._texts[number] = text


def archive_search(run: RunDir, search_id: str, *, resume: bool) -> None:
    """Move the files of another search in the directory to `attempts/N`, and without `resume` those of this one."""
    files = [run.evolve / name for name in FILES]
    try:
        found = read_json_file(files[-1]).get("search")
    except (OSError, ValueError):  # none, or not readable
        found = None
    if (not resume or found != search_id) and (folder := run.archive(files)) is not None:
        sys.stdout.write(f"note: the result of an earlier search moved to {folder}\n")


def write_search(folder: Path, search: Search, search_id: str) -> None:
    """Write candidates.jsonl, best.md and summary.json, replacing those of the state before."""
    from prime_rl.evolve.search import find_front

    folder.mkdir(parents=True, exist_ok=True)
    front, best = find_front(search.accepted), search.best
    texts = {candidate.number: candidate.text for candidate in search.candidates}
    rows = [
        {**to_row(candidate, texts), "front": front.get(candidate.number, []), "best": candidate is best}
        for candidate in search.candidates
    ]
    summary = {
        "search": search_id,
        "best": best.number,
        "mean": best.mean,
        "initial_mean": search.candidates[0].mean,
        "candidates": len(rows),
        "rollouts": search.num_rollouts,
        "front": {str(number): wins for number, wins in front.items()},
    }
    contents = "".join(json.dumps(row) + "\n" for row in rows), best.text, json.dumps(summary, indent=1) + "\n"
    for name, content in zip(FILES, contents, strict=True):
        replace_file(folder / name, content)


def to_row(candidate: Candidate, texts: dict[int, str]) -> dict[str, Any]:
    """One line of candidates.jsonl; `diff` is a unified diff from the parent's text, without headers."""
    before = texts.get(candidate.parent, "") if candidate.parent is not None else ""
    lines = difflib.unified_diff(before.splitlines(), candidate.text.splitlines(), lineterm="")
    return {
        "number": candidate.number,
        "parent": candidate.parent,
        "status": candidate.status.value,
        "mean": candidate.mean,
        "minibatch": candidate.minibatch,
        "scores": {str(example): score for example, score in candidate.scores.items()},
        "text": candidate.text,
        "diff": "\n".join(list(lines)[2:]),
    }
