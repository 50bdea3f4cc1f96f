"""Index over all rollouts of a run: columns and texts in a temporary SQLite database, full rows in the run's files."""

from __future__ import annotations

import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from prime_rl.monitor.local_runs import EvalDir, LocalRun, complete_lines, digest_first_line, is_replaced
from rollouts.training.metrics import AttemptSteps

Row = TypeVar("Row")
KINDS = ("training", "evaluation")
SORTS = ("step", "reward", "advantage", "tokens")
PREVIEW = 160
"""Characters of a prompt or completion in a list entry."""

SCHEMA = """
PRAGMA journal_mode = OFF;
CREATE TABLE rollouts (
  id INTEGER PRIMARY KEY, source INTEGER, attempt INTEGER, step INTEGER, env TEXT, group_index INTEGER, idx INTEGER,
  reward REAL, advantage REAL, status TEXT, tokens INTEGER, scored INTEGER, start INTEGER, size INTEGER,
  hidden INTEGER, prompt_key INTEGER);
CREATE INDEX by_group ON rollouts (step, group_index);
CREATE INDEX by_prompt ON rollouts (prompt_key);
CREATE TABLE texts (id INTEGER PRIMARY KEY, prompt TEXT, completion TEXT, searched TEXT);
CREATE TABLE logprobs (step INTEGER, group_index INTEGER, idx INTEGER, tokens INTEGER, attempt INTEGER, start INTEGER,
  size INTEGER);
CREATE INDEX by_step ON logprobs (step);
"""
"""`source` is 0 for training, else an evaluation; rows of abandoned attempts and of replaced or removed evaluations
are `hidden`."""


EQUAL_GROUPS = """SELECT source, step, group_index FROM rollouts WHERE NOT hidden AND reward IS NOT NULL
  GROUP BY source, step, group_index HAVING min(reward) = max(reward) AND count(*) > 1"""


class _Recorded(msgspec.Struct):
    """Key of a line of `trainer_logprobs.jsonl`."""

    step: int
    attempt: int = 0
    group_index: int | None = None
    index: int | None = None
    trainer_logprobs: msgspec.Raw = msgspec.Raw(b"")


class _Line(msgspec.Struct):
    """Indexed fields of a line of `samples.jsonl`; long lists are not parsed."""

    step: int = 0
    attempt: int = 0
    env: str | None = None
    group_index: int | None = None
    index: int | None = None
    prompt: Any = ""
    completion: Any = ""
    reward: float | None = None
    advantage: float | None = None
    status: str | None = None
    error: str | None = None
    tokens: msgspec.Raw = msgspec.Raw(b"")
    teacher_logprobs: msgspec.Raw = msgspec.Raw(b"")


class _Result(msgspec.Struct):
    """Indexed fields of a line of an evaluation's `results.jsonl`."""

    example_id: int = 0
    rollout_idx: int = 0
    prompt: Any = ""
    completion: Any = ""
    reward: float | None = None
    completion_len: int | None = None
    is_truncated: bool = False
    error: str | None = None

    def to_line(self, evaluation: EvalDir) -> _Line:
        """Convert to a line of samples; an example is a group."""
        return _Line(
            step=evaluation.step or 0,
            env=evaluation.env,
            group_index=self.example_id,
            index=self.rollout_idx,
            prompt=self.prompt,
            completion=self.completion,
            reward=self.reward,
            status="failed" if self.reward is None else "truncated" if self.is_truncated else "completed",
            error=self.error,
        )


@dataclass(frozen=True)
class Query:
    """Filter and order of rollouts. None: no condition; `text` matches prompt, completion or error."""

    text: str = ""
    step: int | None = None
    env: str | None = None
    status: str | None = None
    group: int | None = None
    index: int | None = None
    kind: str | None = None
    equal: bool | None = None
    """True: only rollouts of groups with equal rewards, False: only the others."""
    min_reward: float | None = None
    max_reward: float | None = None
    sort: str = "step"
    descending: bool = True


class RolloutIndex:
    """A growing index over the training and evaluation rollouts of a run, numbered in the order in which they are read.

    Methods may be called from any thread.
    """

    def __init__(self, run: LocalRun) -> None:
        self.run = run
        self._logprobs_path = run.files.trainer_logprobs
        self._sources: list[EvalDir | None] = [None]
        self._shown: dict[int, EvalDir] = {}  # by source; the others were replaced or removed
        self._attempts = AttemptSteps()
        self._offsets: dict[Path, int] = {}
        self._first = ""  # digest of the first line of training
        self._size = 0
        self._lock = threading.Lock()
        self._db = sqlite3.connect("", check_same_thread=False)  # a temporary file, removed when it is closed
        self._db.row_factory = sqlite3.Row
        self._db.executescript(SCHEMA)
        self._decode = msgspec.json.Decoder(_Line).decode
        self._decode_result = msgspec.json.Decoder(_Result).decode
        self._decode_recorded = msgspec.json.Decoder(_Recorded).decode

    def __len__(self) -> int:
        return self._size

    def grow(self, max_bytes: int = sys.maxsize) -> bool:
        """Index new lines, up to about `max_bytes` of training; returns whether there were any."""
        with self._lock, self._db:
            before = dict(self._offsets)
            evaluated = self._grow_evaluations()
            self._grow_logprobs()
            self._grow_training(max_bytes)
            return evaluated or self._offsets != before

    def is_outdated(self) -> bool:
        """Whether the rollouts were replaced by those of a new run, so that this index is of no use any more."""
        path = self.run.samples_path
        return is_replaced(path, self._offsets.get(path, 0), self._first)

    def select(self, query: Query) -> list[int]:
        """Numbers of the matching rollouts, in the requested order; missing values are last."""
        conditions = {
            "(source > 0) = ?": None if query.kind is None else query.kind == KINDS[1],
            "step = ?": query.step,
            "group_index = ?": query.group,
            "idx = ?": query.index,
            f"((source, step, group_index) IN ({EQUAL_GROUPS})) = ?": query.equal,
            "ifnull(env, 'none') = ?": query.env,
            "ifnull(status, 'none') = ?": query.status,
            "reward >= ?": query.min_reward,
            "reward <= ?": query.max_reward,
            "instr((SELECT searched FROM texts WHERE texts.id = rollouts.id), ?)": _searchable(query.text) or None,
        }
        used = {condition: value for condition, value in conditions.items() if value is not None}
        key = SORTS[SORTS.index(query.sort)]  # only these names become part of the statement
        found = self._fetch(
            f"SELECT id FROM rollouts WHERE {' AND '.join(['NOT hidden', *used])} "
            f"ORDER BY {key} IS NULL, {key} {'DESC' if query.descending else 'ASC'}, id",
            *used.values(),
        )
        return [number for (number,) in found]

    def groups(self) -> list[list[int]]:
        """Rollouts by group, in the order the groups appear."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for number, source, step, group in self._fetch(
            "SELECT id, source, step, group_index FROM rollouts WHERE NOT hidden ORDER BY id"
        ):
            key = (number,) if group is None else (source, step, group)
            groups.setdefault(key, []).append(number)
        return list(groups.values())

    def row(self, number: int) -> dict[str, Any]:
        """The full line of a rollout, with recorded trainer log-probs; `ValueError` if its file was removed."""
        [(source, start, size, *shared)] = self._fetch(
            "SELECT source, start, size, step, env, group_index, idx, status FROM rollouts WHERE id = ?", number
        )
        evaluation = self._sources[source]
        path = self.run.samples_path if evaluation is None else evaluation.results
        try:
            row: dict[str, Any] = msgspec.json.decode(_read(path, start, size))
        except OSError as error:
            raise ValueError(f"rollout {number} cannot be read: {path}: {error.strerror}") from error
        if evaluation is not None:
            return {**row, **dict(zip(("step", "env", "group_index", "index", "status"), shared, strict=True))}
        if "trainer_logprobs" not in row and (recorded := self._find_logprobs(row)) is not None:
            row["trainer_logprobs"] = recorded
        return row

    def brief(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """List entries of rollouts."""
        sql = (
            'SELECT id, source, step, env, group_index AS "group", idx AS "index", reward, advantage, status, tokens, '
            "scored, prompt, completion FROM rollouts JOIN texts USING (id) WHERE id = ?"
        )
        entries = [dict(row) for number in numbers for row in self._fetch(sql, number)]
        return [{**entry, "kind": KINDS[entry["source"] > 0], "scored": bool(entry["scored"])} for entry in entries]

    def siblings(self, number: int) -> list[int]:
        """The rollouts of the same group, including this one."""
        found = self._fetch(
            "SELECT other.id FROM rollouts AS this JOIN rollouts AS other USING (source, step, group_index, attempt) "
            "WHERE this.id = ? ORDER BY other.id",
            number,
        )
        return [other for (other,) in found] or [number]  # none without a group: NULL equals nothing

    def prompts(self, limit: int) -> list[dict[str, Any]]:
        """Prompts that were answered at several steps, those whose mean reward rose most first.

        Each with the first of its rollouts, the number of steps, and the mean rewards of the first and the last step.
        """
        found: dict[tuple[int, int], list[sqlite3.Row]] = {}
        for row in self._fetch(
            "SELECT prompt_key, source > 0 AS kind, step, avg(reward) AS reward, min(id) AS id FROM rollouts "
            "WHERE NOT hidden GROUP BY 1, 2, 3 ORDER BY step"
        ):
            found.setdefault((row["prompt_key"], row["kind"]), []).append(row)
        repeated = [rows for rows in found.values() if len(rows) > 1]
        gains = sorted(repeated, key=lambda rows: (rows[0]["reward"] or 0) - (rows[-1]["reward"] or 0))[:limit]
        entries = self.brief([rows[0]["id"] for rows in gains])
        return [
            {**entry, "steps": len(rows), "first": rows[0]["reward"], "last": rows[-1]["reward"]}
            for entry, rows in zip(entries, gains, strict=True)
        ]

    def history(self, number: int, limit: int = 2000) -> list[int]:
        """The rollouts of the same prompt at all steps, by step."""
        found = self._fetch(
            "SELECT other.id FROM rollouts AS this JOIN rollouts AS other USING (prompt_key) WHERE this.id = ? "
            "AND NOT other.hidden AND (this.source > 0) = (other.source > 0) ORDER BY other.step, other.id LIMIT ?",
            *(number, limit),
        )
        return [other for (other,) in found]

    def facts(self) -> dict[str, Any]:
        """Values available to filters, over all rollouts and per kind."""
        counts = self._fetch(
            "SELECT source > 0, env, status, step, count(*) FROM rollouts WHERE NOT hidden GROUP BY 1, 2, 3, 4"
        )
        kinds = {kind: [row for row in counts if KINDS[row[0]] == kind] for kind in KINDS}
        return {**_summarize(counts), "kinds": {kind: _summarize(rows) for kind, rows in kinds.items() if rows}}

    def _fetch(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        with self._lock:
            return self._db.execute(sql, values).fetchall()

    def _grow_training(self, max_bytes: int) -> None:
        begun = self._offsets.get(self.run.samples_path, 0)
        if not begun:
            self._first = digest_first_line(self.run.samples_path)
        for line, start, size in self._new_rows(self.run.samples_path, self._decode):
            if self._attempts.add(None, line.attempt, line.step):
                abandoned = "UPDATE rollouts SET hidden = 1 WHERE source = 0 AND attempt < ? AND step >= ?"
                self._db.execute(abandoned, (line.attempt, line.step))
            hidden = self._attempts.is_abandoned(None, line.attempt, line.step)
            self._insert(0, line, _num_tokens(line.tokens), start, size, hidden)
            if start + size - begun > max_bytes:
                return

    def _grow_evaluations(self) -> bool:
        """Index new and rewritten evaluations, hide replaced and removed ones; returns whether there were any."""
        found = [evaluation for evaluation in self.run.evaluations() if evaluation.results.exists()]
        present = set(found)
        gone = [number for number, evaluation in self._shown.items() if evaluation not in present]
        for number in gone:
            self._db.execute("UPDATE rollouts SET hidden = 1 WHERE source = ?", (number,))
            del self._shown[number]
        shown = set(self._shown.values())
        fresh = [evaluation for evaluation in found if evaluation not in shown]
        for evaluation in fresh:
            self._shown[len(self._sources)] = evaluation
            self._sources.append(evaluation)
            self._offsets.pop(evaluation.results, None)
            for result, start, size in self._new_rows(evaluation.results, self._decode_result):
                line = result.to_line(evaluation)
                self._insert(len(self._sources) - 1, line, result.completion_len or 0, start, size)
        return bool(fresh or gone)

    def _grow_logprobs(self) -> None:
        for row, start, size in self._new_rows(self._logprobs_path, self._decode_recorded):
            num_tokens = _num_tokens(row.trainer_logprobs)
            values = (row.step, row.group_index, row.index, num_tokens, row.attempt, start, size)
            with suppress(OverflowError):  # numbers that no run writes
                self._db.execute("INSERT INTO logprobs VALUES (?, ?, ?, ?, ?, ?, ?)", values)

    def _new_rows(self, path: Path, decode: Callable[[bytes], Row]) -> Iterator[tuple[Row, int, int]]:
        """Rows appended since the last call, with their position and size in bytes; invalid lines are skipped."""
        for end, line in complete_lines(path, self._offsets.get(path, 0)):
            self._offsets[path] = end
            try:
                row = decode(line)
            except (msgspec.DecodeError, RecursionError):
                continue
            yield row, end - len(line), len(line)

    def _insert(self, source: int, line: _Line, num_tokens: int, start: int, size: int, hidden: bool = False) -> None:
        key = (self._size, source, line.attempt, line.step, line.env, line.group_index, line.index)
        scored = _num_tokens(line.teacher_logprobs) > 0
        prompt_key = _hash(repr((line.env, line.prompt)))
        facts = (line.reward, line.advantage, line.status, num_tokens, scored, start, size, hidden, prompt_key)
        try:
            self._db.execute(f"INSERT INTO rollouts VALUES ({', '.join('?' * 16)})", (*key, *facts))
        except OverflowError:  # numbers that no run writes
            return
        # The last message of the prompt: earlier ones are often shared by all prompts.
        last = plain_text(line.prompt[-1:] if isinstance(line.prompt, list) else line.prompt)
        prompt, completion = plain_text(line.prompt), plain_text(line.completion)
        searched = _searchable("\n".join((prompt, completion, line.error or "")))
        texts = (self._size, last[:PREVIEW], completion[:PREVIEW], searched)
        self._db.execute("INSERT INTO texts VALUES (?, ?, ?, ?)", texts)
        self._size += 1

    def _find_logprobs(self, row: dict[str, Any]) -> list[float] | None:
        """The trainer's log-probs of a sample in the last attempt at its step; None without a unique match."""
        matches = self._fetch(
            "SELECT attempt, start, size FROM logprobs WHERE step = ? AND group_index IS ? AND idx IS ? AND tokens = ?",
            *(row.get("step", 0), row.get("group_index"), row.get("index"), len(row.get("tokens") or ())),
        )
        last = [match for match in matches if match[0] == max(number for number, *_ in matches)]
        if len(last) != 1:
            return None
        [(_, start, size)] = last
        found: list[float] = msgspec.json.decode(_read(self._logprobs_path, start, size))["trainer_logprobs"]
        return found


def plain_text(value: Any) -> str:
    """Plain text of a prompt or completion: a string, or messages."""
    if isinstance(value, list):
        return "\n".join(plain_text(part.get("content", part.get("text"))) for part in value if isinstance(part, dict))
    return "" if value is None else str(value)


def _summarize(counts: Sequence[sqlite3.Row]) -> dict[str, Any]:
    """Totals of (kind, environment, status, step, count) rows."""
    return {
        "count": sum(row[4] for row in counts),
        "envs": sorted({row[1] or "none" for row in counts}),
        "statuses": sorted({row[2] or "none" for row in counts}),
        "steps": sorted({row[3] for row in counts}),
    }


def _searchable(text: str) -> str:
    """Text for a case-insensitive search; SQLite stores no lone surrogates."""
    return text.lower().encode(errors="replace").decode()


def _hash(text: str) -> int:
    """A 64-bit key of a text."""
    return int.from_bytes(blake2b(text.encode(errors="replace"), digest_size=8).digest(), "big", signed=True)


def _num_tokens(values: msgspec.Raw) -> int:
    """Length of a JSON list of numbers, which is not parsed; 0 for null."""
    raw = bytes(values)
    return raw.count(b",") + 1 if len(raw) > 2 and raw != b"null" else 0


def _read(path: Path, start: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(size)
